"""The application of the worker processes in a fault run.

Each process notes what it was told by the store and what its handlers did, in files of its own in the rig's folder. A
handler's effect goes to a ledger that is on the disk when the handler goes on: it has happened, whatever becomes of the
process and of the store.

A process ends itself at a *crash point* (SIGKILL, in the middle of what it does) if the rig has armed that point: it
has made a file `crash-POINT`, which the first process to come by takes away.

A guard of the product is switched off, for a negative control, by replacing it in here: never by the product itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from holdfast import Holdfast, Snooze, current
from holdfast.config import Settings, WorkerSettings
from holdfast.job import State
from holdfast.lifecycle import Applied, Move
from holdfast.patience import Patient, WaitingClaims
from holdfast.policy import Steps
from holdfast.ports import SYSTEM
from holdfast.store import Beat, Claimed, ClaimRequest, Store
from holdfast.stores import open_store
from holdfast.testing.history.events import AnyEvent, Effect, End, Fault, KeeperReady, Start
from holdfast.testing.history.recording import HistoryFile, recorded
from holdfast.worker.board import Board, Started
from holdfast.worker.heart import Heart

FOLDER = Path(os.environ.get("HOLDFAST_TEST_FOLDER", "."))
HOST = str(os.getpid())
"""Who a process is, in a history: its number."""
POINTS = ("before claim", "after claim", "after start", "mid handler", "after handler", "after ack")
"""Where a process can be made to end itself. After a claim, or after an ack: the store has done it, and nobody has
heard of it yet.
"""

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # processes crash here on purpose
FILES_ALLOWED = resource.getrlimit(resource.RLIMIT_NOFILE)

_files: dict[str, HistoryFile] = {}


def note(event: AnyEvent) -> None:
    """Add the event to this process's history. An effect is on the disk when this returns."""
    kind = "ledger" if isinstance(event, Effect) else "history"
    if kind not in _files:
        _files[kind] = HistoryFile(FOLDER / f"{kind}-{HOST}.jsonl", durable=kind == "ledger")
    _files[kind].note(event)


def crash(point: str) -> None:
    """End here if the rig wants it. Each armed point ends one process."""
    try:
        os.unlink(FOLDER / f"crash-{point}")
    except FileNotFoundError:
        return
    note(Fault(at=time.monotonic(), host=HOST, kind=f"killed {point}", victim=HOST))
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


