"""When the watcher looks for commits of others: told by writes to the log where it hears them, else by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.ports import SystemClock
from holdfast.stores.sqlite import SqliteStore, inotify, watcher
from holdfast.stores.sqlite.inotify import FileNotice
from holdfast.stores.sqlite.watcher import Pace
from tests.sqlite.helpers import CHILDREN, eventually, new_job, run_sql, start_child

EVER = 30.0
"""Seconds after which something does not happen any more, on however busy a machine."""
NEVER = 600.0
NOBODY_HEARS = 0x400
"""IN_DELETE_SELF alone."""


# The pace, in a world where time passes only by waiting.


class World(SystemClock):
    """A clock, and what is heard of a log to which something is written at these times, if anything can be heard."""

    def __init__(self, *writes: float, follows: bool = True) -> None:
        self.time = 0.0
        self.pauses: list[float] = []
        self.follows = follows
        self.closed = False
        self._writes = list(writes)
        self._listens = False
        self._news = False

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds

    def follow(self) -> bool:
        if not self.follows or self.closed:
            return False
        if not self._listens:
            self._unheard_of()
            self._listens = self._news = True
        return True

    def wait(self, seconds: float) -> bool:
        if self._news:
            self._news = False
            return True
        if not self._listens or not self._writes or self._writes[0] > self.time + seconds:
            self.time += seconds
            return False
        self.time = max(self.time, self._writes[0])
        self._listens = False
        return True

    def start_over(self) -> None:
        self._unheard_of()
        self._listens, self._news = True, False

    def _unheard_of(self) -> None:
        """What was written by now will not be heard of any more."""
        while self._writes and self._writes[0] <= self.time:
            del self._writes[0]

    def close(self) -> None:
        self.closed = True


def looks(world: World, until: float, others: Callable[[float], bool] = lambda now: False) -> list[float]:
    """When a watcher at this pace looks. `others`: whether a look at that time shows something."""
    pace = Pace(world, world)
    times = []
    while world.time < until:
        pace.wait(NEVER)
        times.append(world.time)
        pace.looked(others=others(world.time))
    return times


def committed(*times: float) -> Callable[[float], bool]:
    """Each of them is shown by the first look after it."""
    left = list(times)

    def shows(now: float) -> bool:
        seen = [time for time in left if time <= now]
        del left[: len(seen)]
        return bool(seen)

    return shows


POLLING = [0.005] * 30 + [0.025] * 30


def test_where_nothing_is_heard_it_polls() -> None:
    world = World(follows=False)
    looks(world, 3.0)
    assert world.pauses == POLLING + [0.04] * (len(world.pauses) - 60)
    assert len(world.pauses) > 70


def test_polling_begins_anew_with_a_commit_of_others() -> None:
    world = World(follows=False)
    looks(world, 2.0, committed(1.5))
    again = world.pauses.index(0.005, 60)
    assert world.pauses[60:again] == [0.04] * (again - 60)
    assert world.pauses[again:] == POLLING[: len(world.pauses) - again]


def test_polling_goes_on_slowly_after_an_error() -> None:
    world = World(follows=False)
    pace = Pace(world, world)
    pace.failed()
    pace.wait(NEVER)
    assert world.pauses == [0.04]


def test_silence_is_looked_at_twice_a_second() -> None:
    assert len(looks(World(), 100.0)) <= 2 * 100 + 20


def test_with_nobody_waiting_a_silence_ends_soon() -> None:
    world = World()
    pace = Pace(world, world)
    for _ in range(20):
        pace.wait(0.04)
    assert world.time <= 20 * 0.04


def test_a_commit_is_worth_a_dozen_looks() -> None:
    times = looks(World(10.0), 20.0, committed(10.0004))
    assert len([time for time in times if 10 <= time <= 11]) <= 12


@pytest.mark.parametrize("flush", [0.0, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
def test_a_commit_is_seen_soon_after_its_write_is_heard(flush: float) -> None:
    """It is heard when it is written, and seen when the disk has it."""
    written = 3.2
    times = looks(World(written), 5.0, committed(written + flush))
    seen = next(time for time in times if time >= written + flush)
    assert seen - (written + flush) <= max(0.005, 1.2 * flush)


@pytest.mark.parametrize("apart", [0.001, 0.005, 0.012, 0.03, 0.06, 0.1, 0.3, 1.0])
def test_writes_of_our_own_are_no_reason_to_look_all_the_time(apart: float) -> None:
    times = looks(World(*(number * apart for number in range(round(20 / apart)))), 20.0)
    assert len([time for time in times if time >= 2]) <= 18 * 45


def test_after_writes_of_our_own_others_are_seen_no_later_than_by_polling() -> None:
    own = [number * 0.003 for number in range(1000)]
    times = looks(World(*own), 3.0)
    assert max(later - sooner for sooner, later in pairwise(times)) <= 0.045


def test_writes_of_our_own_are_forgotten_after_a_silence() -> None:
    own = [number * 0.003 for number in range(1000)]
    times = looks(World(*own, 6.0), 7.0, committed(6.0004))
    assert next(time for time in times if time >= 6.0004) <= 6.001


def test_others_that_write_all_the_time_are_looked_at_every_five_milliseconds() -> None:
    world = World(*(number * 0.0005 for number in range(20_000)))
    times = looks(world, 10.0, lambda now: True)
    assert 10 * 150 <= len(times) <= 10 * 200 + 20


def test_our_answer_to_a_commit_of_others_does_not_make_us_miss_the_next() -> None:
    """One job at a time: it comes, it is claimed and settled here, the next one comes."""
    came = [1 + 0.02 * number for number in range(200)]
    writes = sorted([*came, *(time + 0.002 for time in came), *(time + 0.003 for time in came)])
    visible = [time + 0.0004 for time in came]
    times = looks(World(*writes), 5.0, committed(*visible))
    for time in visible:
        assert next(look for look in times if look >= time) - time <= 0.0005


def test_commits_that_are_never_heard_of_bring_polling_back() -> None:
    world = World()
    looks(world, 60.0, committed(10.0, 20.0, 30.0))
    assert world.closed
    assert world.pauses[-1] == 0.04
    assert sum(1 for pause in world.pauses if pause == 0.04) > 25 * 20


def test_a_few_that_were_not_heard_of_do_not() -> None:
    world = World(25.0, 45.0)
    looks(world, 60.0, committed(10.0, 20.0, 25.0003, 30.0, 40.0, 45.0003))
    assert not world.closed


def test_it_listens_again_when_there_is_a_log_again() -> None:
    world = World(8.0, follows=False)
    pace = Pace(world, world)
    while world.time < 4:
        pace.wait(NEVER)
        pace.looked(others=False)
    world.follows = True
    polled = len(world.pauses)
    while world.time < 8:
        pace.wait(NEVER)
        pace.looked(others=False)
    assert len(world.pauses) <= polled + 7  # a chase for what was written before, and the first step of another


# What is heard of a file.


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.db-wal"
    path.write_bytes(b"old")
    return path


@pytest.fixture
def notice(log: Path) -> Iterator[FileNotice]:
    notice = FileNotice(str(log))
    yield notice
    notice.close()


def follow_and_hear_nothing(notice: FileNotice) -> None:
    assert notice.follow()
    while notice.wait(0):
        pass


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"new")


def ears() -> list[str]:
    """The descriptors of this process that hear."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            if "inotify" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(name)
    return found


