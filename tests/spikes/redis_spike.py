"""A spike of the store port on Redis: one Lua script per verb and slot, all keys declared, server time only.

Everything of a queue has the hash tag `{queue}`; the root of a session (beat counter, open or closed: the decision) has
a tag of its own. In each of its queues a session has a part that follows the root, so that claims and moves check it
in their own script. `then` jobs leave through an outbox of the move's queue: accepted with the move, delivered after.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from holdfast.errors import SessionClosed
from holdfast.job import Job, JobId, Lease, NewJob, Reason, SessionId, State
from holdfast.lanes import Lane, serving_order
from holdfast.lifecycle import Applied, Move
from holdfast.store import Beat, Claimed, ClaimRequest, Session

SCRIPTS = dict(
    block.split("\n", 1)
    for block in Path(__file__).with_suffix(".lua").read_text(encoding="utf-8").split("--- ")[1:]
)
QUEUE_KEYS = ("rows", "news", "writes", "scheduled", "lanes", "holders", "outbox", "seq")


class Row(msgspec.Struct):
    """The part of a job that scripts read and write."""

    state: State
    reason: Reason
    run_at: int
    seq: int
    created_at: int
    version: int
    lane: str
    session: SessionId | None = None
    asked: bool = False
    claimed_at: int | None = None
    ended_at: int | None = None


class Write(msgspec.Struct):
    """The part of a job that only moves write: opaque to scripts."""

    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    snoozes: int = 0
    suspect: bool = False
    failure_history: bytes = b""
    result: bytes | None = None


def decode_job(new: bytes, row: bytes, write: bytes) -> Job:
    fixed = msgspec.structs.asdict(msgspec.msgpack.decode(new, type=NewJob))
    moving = msgspec.structs.asdict(msgspec.msgpack.decode(row, type=Row))
    written = msgspec.structs.asdict(msgspec.msgpack.decode(write, type=Write))
    del fixed["delay"], moving["lane"]
    moving |= {"session_id": moving.pop("session"), "cancel_asked": moving.pop("asked")}
    return Job(**{**fixed, **moving, **written, "progress": None})


def in_threes(flat: Sequence[bytes]) -> list[Job]:
    return [decode_job(*flat[at : at + 3]) for at in range(0, len(flat), 3)]


def label(priority: int, share: str) -> str:
    return f"{priority}:{share}"


class RedisSpike:
    """`claim`, `apply`, `beat`, `close_session`, `lost` of the port, and as much of the rest as these need."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._scripts = {name: client.register_script(text) for name, text in SCRIPTS.items()}
        self._lanes: defaultdict[str, set[Lane]] = defaultdict(set)
        self.calls = 0

    def key(self, tag: str, *rest: str) -> str:
        return ":".join((self._namespace, f"{{{tag}}}", *rest))

    def _queue(self, queue: str, *more: str) -> list[str]:
        return [self.key(queue, name) for name in (*QUEUE_KEYS, *more)]

    def _root(self, session_id: SessionId) -> str:
        return self.key(f"session {session_id}", "root")  # no queue's name has a space

    def _parts(self, queue: str, sessions: Iterable[SessionId]) -> list[str]:
        return [self.key(queue, kind, session) for session in sessions for kind in ("part", "held")]

    async def _run(self, script: str, keys: Sequence[str], *args: str | bytes | int) -> Any:
        assert len({key.split("{")[1].split("}")[0] for key in keys}) == 1, "one slot per script"
        self.calls += 1
        return await self._scripts[script](keys=list(keys), args=list(args))

    async def _members(self, key: str) -> list[str]:
        return sorted(member.decode() for member in await self._client.smembers(key))

    async def insert(self, jobs: Sequence[NewJob]) -> None:
        by_queue: defaultdict[str, list[NewJob]] = defaultdict(list)
        for job in jobs:
            by_queue[job.queue].append(job)
        for queue, news in by_queue.items():
            await self._client.sadd(f"{self._namespace}:queues", queue)
            labels = [label(new.priority, new.share) for new in news]
            args: list[str | bytes | int] = []
            for new, lane in zip(news, labels, strict=True):
                due = -1 if new.run_at is None else new.run_at
                write = msgspec.msgpack.encode(Write())
                args += [new.id, msgspec.msgpack.encode(new), write, lane, due, new.delay]
            await self._run("insert", self._queue(queue, *(f"lane:{lane}" for lane in labels)), *args)

    async def open_session(self, session: Session) -> None:
        await self._run("open_root", [self._root(session.id)], ",".join(session.queues))
        for queue in session.queues:
            await self._client.sadd(f"{self._namespace}:queues", queue)
            # Never over a closed part: a close that overtakes this call wins.
            await self._client.hsetnx(self.key(queue, "part", session.id), "open", "1")

    async def beat(self, session_id: SessionId) -> Beat:
        queues = await self._run("beat_root", [self._root(session_id)])
        if queues is None:
            return Beat(open=False, held=0, cancel=())
        parts = await asyncio.gather(
            *(
                self._run("beat_part", [*self._parts(queue, [session_id]), self.key(queue, "rows")])
                for queue in split(queues)
            )
        )
        return Beat(
            open=all(is_open for is_open, _, _ in parts),
            held=sum(held for _, held, _ in parts),
            cancel=tuple(job_id.decode() for _, _, asked in parts for job_id in asked),
        )

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        closed, queues = await self._run("close_root", [self._root(session_id)], if_beat or -1)
        for queue in split(queues):
            await self._close_part(queue, session_id)
        return bool(closed)

    async def _close_part(self, queue: str, session_id: SessionId) -> None:
        await self._client.hset(self.key(queue, "part", session_id), "open", "0")

    async def held(self, session_id: SessionId) -> list[Lease]:
        leases = []
        for queue in split(await self._client.hget(self._root(session_id), "queues") or b""):
            versions = await self._client.hgetall(self.key(queue, "held", session_id))
            leases += [
                Lease(job.decode(), queue, session_id, int(version)) for job, version in versions.items()
            ]
        return leases

    async def claim(self, request: ClaimRequest) -> Claimed:
        jobs: list[Job] = []
        now, due = 0, []
        for queue in request.queues:
            limit = request.limit - len(jobs)
            if limit == 0:
                break
            now, next_due, flat = await self._claim_from(queue, request, limit)
            due += [next_due] if next_due >= 0 else []
            jobs += in_threes(flat)
        return Claimed(jobs=tuple(jobs), now=now, next_due=min(due, default=None))

    async def _claim_from(self, queue: str, request: ClaimRequest, limit: int) -> Any:
        while True:
            order = serving_order(self._lanes[queue], request.turn)
            groups = [[label(lane.priority, lane.share) for lane in group] for group in order]
            lane_names = [f"lane:{lane}" for group in groups for lane in group]
            keys = [*self._parts(queue, [request.session_id]), *self._queue(queue, *lane_names)]
            answer = await self._run("claim", keys, request.session_id, limit, msgspec.msgpack.encode(groups))
            if answer == b"closed":
                raise SessionClosed(f"session {request.session_id} is not open in queue {queue}")
            if answer[0] != b"lanes":
                return answer[1:]
            # There are jobs in lanes that this process did not know of: once more, with their keys declared.
            known = (name.decode().split(":", 1) for name in answer[1])
            self._lanes[queue] = {Lane(queue, int(priority), share) for priority, share in known}

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        by_queue: defaultdict[str, list[int]] = defaultdict(list)
        for at, move in enumerate(moves):
            by_queue[move.queue].append(at)
        answers = [Applied.GONE] * len(moves)
        for queue, places in by_queue.items():
            mine = [moves[at] for at in places]
            sessions = sorted({move.session_id for move in mine if move.session_id})
            args = [arg for move in mine for arg in wire(move, sessions)]
            for at, answer in zip(
                places,
                await self._run("apply", [*self._queue(queue), *self._parts(queue, sessions)], *args),
                strict=True,
            ):
                answers[at] = Applied(answer.decode())
            if any(move.then for move in mine):
                await self.deliver(queue)
        return answers

    async def deliver(self, queue: str) -> None:
        """Insert what moves of the queue left in its outbox. Any process may; the ids make repeating safe."""
        outbox = self.key(queue, "outbox")
        for job_id, new in (await self._client.hgetall(outbox)).items():
            await self.insert([msgspec.msgpack.decode(new, type=NewJob)])
            await self._client.hdel(outbox, job_id)

    async def request_cancel(self, queue: str, job_ids: Sequence[JobId]) -> None:
        await self._run("ask_cancel", [self.key(queue, "rows")], *job_ids)

    async def lost(self, limit: int) -> list[Job]:
        jobs: list[Job] = []
        for queue in await self._members(f"{self._namespace}:queues"):
            holders = await self._members(self.key(queue, "holders"))
            for session_id in holders:
                if await self._client.hget(self._root(session_id), "open") != b"1":
                    # Whoever closed the root may have died before it reached this queue.
                    await self._close_part(queue, session_id)
            keys = [*self._queue(queue), *self._parts(queue, holders)]
            jobs += in_threes(await self._run("lost", keys, limit - len(jobs)))
        return jobs


def split(queues: bytes) -> list[str]:
    return queues.decode().split(",") if queues else []


def wire(move: Move, sessions: Sequence[SessionId]) -> list[bytes]:
    """A move as two arguments of its script: what the script reads, and what it only stores."""
    guard = {
        "id": move.job_id,
        "sources": dict.fromkeys(move.sources, True),
        "version": move.version,
        "session": move.session_id,
        "part": sessions.index(move.session_id) if move.session_id else None,
        "session_open": move.session_open,
        "despite_cancel": move.despite_cancel,
        "to": move.to,
        "reason": move.reason,
        "delay": move.delay,
        "raised": int(move.raise_version),
        "after": [(new.id, msgspec.msgpack.encode(new)) for new in move.then],
    }
    fields = {name: getattr(move, name) for name in Write.__struct_fields__}
    # None is left out: for Lua, absent and nil are the same.
    packed = msgspec.msgpack.encode({name: value for name, value in guard.items() if value is not None})
    return [packed, msgspec.msgpack.encode(Write(**fields))]
