"""`holdfast dead`: dead letters, the jobs that failed for good. Look at them, replay them, remove them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Annotated

import typer

from holdfast.app import Holdfast
from holdfast.cli.job_view import DEAD_COLUMNS, dead_row, record, write_job
from holdfast.cli.jobs import IdArgument, PayloadOption, look_up
from holdfast.cli.listing import chosen, pages, write_list
from holdfast.cli.options import JsonOption, LimitOption, QueueOption, StoreOption, TaskOption, operate
from holdfast.cli.output import note, write_json, write_line
from holdfast.cli.wording import counted
from holdfast.errors import HoldfastError, InvalidOption, JobNotFound
from holdfast.job import Job, State
from holdfast.lifecycle import Applied, replay
from holdfast.store import Store

dead = typer.Typer(no_args_is_help=True, help="Jobs that failed for good: look, replay, remove.")

IdsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="The jobs' ids; or --all.", show_default=False)
]

Deed = Callable[[Store, Sequence[Job]], Awaitable[int]]
"""Does something with some dead letters and says how many it was."""


@dead.command("list")
def list_dead(
    store: StoreOption,
    queue: QueueOption = None,
    task: TaskOption = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, the newest first."""
    operate(
        store,
        lambda app: write_list(
            app,
            DEAD_COLUMNS,
            dead_row,
            as_json=as_json,
            states=(State.FAILED,),
            queue=queue,
            task=task,
            limit=limit,
        ),
    )


@dead.command("show")
def show_dead(
    store: StoreOption, job_id: IdArgument, payload: PayloadOption = False, as_json: JsonOption = False
) -> None:
    """Show everything about a dead letter, its errors with their tracebacks."""
    job, now = operate(store, lambda app: look_up(app, job_id))
    _require_dead(job)
    if as_json:
        write_json(record(job, payload=payload))
    else:
        write_job(job, now, payload=payload)


@dead.command("replay")
def replay_dead(
    store: StoreOption,
    job_ids: IdsArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Every dead letter that matches.")] = False,
    queue: QueueOption = None,
    task: TaskOption = None,
) -> None:
    """Bring dead letters back to their queues.

    They keep their payload and their history, and may fail as often again as a new job.
    """
    ids = chosen(job_ids, everything, queue, task)
    operate(store, lambda app: _do(app, ids, queue, task, _replay, "replayed"))


@dead.command("purge")
def purge_dead(
    store: StoreOption,
    job_ids: IdsArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Every dead letter that matches.")] = False,
    queue: QueueOption = None,
    task: TaskOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: they are gone for good.")] = False,
) -> None:
    """Remove dead letters for good, with their payloads."""
    ids = chosen(job_ids, everything, queue, task)
    if not yes:
        _ask(counted(len(ids), "dead letter") if ids else "every dead letter that matches")
    operate(store, lambda app: _do(app, ids, queue, task, _forget, "removed"))


def _ask(what: str) -> None:
    """Go on only if a person at a terminal says so."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidOption("this removes jobs for good: say --yes")
    if not typer.confirm(f"Remove {what} for good?", err=True):
        note("nothing was removed")
        raise typer.Exit(1)


async def _do(
    app: Holdfast, ids: Sequence[str], queue: str | None, task: str | None, deed: Deed, done_word: str
) -> None:
    """Do it with the named jobs, or with all that match. Exit 1 if a job could not be had."""
    done, missed = 0, False
    total = len(ids) or (await _number(app, queue) if task is None else None)
    batches = _named(app, ids) if ids else _all(app, queue, task)
    with _progress(total) as advance:
        try:
            async for jobs, refused in batches:
                number = await deed(app.store, jobs)
                done += number
                missed = missed or refused or number < len(jobs)
                advance(len(jobs))
        except HoldfastError:
            note(f"{done_word} {counted(done, 'job')} before this:")
            raise
    write_line(f"{done_word} {counted(done, 'job')}")
    if missed:
        raise typer.Exit(1)


async def _named(app: Holdfast, ids: Sequence[str]) -> AsyncIterator[tuple[list[Job], bool]]:
    """Each named dead letter, or nothing and True for one that is none."""
    for job_id in dict.fromkeys(ids):
        try:
            job, _ = await look_up(app, job_id)
            _require_dead(job)
            yield [job], False
        except JobNotFound as error:
            note(str(error))
            yield [], True


async def _all(app: Holdfast, queue: str | None, task: str | None) -> AsyncIterator[tuple[list[Job], bool]]:
    async for jobs, _ in pages(app, states=(State.FAILED,), queue=queue, task=task):
        yield jobs, False


async def _number(app: Holdfast, queue: str | None) -> int:
    return sum(counts.failed for counts in await app.acounts() if queue in (None, counts.queue))


async def _replay(store: Store, jobs: Sequence[Job]) -> int:
    # The move that the job's own version guards, not `app.replay`: a job that somebody else has replayed meanwhile,
    # and that has succeeded since, must not run again.
    answers = await store.apply([replay(job) for job in jobs])
    for job, answer in zip(jobs, answers, strict=True):
        if answer is Applied.KEY_TAKEN:
            note(f"{job.id}: its idempotency key belongs to another job now; it stays a dead letter")
        elif answer in (Applied.STALE, Applied.GONE):
            note(f"{job.id}: somebody else has replayed or removed it meanwhile")
    return sum(answer in (Applied.APPLIED, Applied.ALREADY) for answer in answers)


async def _forget(store: Store, jobs: Sequence[Job]) -> int:
    return await store.forget([job.id for job in jobs]) if jobs else 0


def _require_dead(job: Job) -> None:
    if job.state is not State.FAILED:
        raise JobNotFound(f"job {job.id} is {job.state}, not a dead letter")


@contextlib.contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one. What it yields takes the number of jobs that were just dealt with."""
    if not sys.stderr.isatty():
        yield lambda number: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        line = bar.add_task("", total=total)
        yield lambda number: bar.advance(line, number)
