"""The log is made long at once, so that commits need not lengthen it; nothing that is in it is touched."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.log import LOG_BYTES, lengthen
from holdfast.stores.sqlite.writer import _COMMITS_OF_A_SHORT_LOG
from tests.sqlite.helpers import CHILDREN, is_sound, live_ids, new_job, raw, start_child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, timeout=2)
    yield store
    store.close()


def log(path: Path) -> Path:
    return Path(f"{path}-wal")


def insert(store: SqliteStore, count: int = 1) -> list[str]:
    return [store.insert_blocking([new_job()])[0].job_id for _ in range(count)]


def after_a_power_cut(path: Path) -> Path:
    """What another machine finds on this disk: the file and its log, without anybody's memory."""
    found = path.parent / "found" / path.name
    found.parent.mkdir()
    shutil.copy(path, found)
    shutil.copy(log(path), log(found))
    return found


def test_the_log_becomes_long_after_some_commits_and_keeps_its_jobs(store: SqliteStore, path: Path) -> None:
    ids = insert(store, _COMMITS_OF_A_SHORT_LOG - 1)
    assert log(path).stat().st_size < LOG_BYTES
    ids += insert(store)
    size = log(path).stat().st_size
    assert size > LOG_BYTES
    ids += insert(store, 20)
    assert log(path).stat().st_size == size
    found = after_a_power_cut(path)
    assert live_ids(found) == live_ids(path) == ids
    assert is_sound(found)


async def test_awaited_inserts_make_it_long_too(store: SqliteStore, path: Path) -> None:
    for _ in range(_COMMITS_OF_A_SHORT_LOG):
        await store.insert([new_job()])
    assert log(path).stat().st_size > LOG_BYTES


def test_it_grows_no_longer_than_it_was_made(store: SqliteStore, path: Path) -> None:
    ids = insert(store, _COMMITS_OF_A_SHORT_LOG)
    size = log(path).stat().st_size
    ids += insert(store, 1200)  # two checkpoints
    assert log(path).stat().st_size == size
    assert live_ids(after_a_power_cut(path)) == ids


def test_a_second_store_leaves_a_long_log_alone(store: SqliteStore, path: Path) -> None:
    insert(store, _COMMITS_OF_A_SHORT_LOG)
    written = log(path).stat().st_size
    second = SqliteStore(path)
    insert(second, _COMMITS_OF_A_SHORT_LOG)
    second.close()
    assert log(path).stat().st_size == written


def test_relaxed_commits_wait_for_no_disk_and_need_no_long_log(path: Path) -> None:
    relaxed = SqliteStore(path, durability="relaxed")
    insert(relaxed, 2 * _COMMITS_OF_A_SHORT_LOG)
    assert log(path).stat().st_size < LOG_BYTES
    relaxed.close()


def test_no_room_for_it_is_no_reason_to_refuse_a_job(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = insert(store, _COMMITS_OF_A_SHORT_LOG - 1)
    size = log(path).stat().st_size
    real = os.pwrite
    writes: list[int] = []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        writes.append(offset)
        return real(descriptor, data[:5000], offset)

    monkeypatch.setattr(os, "pwrite", full)
    ids += insert(store, 2)
    assert writes == [size]  # it was tried, once
    assert log(path).stat().st_size < size + 50_000
    assert live_ids(after_a_power_cut(path)) == ids


async def test_whatever_goes_wrong_with_it_is_no_reason_to_refuse_a_job(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none for the writer's thread to end: whoever awaits a write would wait in vain."""

    def fails(log: str) -> None:
        raise MemoryError

    monkeypatch.setattr("holdfast.stores.sqlite.writer.lengthen", fails)
    for _ in range(2 * _COMMITS_OF_A_SHORT_LOG + 1):
        await store.insert([new_job()])
    insert(store, _COMMITS_OF_A_SHORT_LOG)


def test_it_is_flushed_before_anybody_writes_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"x" * 100)
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    lengthen(str(file), 1_000_000)
    assert sizes == [1_000_000]
    assert file.read_bytes() == b"x" * 100 + bytes(999_900)


def test_without_room_it_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"x" * 100)
    real = os.pwrite

    def half(descriptor: int, data: bytes, offset: int) -> int:
        if offset > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:5000], offset)

    monkeypatch.setattr(os, "pwrite", half)
    lengthen(str(file), 1_000_000)
    assert file.read_bytes() == b"x" * 100


def test_whoever_writes_is_not_waited_for(store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    insert(store, _COMMITS_OF_A_SHORT_LOG - 1)
    other = raw(path)
    other.execute("BEGIN IMMEDIATE")
    lengthened: list[str] = []
    monkeypatch.setattr("holdfast.stores.sqlite.writer.lengthen", lengthened.append)
    store._open().writer._see_to_the_log()
    other.close()
    assert not lengthened  # the lock is somebody else's, and only its owner may touch the log
    insert(store, _COMMITS_OF_A_SHORT_LOG)
    assert lengthened == [str(log(path))]  # another time, then


@pytest.mark.parametrize("size", [0, 100])
def test_a_log_that_has_not_begun_or_is_long_enough_stays(tmp_path: Path, size: int) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"x" * size)
    lengthen(str(file), 100)
    assert file.read_bytes() == b"x" * size


def insert_at_once(path: Path, barrier: Barrier) -> None:
    barrier.wait(10)
    store = SqliteStore(path, timeout=20)
    insert(store, 3 * _COMMITS_OF_A_SHORT_LOG)
    os._exit(0)  # without closing: nobody brings the log to the file


def test_processes_that_all_make_it_long_lose_no_job(tmp_path: Path) -> None:
    for number in range(5):
        path = tmp_path / f"{number}" / "jobs.db"
        path.parent.mkdir()
        barrier = CHILDREN.Barrier(4)
        children = [start_child(insert_at_once, path, barrier) for _ in range(4)]
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0] * 4
        assert log(path).stat().st_size > LOG_BYTES
        assert len(live_ids(after_a_power_cut(path))) == 4 * 3 * _COMMITS_OF_A_SHORT_LOG
        assert is_sound(path)
