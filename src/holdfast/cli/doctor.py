"""`holdfast doctor`: what an accepted job survives in this store, and whether anything needs attention."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import typer

from holdfast.app import Holdfast
from holdfast.cli.options import JsonOption, StoreArgument, application
from holdfast.cli.output import Cell, Column, write_json, write_styled, write_table
from holdfast.cli.wording import counted, masked, visible
from holdfast.cli.workers import is_silent
from holdfast.errors import StoreError
from holdfast.store import MOST_PER_CALL, Examinable, Finding, QueueCounts, SessionView, Verdict, all_sessions

_COLUMNS = (Column("VERDICT"), Column("WHAT"), Column("FOUND", fit="wrap"))
_STYLES = {Verdict.OK: "green", Verdict.WEAK: "yellow", Verdict.BAD: "bold red"}


def doctor(
    store: StoreArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Read every page of the data too: it may take long.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what an accepted job survives in this store.

    It is read from the store's live settings, with one line of advice for whatever is weak. Exit code 1 if something
    is bad.
    """
    app = application(store)
    findings = asyncio.run(_examine(app, deep=deep))
    if as_json:
        found = [msgspec.to_builtins(finding) for finding in findings]
        write_json({"store": masked(store), "findings": found})
    else:
        _write(findings)
    if any(finding.verdict is Verdict.BAD for finding in findings):
        raise typer.Exit(1)


async def _examine(app: Holdfast, *, deep: bool) -> list[Finding]:
    findings: list[Finding] = []
    try:
        # First, because it creates nothing: the rest opens the store.
        if isinstance(app.store, Examinable):
            findings += await app.store.examine(deep=deep)
        counts = await app.acounts()
        now = await app.store.now()
        sessions = await all_sessions(app.store)
        lost = len(await app.store.lost(MOST_PER_CALL))
        findings += [*_queues(counts), *_sessions(sessions, now, lost, sum(queue.ready for queue in counts))]
    except StoreError as error:
        findings.append(Finding("store", f"{type(error).__name__}: {masked(str(error))}", Verdict.BAD))
    finally:
        await app.aclose()
    return findings


def _queues(counts: Sequence[QueueCounts]) -> Iterator[Finding]:
    for queue in counts:
        value = (
            f"{queue.ready} ready, {queue.scheduled} scheduled, {queue.in_flight} in flight, "
            f"{counted(queue.failed, 'dead letter')}"
        )
        if queue.paused:
            advice = f"nobody may claim from it: holdfast queues resume {queue.queue}"
            yield Finding(f"queue {queue.queue}", f"paused, {value}", Verdict.WEAK, advice)
        else:
            yield Finding(f"queue {queue.queue}", value)


def _sessions(sessions: Sequence[SessionView], now: int, lost: int, ready: int) -> Iterator[Finding]:
    opened = sum(view.open for view in sessions)
    silent = sum(is_silent(view, now) for view in sessions)
    closed = len(sessions) - opened
    value = f"{opened} open"
    value += f", {silent} of them silent" if silent else ""
    value += f", {closed} closed within the last hour" if closed else ""
    if silent:
        advice = "no keeper has closed the silent ones: run a worker, or holdfast keep"
        yield Finding("workers", value, Verdict.WEAK, advice)
    elif ready and not opened:
        advice = f"{counted(ready, 'job')} can be claimed, and nobody is there to do it: start a worker"
        yield Finding("workers", value, Verdict.WEAK, advice)
    else:
        yield Finding("workers", value)
    if lost:
        number = f"{counted(lost, 'job')}" + (" or more" if lost == MOST_PER_CALL else "")
        advice = "a keeper brings them back within seconds: run a worker, or holdfast keep"
        yield Finding("lost jobs", f"{number} in flight without a worker", Verdict.WEAK, advice)


def _write(findings: Sequence[Finding]) -> None:
    write_table(
        _COLUMNS,
        ((Cell(finding.verdict, _STYLES[finding.verdict]), finding.name, finding.value) for finding in findings),
    )
    for finding in findings:
        if finding.advice:
            told = f": {visible(finding.name)}: {visible(finding.advice)}"
            write_styled((finding.verdict, _STYLES[finding.verdict]), (told, ""))
