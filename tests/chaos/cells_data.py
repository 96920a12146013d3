"""Harm by what others do to a store: to a Redis server by its commands, to a SQLite file by a lock."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

from tests.chaos.cell import Cell
from tests.chaos.rig import PATIENCE, TTL, Rig
from tests.servers import redis_command
from tests.worker.programs import eventually


def _scripts_flushed(rig: Rig) -> None:
    rig.worker()
    with rig.producer():
        for _ in range(3):
            rig.wait_for_more(10)
            rig.fault("scripts flushed", rig.engine)
            redis_command(rig.server.port, "SCRIPT", "FLUSH", "SYNC")
        rig.wait_for_more(10)


def _memory_full(rig: Rig) -> None:
    """New jobs are refused; those that are there are claimed and settled all the same."""
    waiting = rig.enqueue("quick", 30, text="before")
    rig.fault("memory full", rig.engine)
    used = int(rig.database.server.info("memory")["used_memory"])  # type: ignore[attr-defined]
    redis_command(rig.server.port, "CONFIG", "SET", "maxmemory", used)
    try:
        with rig.producer(calls=_large):
            eventually(lambda: _was_refused(rig), "an enqueue fails", PATIENCE)
        rig.worker()
        rig.wait_for_starts(len(waiting), *waiting)
        rig.drain()
    finally:
        redis_command(rig.server.port, "CONFIG", "SET", "maxmemory", 0)
    with rig.producer():
        rig.wait_for_more(10)


def _large() -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    while True:
        yield "quick", {"number": number, "text": os.urandom(20_000).hex()}
        number += 1


def _was_refused(rig: Rig) -> bool:
    lines = (rig.folder / "history-rig.jsonl").read_text().split("\n")
    return any('"event":"enqueue"' in line and '"answer":"ok"' not in line for line in lines)


def _lock_held(rig: Rig) -> None:
    rig.worker()
    with rig.producer():
        rig.wait_for_more(20)
        rig.fault("lock held", rig.engine)
        other = sqlite3.connect(rig.sqlite_file, isolation_level=None, timeout=PATIENCE)
        try:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(2 * TTL)
            other.execute("ROLLBACK")
        finally:
            other.close()
        rig.wait_for_more(20)


CELLS: tuple[Cell, ...] = (
    Cell(
        name="scripts flushed",
        faults="F20",
        about="somebody makes the server forget every script, three times",
        engines=("redis",),
        run=_scripts_flushed,
    ),
    Cell(
        name="memory full",
        faults="F20",
        about="the server's memory is full: new jobs are refused, and what is there is claimed and settled",
        engines=("redis",),
        run=_memory_full,
    ),
    Cell(
        name="lock held",
        faults="F22",
        about="another program holds the write lock of the file for longer than a lease lasts",
        engines=("sqlite",),
        run=_lock_held,
    ),
)
