"""`holdfast jobs`: find jobs, look at one, cancel."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from holdfast.app import Holdfast
from holdfast.cli.job_view import JOB_COLUMNS, job_row, record, write_job
from holdfast.cli.listing import write_list
from holdfast.cli.options import JsonOption, LimitOption, QueueOption, StoreOption, TaskOption, operate
from holdfast.cli.output import note, write_json, write_line
from holdfast.cli.wording import visible
from holdfast.errors import HoldfastError
from holdfast.job import Job, State
from holdfast.store import CancelAnswer

jobs = typer.Typer(no_args_is_help=True, help="Find jobs, look at one, cancel.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
PayloadOption = Annotated[bool, typer.Option("--payload", help="Show the payload too: it may hold secrets.")]


@jobs.command("list")
def list_jobs(
    store: StoreOption,
    state: Annotated[list[State] | None, typer.Option(help="Only jobs in this state; may be repeated.")] = None,
    queue: QueueOption = None,
    task: TaskOption = None,
    correlation_id: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only jobs with this correlation id.")
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
) -> None:
    """List jobs, the newest first."""
    operate(
        store,
        lambda app: write_list(
            app,
            JOB_COLUMNS,
            job_row,
            as_json=as_json,
            states=state or (),
            queue=queue,
            task=task,
            correlation_id=correlation_id,
            limit=limit,
        ),
    )


@jobs.command("show")
def show_job(
    store: StoreOption, job_id: IdArgument, payload: PayloadOption = False, as_json: JsonOption = False
) -> None:
    """Show everything about a job.

    Its state, its errors with their tracebacks, its progress and result; its payload only if asked for.
    """
    job, now = operate(store, lambda app: look_up(app, job_id))
    if as_json:
        write_json(record(job, payload=payload))
    else:
        write_job(job, now, payload=payload)


async def look_up(app: Holdfast, job_id: str) -> tuple[Job, int]:
    """The job, or `JobNotFound`; and the store's time."""
    handle = await app.aget(job_id)
    return cast(Job, handle.details), await app.store.now()


@jobs.command("cancel")
def cancel_jobs(
    store: StoreOption, job_ids: Annotated[list[str], typer.Argument(metavar="ID", help="The jobs' ids.")]
) -> None:
    """Cancel jobs.

    One that waits is cancelled at once. One that runs is asked to stop, through its worker's next heartbeat.
    """
    if not operate(store, lambda app: _cancel(app, job_ids)):
        raise typer.Exit(1)


async def _cancel(app: Holdfast, job_ids: list[str]) -> bool:
    """Whether all of them were cancelled, or asked to stop."""
    done = True
    for job_id in job_ids:
        try:
            answer = await app.acancel(job_id)
        except HoldfastError as error:
            note(f"{job_id}: {error}")
            done = False
            continue
        if answer is CancelAnswer.ENDED:
            note(f"{job_id}: it has ended already")
            done = False
        else:
            write_line(f"{visible(job_id)} {_MEANING[answer]}")
    return done


_MEANING = {
    CancelAnswer.CANCELLED: "cancelled",
    CancelAnswer.ASKED: "is running: its worker is asked to stop it with the next heartbeat",
}