def test_a_new_file_is_looked_at_once(notice: FileNotice) -> None:
    assert notice.follow()
    assert notice.wait(0)
    assert not notice.wait(0)
    assert notice.follow()
    assert not notice.wait(0)


def test_a_write_is_heard_once(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    append(log)
    assert notice.wait(EVER)
    assert not notice.wait(0)


def test_a_burst_is_heard_once_and_what_comes_after_it_again(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    append(log)
    assert notice.wait(EVER)
    append(log)
    assert not notice.wait(0)
    notice.start_over()
    assert notice.follow()
    assert not notice.wait(0)
    append(log)
    assert notice.wait(EVER)


def test_what_was_written_while_nobody_listened_is_news(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    append(log)
    assert notice.wait(EVER)
    append(log)
    assert notice.follow()
    assert notice.wait(0)


def test_starting_over_follows_a_file_that_was_made_anew(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    log.unlink()
    log.write_bytes(b"another")
    notice.start_over()
    assert not notice.wait(0)
    append(log)
    assert notice.wait(EVER)


def test_reading_is_not_heard(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    log.read_bytes()
    assert not notice.wait(0)


def test_what_happens_to_other_files_is_not_heard(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    append(log.with_name("jobs.db"))
    assert not notice.wait(0)


def test_a_truncation_is_heard(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    os.truncate(log, 0)
    assert notice.wait(EVER)


@pytest.mark.parametrize("held_open", [True, False])
def test_a_file_that_was_made_anew_is_followed(notice: FileNotice, log: Path, held_open: bool) -> None:
    with log.open("rb") if held_open else contextlib.nullcontext():
        follow_and_hear_nothing(notice)
        log.unlink()
        assert notice.wait(EVER)
        assert not notice.follow()
        log.write_bytes(b"another")
        follow_and_hear_nothing(notice)
        append(log)
        assert notice.wait(EVER)


def test_a_file_that_another_was_moved_over_is_followed(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    other = log.with_name("other")
    other.write_bytes(b"another")
    other.rename(log)
    assert notice.wait(EVER)
    follow_and_hear_nothing(notice)
    append(log)
    assert notice.wait(EVER)


def test_a_file_that_was_moved_away_is_not_followed(notice: FileNotice, log: Path) -> None:
    follow_and_hear_nothing(notice)
    moved = log.rename(log.with_name("moved"))
    assert notice.wait(EVER)
    assert not notice.follow()
    while notice.wait(0):
        pass
    append(moved)
    assert not notice.wait(0)


def test_no_descriptor_is_left(log: Path) -> None:
    notice = FileNotice(str(log))
    before = set(ears())
    assert notice.follow()
    (ear,) = set(ears()) - before
    assert not os.get_inheritable(int(ear))
    notice.close()
    notice.close()
    assert ear not in ears()
    assert not notice.follow()


class Library:
    """A C library whose calls answer what they are told, or do their work."""

    def __init__(self, **answers: int) -> None:
        self._answers = answers
        self._real = REAL_LIBRARY()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self._answers:
            return lambda *args: self._answers[name]
        return getattr(self._real, name)  # type: ignore[no-any-return]


REAL_LIBRARY = inotify._system_library
REFUSALS: dict[str, Callable[[], Library | None]] = {
    "no inotify": lambda: None,
    "no instance left": lambda: Library(inotify_init1=-1),
    "no watch left": lambda: Library(inotify_add_watch=-1),
}


@pytest.fixture(params=REFUSALS)
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inotify, "_system_library", REFUSALS[request.param])


@pytest.mark.usefixtures("refused")
def test_it_says_when_nothing_can_be_heard(log: Path) -> None:
    notice = FileNotice(str(log))
    assert not notice.follow()
    assert not notice.follow()
    notice.close()


@pytest.mark.parametrize("error", [MemoryError, OSError, AttributeError])
def test_without_the_library_nothing_can_be_heard(
    log: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Also where no memory may be executed, as the library's callers need it."""

    def fails(name: None) -> None:
        raise error

    log.touch()
    monkeypatch.setattr("ctypes.CDLL", fails)
    notice = FileNotice(str(log))
    assert not notice.follow()
    notice.close()


# The watcher, on a file.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, timeout=5)
    yield store
    store.close()


def watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "holdfast-sqlite-watcher"]


async def test_a_watcher_that_cannot_begin_does_not_keep_the_next_from_it(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def fails(path: str) -> FileNotice:
        began.set()
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(watcher, "FileNotice", fails)
        async with Waiter(store):
            assert await asyncio.to_thread(began.wait, EVER)
            await eventually(lambda: not watchers())
    async with Waiter(store) as waiter:
        run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
        await waiter.wakes()


class Silence:
    """Known to whoever asks: that the watcher listens, and will not look before it hears something."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._began = threading.Semaphore(0)
        wait = FileNotice.wait

        def noted(notice: FileNotice, seconds: float) -> bool:
            if seconds == NEVER and not notice._news:
                self._began.release()
            return wait(notice, seconds)

        patch.setattr(watcher, "_LISTENING", (NEVER,))
        patch.setattr(FileNotice, "wait", noted)

    async def begins(self) -> None:
        """Wait until it listens once more."""
        assert await asyncio.to_thread(self._began.acquire, timeout=EVER)


@pytest.fixture
async def silence(store: SqliteStore) -> AsyncIterator[Silence]:
    """The watcher of the store looks when it has heard something, and never else."""
    await eventually(lambda: not watchers())  # of an earlier test
    with pytest.MonkeyPatch.context() as patch:
        yield Silence(patch)
    await asyncio.to_thread(store.close)  # the log goes, which is heard: whoever listens for ever is released
    await eventually(lambda: not watchers())


class Waiter:
    """Counts the wake-ups of a store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._woken = asyncio.Semaphore(0)

    async def _wait(self) -> None:
        async for _ in self._store.wakeups(["default"]):
            self._woken.release()

    async def wakes(self) -> None:
        await asyncio.wait_for(self._woken.acquire(), EVER)

    @property
    def sleeps(self) -> bool:
        return self._woken.locked()

    async def __aenter__(self) -> Waiter:
        self._task = asyncio.ensure_future(self._wait())
        await eventually(lambda: self._store._hub)  # what is committed from here on is seen
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def insert_when_told(path: Path, told: Connection) -> None:
    store = SqliteStore(path)
    store._open()
    told.send("ready")
    while told.recv():
        store.insert_blocking([new_job()])
        told.send("done")
    store.close()


@contextlib.asynccontextmanager
async def another_process(path: Path) -> AsyncIterator[Callable[[], None]]:
    here, there = CHILDREN.Pipe()
    child = start_child(insert_when_told, path, there)
    assert await asyncio.to_thread(here.recv) == "ready"

    def commit() -> None:
        here.send(True)
        assert here.recv() == "done"

    try:
        yield commit
    finally:
        here.send(False)
        child.join(10)
        here.close()
        there.close()


async def test_a_commit_of_another_process_is_heard(store: SqliteStore, path: Path, silence: Silence) -> None:
    async with another_process(path) as commit, Waiter(store) as waiter:
        for _ in range(5):
            await silence.begins()
            await asyncio.to_thread(commit)
            await waiter.wakes()


async def test_what_is_not_heard_does_not_wake(
    store: SqliteStore, path: Path, silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests beside this one prove something."""
    monkeypatch.setattr(inotify, "_EVENTS", NOBODY_HEARS)
    async with another_process(path) as commit, Waiter(store) as waiter:
        await silence.begins()
        await asyncio.to_thread(commit)
        await asyncio.sleep(0.3)
        assert waiter.sleeps


async def test_own_commits_are_heard_and_wake_nobody(store: SqliteStore, path: Path, silence: Silence) -> None:
    async with another_process(path) as commit, Waiter(store) as waiter:
        await silence.begins()
        await store.set_paused("elsewhere", True)
        await silence.begins()
        assert waiter.sleeps
        await asyncio.to_thread(commit)
        await waiter.wakes()


async def test_the_log_is_followed_through_a_link(path: Path, silence: Silence, tmp_path: Path) -> None:
    link = tmp_path / "folder" / "link.db"
    link.parent.mkdir()
    link.symlink_to(path)
    async with SqliteStore(path), SqliteStore(link) as store, another_process(path) as commit, Waiter(store) as waiter:
        await silence.begins()
        await asyncio.to_thread(commit)
        await waiter.wakes()


def log_of(path: Path) -> bytes | None:
    log = path.with_name(f"{path.name}-wal")
    return log.read_bytes() if log.exists() else None


async def test_a_log_that_was_truncated_is_heard(store: SqliteStore, path: Path, silence: Silence) -> None:
    async with another_process(path) as commit, Waiter(store) as waiter:
        await silence.begins()
        await asyncio.to_thread(commit)
        await waiter.wakes()
        await silence.begins()
        assert run_sql(path, "PRAGMA wal_checkpoint(TRUNCATE)")[0][0] == 0
        assert log_of(path) == b""
        await silence.begins()
        while not waiter.sleeps:
            await waiter.wakes()
        await asyncio.to_thread(commit)
        await waiter.wakes()


async def test_a_log_that_was_made_anew_is_heard(store: SqliteStore, path: Path, silence: Silence) -> None:
    """Whoever closes the file last removes the log."""
    async with Waiter(store) as waiter:
        for _ in range(3):
            await silence.begins()
            await asyncio.to_thread(store.close)
            assert log_of(path) is None
            async with another_process(path) as commit:
                assert await store.counts() is not None  # opens again
                await silence.begins()
                while not waiter.sleeps:
                    await waiter.wakes()
                await asyncio.to_thread(commit)
                await waiter.wakes()


@pytest.mark.usefixtures("refused", "silence")
async def test_where_nothing_can_be_heard_a_commit_is_seen_all_the_same(store: SqliteStore, path: Path) -> None:
    async with another_process(path) as commit, Waiter(store) as waiter:
        for _ in range(3):
            await asyncio.to_thread(commit)
            await waiter.wakes()


async def test_when_listening_fails_a_commit_is_seen_all_the_same(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await eventually(lambda: not watchers())

    def fail(notice: FileNotice, seconds: float) -> bool:
        raise OSError(9, "the descriptor is gone")

    monkeypatch.setattr(FileNotice, "wait", fail)
    before = ears()
    async with another_process(path) as commit, Waiter(store) as waiter:
        for _ in range(3):
            await asyncio.to_thread(commit)
            await waiter.wakes()
        assert ears() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_has_no_part_in_what_its_parent_hears(
    store: SqliteStore, path: Path, silence: Silence
) -> None:
    async with another_process(path) as commit, Waiter(store) as waiter:
        await silence.begins()
        assert ears() != []
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(tell)
                os.read(told, 1)  # it lives until the parent has heard, or is gone
                os._exit(0 if ears() == [] else 1)
            finally:
                os._exit(2)
        os.close(told)
        try:
            await asyncio.to_thread(commit)
            await waiter.wakes()
        finally:
            os.close(tell)
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 0


async def test_nothing_is_left_when_nobody_waits_any_more(store: SqliteStore, path: Path) -> None:
    await eventually(lambda: not watchers())
    assert ears() == []
    for _ in range(3):
        async with Waiter(store) as waiter:
            await eventually(lambda: len(ears()) == 1)
            run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
            await waiter.wakes()
        await eventually(lambda: not watchers())
        assert ears() == []