class Crashing:
    """A store in front of which, and behind which, processes end. It also tells when the keepers begin to look."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def __aenter__(self) -> Crashing:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._store.__aexit__(*exc)

    async def claim(self, request: ClaimRequest) -> Claimed:
        crash("before claim")
        return self._survived(await self._store.claim(request))

    def waiting_claims(self, queues: Collection[str]) -> WaitingClaims | None:
        waiting = self._store.waiting_claims(queues) if isinstance(self._store, Patient) else None
        return None if waiting is None else _CrashingWait(waiting, self._survived)

    def _survived(self, claimed: Claimed) -> Claimed:
        if claimed.jobs:
            crash("after claim")
        return claimed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        acks = any(move.to is State.SUCCEEDED for move in moves)
        if acks:
            crash("after handler")
        answers = await self._store.apply(moves)
        if acks:
            crash("after ack")
        return answers

    async def beat(self, session_id: str) -> Beat:
        answer = await self._store.beat(session_id)
        if session_id == "nobody" and not self._looked:  # so a keeper asks whether the store can be written to
            self._looked = True
            note(KeeperReady(at=time.monotonic(), host=HOST))
        return answer


class _CrashingWait:
    """Claims that wait, before and after which processes end, too."""

    def __init__(self, waiting: WaitingClaims, survived: Callable[[Claimed], Claimed]) -> None:
        self._waiting = waiting
        self._survived = survived

    async def claim(self, request: ClaimRequest, *, due_in: int | None, seconds: float) -> Claimed:
        crash("before claim")
        return self._survived(await self._waiting.claim(request, due_in=due_in, seconds=seconds))

    async def close(self) -> None:
        await self._waiting.close()


def noted_store(url: str) -> Store:
    """The store as the processes of a rig use it."""
    return recorded(cast(Store, Crashing(open_store(url, SYSTEM))), note, time.monotonic, lambda: HOST)


app = Holdfast(
    noted_store(os.environ.get("HOLDFAST_TEST_STORE", "memory://")),
    settings=Settings(worker=WorkerSettings(poll=1.0)),
)


# Handlers. Each has the arguments with which the rig enqueued it, and says so.


def call_digest(task: str, arguments: dict[str, Any]) -> str:
    """What a handler was called with, in short: the same as `digest_of` says of a job that the rig made."""
    return hashlib.blake2b(task.encode() + b"\0" + msgspec.json.encode(arguments), digest_size=8).hexdigest()


@contextmanager
def running(**arguments: Any) -> Iterator[None]:
    """Note that a handler was called, with what, and that it is over. An argument that is None was not given."""
    job = current()
    version = job.lease.version
    digest = call_digest(job.task, {name: value for name, value in arguments.items() if value is not None})
    note(Start(at=time.monotonic(), host=HOST, job_id=job.id, version=version, digest=digest))
    crash("after start")
    try:
        yield
    finally:
        note(End(at=time.monotonic(), host=HOST, job_id=job.id, version=version))


def act() -> None:
    """Do what the handler is there for."""
    crash("mid handler")
    job = current()
    note(Effect(at=time.monotonic(), host=HOST, job_id=job.id, version=job.lease.version))


def is_open(gate: str) -> bool:
    return (FOLDER / f"gate-{gate}").exists()


@app.task
async def quick(number: int, text: str | None = None) -> int:
    with running(number=number, text=text):
        act()
        return number


@app.task
def in_thread(number: int, text: str | None = None) -> int:
    with running(number=number, text=text):
        time.sleep(0.005)
        act()
        return number


@app.task(timeout=None)
async def lasting(number: int, seconds: float) -> int:
    with running(number=number, seconds=seconds):
        await asyncio.sleep(seconds)
        act()
        return number


@app.task(timeout=None)
async def held(number: int, gate: str) -> int:
    """Wait until the rig opens the gate."""
    with running(number=number, gate=gate):
        while not is_open(gate):  # noqa: ASYNC110  another process opens it
            await asyncio.sleep(0.005)
        act()
        return number


@app.task(timeout=None)
def held_at_first(number: int, gate: str) -> int:
    """The first attempt waits, in a thread; the others do not."""
    with running(number=number, gate=gate):
        while current().attempt == 1 and not is_open(gate):
            time.sleep(0.005)
        act()
        return number


@app.task(backoff=Steps((0.05,)))
async def unreliable(number: int) -> int:
    """Fail at first."""
    with running(number=number):
        if current().attempt == 1:
            raise ConnectionError("on purpose")
        act()
        return number


@app.task(backoff=Steps((0.05,)))
async def hopeless(number: int) -> None:
    """Fail until nobody tries any more."""
    with running(number=number):
        raise ValueError("on purpose")


@app.task
async def later(number: int) -> int:
    """Not before the second time."""
    with running(number=number):
        put_off = FOLDER / f"put-off-{current().id}"
        if not put_off.exists():
            put_off.touch()
            raise Snooze(0.05)
        act()
        return number


@app.task(isolation="process", backoff=Steps((0.05,)))
def apart(number: int) -> int:
    """In a process of its own."""
    with running(number=number):
        act()
        return number


@app.task(timeout=None)
async def blocking(number: int, seconds: float) -> int:
    """Keep everybody else from the event loop."""
    with running(number=number, seconds=seconds):
        time.sleep(seconds)  # noqa: ASYNC251  that is the point
        act()
        return number


@app.task(isolation="process", backoff=Steps((0.05,)))
def doomed(number: int) -> None:
    """End its process every time, as the kernel does with one that has taken all the memory."""
    with running(number=number):
        note(Fault(at=time.monotonic(), host=HOST, kind="killed by its job", victim=HOST))
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


@app.task(isolation="process", backoff=Steps((0.05,)))
def greedy(number: int, mebibytes: int) -> int:
    """Take memory, all of it in use."""
    with running(number=number, mebibytes=mebibytes):
        ballast = [bytearray(b"x" * 2**20) for _ in range(mebibytes)]
        act()
        return number + len(ballast) - mebibytes


@app.task(timeout=None)
async def hoarding(number: int, seconds: float) -> int:
    """Leave no room for another open file in this process, for so long."""
    with running(number=number, seconds=seconds):
        act()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, FILES_ALLOWED[1]))
        try:
            await asyncio.sleep(seconds)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES_ALLOWED)
        return number


# Guards that can be switched off.


async def _never_beat(self: Heart) -> None:
    await asyncio.sleep(3600)


def _nothing_started(self: Board) -> list[Started]:
    return []


async def _applied_whatever(self: Crashing, moves: Sequence[Move]) -> list[Applied]:
    """No lease is compared, as by an UPDATE that names nothing but the job: whoever comes later wins."""
    await self._store.apply(moves)
    return [Applied.APPLIED] * len(moves)


def _switch_off(guards: Iterable[str]) -> None:
    for guard in guards:
        match guard:
            case "heartbeat":
                Heart._beat_on = _never_beat  # type: ignore[method-assign]
            case "started list":
                Board.started = _nothing_started  # type: ignore[method-assign]
            case "fencing":
                Crashing.apply = _applied_whatever  # type: ignore[method-assign]
            case _:
                raise ValueError(guard)


_switch_off(filter(None, os.environ.get("HOLDFAST_TEST_GUARD_OFF", "").split(",")))
