"""What to ask a server for each verb of the port that moves jobs. Generators: they yield batches and are sent replies.

A batch for one queue is one round trip; scripts over many jobs are cut (`scripts.AT_ONCE`) and travel together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, InvalidOption, SessionClosed, StoreError
from holdfast.job import DEFAULT_PRIORITY, Job, JobId, Lease, NewJob, SessionId, State, is_job_id
from holdfast.lifecycle import Applied, Move
from holdfast.store import (
    CancelAnswer,
    Checkpoint,
    Claimed,
    ClaimRequest,
    DepthLimit,
    Inserted,
    InsertStatus,
)
from holdfast.stores.redis.dispatch import Batch, Call, Packed, Verb, run_script
from holdfast.stores.redis.layout import Layout
from holdfast.stores.redis.opening import keep_layout
from holdfast.stores.redis.records import claimed, from_outbox, head_of, insert_arguments, lane_of, move_arguments
from holdfast.stores.redis.scripts import AT_ONCE, CLAIMED_AT_ONCE, INSERTED_AT_ONCE, SUCCEEDED_AT_ONCE, Script
from holdfast.stores.redis.sessions import Sessions
from holdfast.stores.redis.wire import ReplyError, packed_start

_NO_LIMIT = DepthLimit()
_FIRST_GUESS = (f"{DEFAULT_PRIORITY}\t",)
_MOST_TRIES = 2
"""How often a claim starts again because lanes turned up that this process did not know. Then it serves those it knows:
new shares may keep coming."""
_FEW_LANES = 16
_MOST_PUTS = 1_000

_PutStart = tuple[bytes, bytes, bytes]
"""Of the short way: its words up to the job's id, as they travel; how the record begins; a key."""


class Share(msgspec.Struct, frozen=True, gc=False):
    """What a claim asks one of its queues for. `lanes`: those that were known then."""

    queue: str
    lanes: Sequence[str]
    call: Call


