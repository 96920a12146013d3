"""The store object: what it leaves behind when it is dropped, and that opening and closing stop no event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.errors import InvalidOption, OutcomeUnknown, StoreUnavailable
from holdfast.store import JobQuery
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite import store as module
from tests.sqlite.helpers import eventually, live_ids, new_job, raw


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


# Dropped without `close`.


def left_open(path: Path) -> list[str]:
    """The descriptors of the file and its side files."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if link.startswith(str(path))]


def sqlite_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-sqlite")]


async def test_a_call_that_was_answered_keeps_nothing_alive(path: Path) -> None:
    async with SqliteStore(path) as store:
        payload = new_job()
        held = weakref.ref(verb := lambda db: payload)
        assert store._opened is not None
        for calls in (store._opened.writer.calls, store._opened.reader.calls):
            assert await calls.submit(verb) is payload
        del verb
        await eventually(lambda: held() is None)


async def test_a_store_that_is_dropped_is_closed(path: Path) -> None:
    threads = len(sqlite_threads())

    async def use() -> weakref.ref[SqliteStore]:
        store = SqliteStore(path)
        await store.insert([new_job()])
        await store.counts()
        assert left_open(path)
        return weakref.ref(store)

    dropped = [await use() for _ in range(5)]

    def is_gone() -> bool:
        gc.collect()
        return not any(store() for store in dropped) and not left_open(path) and len(sqlite_threads()) <= threads

    await eventually(is_gone)
    assert not module._open
    assert len(live_ids(path)) == 5


async def test_a_store_that_was_closed_is_not_closed_again_when_it_is_dropped(path: Path) -> None:
    store = SqliteStore(path)
    await store.insert([new_job()])
    store.close()
    await store.insert([new_job()])
    first = store._dropped
    store.close()
    assert first is not None
    assert not first.alive


DROPPED_THEN_FORKED = """
import asyncio, os, signal, sys
from pathlib import Path
from holdfast.ports import Ports
from holdfast.stores.sqlite import SqliteStore
from tests.sqlite.helpers import new_job, run_sql

class NoClosers:
    "The moment in which a dropped store is not closed yet lasts for ever."
    def thread(self, target, name):
        if name != "holdfast-sqlite-closer":
            return Ports().spawner.thread(target, name)

path = Path(sys.argv[1])

async def drop():
    store = SqliteStore(path, ports=Ports(spawner=NoClosers()))
    await store.insert([new_job()])
    await store.counts()

asyncio.run(drop())
child_ready, say_ready = os.pipe()
if os.fork():
    os.read(child_ready, 1)
    os._exit(0)  # its locks go with it
signal.alarm(20)
parent = os.getppid()
store = SqliteStore(path)
store.insert_blocking([new_job()])
os.write(say_ready, b"x")
while os.getppid() == parent:
    pass
os.system(f"{sys.executable} -c \\"import sqlite3; c = sqlite3.connect('{path}'); c.execute('CREATE TABLE z (a)')\\"")
assert os.path.exists(f"{path}-wal"), "a visitor believed that he was the last"
store.insert_blocking([new_job()])
print(len(run_sql(path, "SELECT 1 FROM holdfast_ready")), flush=True)
os._exit(0)
"""


def test_forking_after_a_store_was_dropped(path: Path) -> None:
    """SQLite believes that a child holds its parent's locks, also those of a store that nobody has any more."""
    command = [sys.executable, "-W", "ignore", "-c", DROPPED_THEN_FORKED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("3\n", "")
    assert len(live_ids(path)) == 3


# The event loop goes on.


@contextlib.asynccontextmanager
async def no_stall(seconds: float) -> AsyncIterator[None]:
    """Fails if the event loop stands still for that long."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.03)
    yield
    await asyncio.sleep(0.03)
    ticking.cancel()
    assert max(gaps) < seconds


@contextlib.contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    connection = raw(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    finally:
        connection.close()


async def test_the_first_use_of_a_locked_file_stops_no_event_loop(path: Path) -> None:
    store = SqliteStore(path, timeout=0.8)
    with locked(path):
        async with no_stall(0.4):
            calls = [store.insert([new_job()]), store.counts(), store.find(JobQuery()), store.__aenter__()]
            answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers), answers
    await store.insert([new_job()])
    await store.__aexit__()


async def test_many_first_calls_open_once_on_one_thread(path: Path) -> None:
    store = SqliteStore(path)
    with locked(path):
        calls = [asyncio.create_task(store.insert([new_job()])) for _ in range(50)]
        await asyncio.sleep(0.05)
        assert sqlite_threads().count("holdfast-sqlite-opener") == 1
        calls.pop().cancel()  # it stops no other
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    assert len(live_ids(path)) == 49
    assert store._awaited == {}
    await store.__aexit__()


async def test_closing_while_a_call_waits_stops_no_event_loop(path: Path) -> None:
    store = SqliteStore(path, timeout=0.8)
    await store.insert([new_job()])
    with locked(path):
        waiting = asyncio.create_task(store.insert([new_job()]))
        async with no_stall(0.4):
            await store.__aexit__()
        assert isinstance(waiting.exception(), StoreUnavailable)


# Errors.


async def test_a_read_that_gets_no_answer_wrote_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.stores.sqlite.calls._REPLY_GRACE", 0.1)
    disk = threading.Event()
    async with SqliteStore(path, timeout=0.1) as store:
        assert store._opened is not None
        with pytest.raises(StoreUnavailable, match="has not answered"):
            await store._opened.reader.calls.submit(lambda db: disk.wait(30))
        disk.set()
    assert not issubclass(StoreUnavailable, OutcomeUnknown)


def test_a_path_with_a_nul() -> None:
    with pytest.raises(InvalidOption, match="NUL"):
        SqliteStore("a\0b.db")


@pytest.mark.parametrize("name", ["x" * 300, "\ud800.db", "loop.db"], ids=["long", "surrogate", "loop"])
def test_a_path_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.db").symlink_to("loop.db")
    with pytest.raises(StoreUnavailable, match=r"cannot (open|create) the database file"):
        SqliteStore(tmp_path / name).insert_blocking([new_job()])
