"""Lists of jobs, page by page: the store answers a page at a time, and a page may be short."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from holdfast.app import Holdfast
from holdfast.cli.job_view import summary
from holdfast.cli.output import Column, Row, note, write_json, write_table
from holdfast.errors import InvalidOption
from holdfast.job import Job, State

_PAGE = 200


async def pages(
    app: Holdfast,
    *,
    states: Sequence[State],
    queue: str | None = None,
    task: str | None = None,
    correlation_id: str | None = None,
    limit: int | None = None,
) -> AsyncIterator[tuple[list[Job], bool]]:
    """The jobs that match, newest first, up to `limit`: some jobs, and whether there may be more behind them."""
    cursor, left = None, limit
    while left is None or left > 0:
        page = await app.afind(
            states=states,
            queue=queue,
            task=task,
            correlation_id=correlation_id,
            cursor=cursor,
            limit=_PAGE if left is None else min(_PAGE, left),
        )
        jobs = [handle.details for handle in page.jobs if handle.details is not None]
        yield jobs, page.next is not None
        if left is not None:
            left -= len(jobs)
        if page.next is None:
            return
        cursor = page.next


async def write_list(
    app: Holdfast,
    columns: Sequence[Column],
    row: Callable[[Job, int], Row],
    *,
    as_json: bool,
    states: Sequence[State],
    queue: str | None,
    task: str | None,
    correlation_id: str | None = None,
    limit: int,
) -> None:
    """List the jobs that match, and say so if there are more than `limit`."""
    found: list[Job] = []
    number, more = 0, False
    async for jobs, more_behind in pages(
        app, states=states, queue=queue, task=task, correlation_id=correlation_id, limit=limit
    ):
        number += len(jobs)
        more = more_behind
        if as_json:
            for job in jobs:
                write_json(summary(job))
        else:
            found += jobs
    now = await app.store.now()
    write_table(columns, (row(job, now) for job in found))
    if not number and not as_json:
        note("no jobs")
    if number and more:
        note(f"the newest {number}; --limit shows more")


def chosen(ids: Sequence[str] | None, everything: bool, queue: str | None, task: str | None) -> Sequence[str]:
    """The ids that were named, none for `--all`. `InvalidOption` if it is not one or the other."""
    if everything == bool(ids):
        raise InvalidOption("name the jobs by their ids, or say --all")
    if not everything and (queue is not None or task is not None):
        raise InvalidOption("--queue and --task choose among --all; named jobs need neither")
    return ids or ()