class Verbs:
    """Used from any thread: what it remembers is a cache, and right or harmless."""

    def __init__(self, layout: Layout, scripts: Mapping[str, Script], *, together: bool) -> None:
        self.layout = layout
        self.scripts = scripts
        self.sessions = Sessions(layout, scripts, together=together)
        self.epoch: tuple[str, int] = ("", 0)
        self.beats: dict[SessionId, int] = {}
        self.session_id: SessionId = ""
        self._known_queues: set[str] = set()
        self._known_lanes: dict[str, tuple[str, ...]] = {}
        self._puts: dict[tuple[Any, ...], _PutStart] = {}

    def start_over(self) -> None:
        """The store was emptied or rolled back: what was known of it may be wrong."""
        self._known_queues.clear()

    def call(self, name: str, queue: str, args: Sequence[Any], more_keys: Sequence[bytes] = ()) -> Call:
        """One script on one queue."""
        script = self.scripts[name]
        return run_script(script, [*self.layout.of_queue(queue, script), *more_keys], args)

    # New jobs.

    def insert(
        self,
        jobs: Sequence[NewJob],
        limits: Mapping[str, DepthLimit] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Verb[list[Inserted]]:
        """See `Store.insert`."""
        by_queue: dict[str, list[int]] = {}
        for at, job in enumerate(jobs):
            by_queue.setdefault(job.queue, []).append(at)
        if checkpoint is not None:
            by_queue.setdefault(checkpoint.queue, [])
        yield from self.register(by_queue)
        calls: list[Call] = []
        places: list[list[int]] = []
        for queue, positions in by_queue.items():
            limit = (limits or {}).get(queue, _NO_LIMIT)
            cut = len(positions) or 1 if checkpoint else INSERTED_AT_ONCE
            for first in range(0, len(positions) or (1 if checkpoint else 0), cut):
                piece = positions[first : first + cut]
                calls.append(self._insert_call(queue, [jobs[at] for at in piece], limit, checkpoint))
                places.append(piece)
        answers: list[Inserted | None] = [None] * len(jobs)
        replies = yield Batch(calls, durable=True)
        for piece, reply in zip(places, replies, strict=True):
            if reply == b"moved" and checkpoint is not None:
                raise checkpoint.conflict()
            if reply == b"full":
                return [Inserted(job.id, InsertStatus.FULL) for job in jobs]
            if reply == len(piece):
                for at in piece:
                    answers[at] = Inserted(jobs[at].id, InsertStatus.CREATED)
                continue
            for at, answer in zip(piece, reply, strict=False):
                answers[at] = _inserted(jobs[at].id, answer)
            if len(reply) > len(piece):
                yield from self._register_again(jobs[piece[0]].queue)
        return [answer for answer in answers if answer is not None]

    def _insert_call(
        self, queue: str, jobs: Sequence[NewJob], limit: DepthLimit, checkpoint: Checkpoint | None
    ) -> Call:
        lanes: dict[str, int] = {}
        args: list[Any] = ["", "", ""]
        if checkpoint is not None:
            was = "" if checkpoint.was is None else f"={checkpoint.was}"
            args = [checkpoint.name, was, checkpoint.now]
        args += ["" if depth is None else depth for depth in (limit.max_depth, limit.warn_depth)]
        args += insert_arguments(jobs, lanes)
        return self.call("insert", queue, args, [self.layout.ready(queue, lane) for lane in lanes])

    def put(self, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit] | None = None) -> Packed | None:
        """The short way of `insert` for one job; None if it cannot go there. If its reply is 0, nothing was written."""
        if len(jobs) != 1 or limits:
            return None
        job = jobs[0]
        if job.delay or job.run_at is not None or job.key is not None or job.queue not in self._known_queues:
            return None
        script = self.scripts["put"]
        # What jobs of one kind have in common is packed once. A correlation id is each job's own, so nothing is kept.
        place = (job.queue, job.priority, job.share, script.sha)
        kind = (*place, job.task, job.task_version, job.max_retries, job.retention)
        start = self._puts.get(kind) if job.correlation_id is None else None
        if start is None:
            start = self._put_start(job, script)
            if job.correlation_id is None:
                if len(self._puts) >= _MOST_PUTS:
                    self._puts.clear()
                self._puts[kind] = start
        words, head, key = start
        job_id, payload = job.id.encode(), job.payload
        size = len(head) + len(payload)
        data = b"%b$%d\r\n%b\r\n$%d\r\n%b%b\r\n" % (words, len(job_id), job_id, size, head, payload)
        return Packed(data, key, script)

    def _put_start(self, job: NewJob, script: Script) -> _PutStart:
        lane = lane_of(job)
        keys = (*self.layout.of_queue(job.queue, script), self.layout.ready(job.queue, lane))
        return packed_start(("EVALSHA", script.sha, len(keys), *keys, lane), 2), head_of(job), keys[0]

    def register(self, queues: Mapping[str, Any]) -> Verb[None]:
        """Make sure that the queues are found by those who look at all of them."""
        unknown = [queue for queue in queues if queue not in self._known_queues]
        if not unknown:
            return
        shared = self.layout.one_queue_only
        # To be in the registry changes nothing, so it is not a write that could be in doubt.
        enter = run_script(self.scripts["enter"], [self.layout.queues], [int(shared is not None), *unknown])
        [others] = yield Batch([enter], writes=False)
        if shared is not None and (others or len(unknown) > 1):
            raise self._one_queue_only({*unknown, *(other.decode() for other in others)})
        self._known_queues.update(unknown)

    def _one_queue_only(self, queues: Collection[str]) -> InvalidOption:
        return InvalidOption(
            f"the ready list {self.layout.one_queue_only!r} has no {{queue}} in its name, so this store can hold one "
            f"queue only, not {', '.join(sorted(queues))}"
        )

    def register_anew(self, queues: Collection[str]) -> Verb[None]:
        """The same, whatever is known: a part of a cluster may have lost what it had."""
        self._known_queues.difference_update(queues)
        yield from self.register(dict.fromkeys(queues))

    def _register_again(self, queue: str) -> Verb[None]:
        """The queue had no jobs ever: it is new, or the store was emptied since we have registered it."""
        with suppress(HoldfastError):  # the jobs are accepted; the next call tries again
            yield from keep_layout(self.layout)
            yield from self.register_anew([queue])

    def queues(self) -> Verb[list[str]]:
        """Every queue, by name."""
        [names] = yield Batch([Call(("SMEMBERS", self.layout.queues), self.layout.queues)], writes=False)
        return sorted(name.decode() for name in names)

    # The life of a claim.

    def claim(self, request: ClaimRequest) -> Verb[Claimed]:
        """See `Store.claim`."""
        jobs: list[Job] = []
        now, waits = 0, []
        for queue in request.queues:
            if len(jobs) == request.limit:
                break
            try:
                now, due_in = yield from self._claim_from(queue, request, jobs)
            except (StoreError, SessionClosed):
                if jobs:
                    return Claimed(tuple(jobs), now, 0)
                raise
            if due_in >= 0:
                waits.append(due_in)
        if len(jobs) == request.limit:
            return Claimed(tuple(jobs), now, 0)
        return Claimed(tuple(jobs), now, min(waits) if waits else None)

    def _claim_from(self, queue: str, request: ClaimRequest, jobs: list[Job]) -> Verb[tuple[int, int]]:
        """Add the queue's jobs. The time there, and in how long the next is due, or -1."""
        joined = False
        tries = 0
        while True:
            lanes = self._known_lanes.get(queue, _FIRST_GUESS)
            limit = min(request.limit - len(jobs), CLAIMED_AT_ONCE)
            [reply] = yield Batch([self._claim_call(queue, request, limit, lanes, serve=tries >= _MOST_TRIES)])
            if reply[0] == b"closed":
                if joined:
                    raise SessionClosed(f"session {request.session_id} is not open; it may not claim jobs")
                joined = True
                yield from self.sessions.join(request.session_id, queue)
            elif reply[0] == b"lanes":
                tries += 1
                self._known_lanes[queue] = tuple({lane.decode() for lane in reply[1]})
            elif reply[0] == b"jobs":
                now, due_in, unreadable = self._take(queue, request.session_id, lanes, reply, jobs)
                yield from self.sessions.bury(queue, request.session_id, unreadable)
                if len(jobs) == request.limit or due_in != 0 or tries >= _MOST_TRIES:
                    return now, due_in

    def _take(
        self, queue: str, session_id: SessionId, lanes: Sequence[str], reply: Sequence[Any], jobs: list[Job]
    ) -> tuple[int, int, list[bytes]]:
        """Add the jobs of a script's answer. The time there, in how long the next is due (or -1), and what cannot be
        read.
        """
        now, due_in, in_use = reply[1:4]
        if len(lanes) > max(_FEW_LANES, 4 * in_use):
            self._known_lanes.pop(queue, None)  # shares come and go
        found, unreadable = claimed(queue, reply[4:], session_id, now)
        jobs += found
        return now, due_in, unreadable

    def shares(self, request: ClaimRequest) -> list[Share]:
        """A claim as calls that can be sent together: each queue has its share of the limit, which may be none."""
        least, more = divmod(request.limit, len(request.queues))
        shares = []
        for at, queue in enumerate(request.queues[: request.limit]):
            lanes = self._known_lanes.get(queue, _FIRST_GUESS)
            limit = min(least + (at < more), CLAIMED_AT_ONCE)
            shares.append(Share(queue, lanes, self._claim_call(queue, request, limit, lanes, serve=False)))
        return shares

    def shared(self, request: ClaimRequest, shares: Sequence[Share], replies: Sequence[Any]) -> Verb[Claimed]:
        """What the answers to these calls say together. `due_in` is 0 if one of the queues was not looked at to the
        end: an ordinary claim says what is there, or what is in the way.
        """
        jobs: list[Job] = []
        graves: list[tuple[str, list[bytes]]] = []
        now, waits = 0, [0] if len(shares) < len(request.queues) else []
        for share, reply in zip(shares, replies, strict=True):
            if isinstance(reply, ReplyError) or reply[0] != b"jobs":
                waits.append(0)
                continue
            now, due_in, unreadable = self._take(share.queue, request.session_id, share.lanes, reply, jobs)
            graves.append((share.queue, unreadable))
            if due_in >= 0:
                waits.append(due_in)
        with suppress(StoreError):  # then a keeper buries them; the jobs are claimed
            for queue, unreadable in graves:
                yield from self.sessions.bury(queue, request.session_id, unreadable)
        return Claimed(tuple(jobs), now, min(waits, default=None))

    def _claim_call(self, queue: str, request: ClaimRequest, limit: int, lanes: Sequence[str], *, serve: bool) -> Call:
        keys = [self.layout.processing(queue, request.session_id)]
        for lane in lanes:
            keys += self.lane_keys(queue, lane)
        return self.call("claim", queue, [request.session_id, limit, request.turn, int(serve), *lanes], keys)

    def lane_keys(self, queue: str, lane: str) -> tuple[bytes, bytes]:
        """The list and the `due` set of a lane ("priority, tab, share")."""
        return self.layout.ready(queue, lane), self.layout.due(queue, lane)

    def apply(self, moves: Sequence[Move]) -> Verb[list[Applied]]:
        """See `Store.apply`."""
        by_queue: dict[str, list[int]] = {}
        for at, move in enumerate(moves):
            by_queue.setdefault(move.queue, []).append(at)
        elsewhere = {move.queue for move in moves if any(new.queue != move.queue for new in move.then)}
        if elsewhere and self.layout.one_queue_only is not None:
            raise self._one_queue_only({queue for move in moves for queue in (move.queue, *_queues_of(move.then))})
        calls: list[Call] = []
        places: list[list[int]] = []
        for queue, positions in by_queue.items():
            cut = SUCCEEDED_AT_ONCE if all(moves[at].to is State.SUCCEEDED for at in positions) else AT_ONCE
            for first in range(0, len(positions), cut):
                piece = positions[first : first + cut]
                calls.append(self._apply_call(queue, [moves[at] for at in piece]))
                places.append(piece)
        replies = yield Batch(calls)
        answers = [Applied.APPLIED] * len(moves)
        for piece, reply in zip(places, replies, strict=True):
            if reply != len(piece):
                for at, answer in zip(piece, reply, strict=True):
                    answers[at] = Applied(answer.decode())
        for queue in sorted(elsewhere):
            try:
                yield from self.deliver(queue)
            except StoreError:
                break  # they are accepted; a keeper delivers them
        return answers

    def _apply_call(self, queue: str, moves: Sequence[Move]) -> Call:
        sessions = list(dict.fromkeys(move.session_id for move in moves if move.session_id))
        args = [len(sessions), *sessions, *move_arguments(moves)]
        return self.call("apply", queue, args, [self.layout.processing(queue, session) for session in sessions])

    def deliver(self, queue: str) -> Verb[None]:
        """Insert what moves left in the queue's outbox. Any process may: an id that is there is not inserted again."""
        outbox = self.layout.key(queue, "outbox")
        cursor: bytes | int = 0
        while True:
            command = ("HSCAN", outbox, cursor, "COUNT", AT_ONCE)
            [[cursor, flat]] = yield Batch([Call(command, outbox)], writes=False)
            jobs = {}
            for job_id, packed in zip(flat[::2], flat[1::2], strict=True):
                with suppress(msgspec.MsgspecError):  # what somebody else put there stays
                    jobs[job_id] = from_outbox(packed)
            if jobs:
                yield from self.insert(list(jobs.values()))
                yield Batch([Call(("HDEL", outbox, *jobs), outbox)])
            if cursor == b"0":
                return

    def note(self, lease: Lease, progress: bytes) -> Verb[Applied]:
        """See `Store.note`."""
        args = [lease.job_id, lease.session_id, lease.version, progress]
        [answer] = yield Batch([self.call("note", lease.queue, args)])
        return Applied(answer.decode())

    # Operators and keepers.

    def request_cancel(self, job_ids: Sequence[JobId]) -> Verb[list[CancelAnswer]]:
        """See `Store.request_cancel`."""
        answers = [CancelAnswer.GONE] * len(job_ids)
        places = [at for at, job_id in enumerate(job_ids) if is_job_id(job_id)]
        queues = yield from self.queues()
        firsts = [first for first in range(0, len(places), AT_ONCE) for _ in queues]
        batch = self._on_pieces("cancel", queues, [job_ids[at] for at in places])
        for first, reply in zip(firsts, (yield batch), strict=True):
            for at, answer in zip(places[first:], reply, strict=False):
                if answer != b"gone":
                    answers[at] = CancelAnswer(answer.decode())
        return answers

    def _on_pieces(self, name: str, queues: Sequence[str], job_ids: Sequence[JobId]) -> Batch:
        """The script on each piece of a long list, in each queue: ids do not say where they are."""
        pieces = [job_ids[first : first + AT_ONCE] for first in range(0, len(job_ids), AT_ONCE)]
        return Batch([self.call(name, queue, piece) for piece in pieces for queue in queues])

    def set_paused(self, queue: str, paused: bool) -> Verb[None]:
        """See `Store.set_paused`."""
        yield from self.register_anew([queue])
        yield Batch([self.call("pause", queue, [int(paused)])])

    def forget_jobs(self, job_ids: Sequence[JobId]) -> Verb[int]:
        """See `Store.forget`."""
        queues = yield from self.queues()
        return sum((yield self._on_pieces("forget", queues, [job_id for job_id in job_ids if is_job_id(job_id)])))

    def prune(self, limit: int) -> Verb[int]:
        """See `Store.prune`. Before, it delivers what outboxes still hold: what is pruned could be delivered again."""
        removed = 0
        queues = yield from self.queues()
        untidy = yield from self._untidy(queues)
        for queue in untidy:
            with suppress(HoldfastError):  # there may be no room for more jobs: all the more reason to go on
                yield from self.deliver(queue)
        for queue in queues:
            if queue in untidy:
                yield from self._sweep(queue)
            while removed < limit:
                most = min(limit - removed, AT_ONCE)
                [[number, more]] = yield Batch([self.call("prune", queue, [most])])
                removed += number
                if not more:
                    break
        if removed < limit:
            removed += yield from self.sessions.prune(limit - removed, queues)
        return removed

    def _untidy(self, queues: Sequence[str]) -> Verb[list[str]]:
        """Those that have an outbox or idle lanes."""
        keys = [(self.layout.key(queue, "outbox"), self.layout.key(queue, "idle_lanes")) for queue in queues]
        found = yield Batch([Call(("EXISTS", *names), names[0]) for names in keys], writes=False)
        return [queue for queue, number in zip(queues, found, strict=True) if number]

    def _sweep(self, queue: str) -> Verb[None]:
        """Remove the traces of cancelled jobs from lanes that have no other."""
        idle = self.layout.key(queue, "idle_lanes")
        [lanes] = yield Batch([Call(("SMEMBERS", idle), idle)], writes=False)
        for first in range(0, len(lanes), AT_ONCE):
            piece = [lane.decode() for lane in lanes[first : first + AT_ONCE]]
            keys = [key for lane in piece for key in self.lane_keys(queue, lane)]
            yield Batch([self.call("sweep", queue, piece, keys)])


def _queues_of(jobs: Iterable[NewJob]) -> list[str]:
    return [job.queue for job in jobs]


def _inserted(job_id: JobId, answer: bytes) -> Inserted:
    kind = answer[:1]
    if kind in b"cd":
        return Inserted(job_id, InsertStatus.CREATED, deep=kind == b"d")
    if kind == b"f":
        return Inserted(job_id, InsertStatus.FULL)
    if kind == b"e":
        return Inserted(job_id, InsertStatus.EXISTING)
    status = InsertStatus.EXISTING if kind == b"=" else InsertStatus.KEY_CONFLICT
    return Inserted(answer[1:].decode(), status)
