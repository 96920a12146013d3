"""`holdfast queues`: what waits in each queue; stop and resume claims."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from holdfast.app import Holdfast
from holdfast.cli.options import JsonOption, StoreOption, operate
from holdfast.cli.output import Cell, Column, Row, note, write_json, write_line, write_table
from holdfast.store import QueueCounts

queues = typer.Typer(no_args_is_help=True, help="What waits in each queue; stop and resume claims.")

NameArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]

COUNTED = ("ready", "scheduled", "in_flight", "succeeded", "failed", "cancelled")
QUEUE_COLUMNS = (
    Column("QUEUE"),
    *(Column(name.replace("_", " ").upper(), right=True) for name in COUNTED),
    Column("PAUSED"),
)
_STYLES = {"ready": "cyan", "in_flight": "yellow", "failed": "red"}


def queue_row(counts: QueueCounts) -> Row:
    """The queue as a line of `QUEUE_COLUMNS`."""
    numbers = [(name, getattr(counts, name)) for name in COUNTED]
    cells = [Cell(f"{number}", _STYLES.get(name, "") if number else "dim") for name, number in numbers]
    return (counts.queue, *cells, Cell("yes", "bold yellow") if counts.paused else "")


def queue_record(counts: QueueCounts) -> dict[str, Any]:
    """The queue as a line of `--json`."""
    return msgspec.structs.asdict(counts)


@queues.command("list")
def list_queues(store: StoreOption, as_json: JsonOption = False) -> None:
    """List every queue that has jobs or is paused."""
    found = operate(store, Holdfast.acounts)
    if as_json:
        for counts in found:
            write_json(queue_record(counts))
        return
    write_table(QUEUE_COLUMNS, map(queue_row, found))
    if not found:
        note("no queues: nothing was ever enqueued here, or all of it has ended and was pruned")


@queues.command("pause")
def pause_queue(store: StoreOption, queue: NameArgument) -> None:
    """Stop claims from a queue. What runs goes on, and so does enqueuing."""
    if not operate(store, lambda app: _steer(app, queue, pause=True)):
        note(f"queue {queue!r} has no jobs; is the name right?")
    write_line(f"{queue} is paused")


@queues.command("resume")
def resume_queue(store: StoreOption, queue: NameArgument) -> None:
    """Let claims from a queue go on."""
    if not operate(store, lambda app: _steer(app, queue, pause=False)):
        note(f"queue {queue!r} was not paused and has no jobs; is the name right?")
    write_line(f"{queue} is open")


async def _steer(app: Holdfast, queue: str, *, pause: bool) -> bool:
    """Pause or resume the queue. Whether the store knew of it before."""
    known = any(counts.queue == queue for counts in await app.acounts())
    await (app.apause(queue) if pause else app.aresume(queue))
    return known
