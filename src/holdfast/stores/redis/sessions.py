"""Sessions. The root of a session, a key of its own, decides whether it is open; each of its queues has a part that
follows, so that claims and moves can check it where the jobs are.

A queue is entered in the root before it gets its part, and a close reads the entered queues as it closes the root. So
no part stays open that a close does not reach; and a part that was closed is never opened again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.errors import SessionClosed
from holdfast.job import Job, SessionId
from holdfast.store import CLOSED_SESSION_KEPT, Beat, Session, SessionPage, SessionView
from holdfast.stores.redis.dispatch import Batch, Call, Verb, run_script
from holdfast.stores.redis.layout import Layout
from holdfast.stores.redis.records import readable
from holdfast.stores.redis.scripts import Script

_HOLDERS_AT_ONCE = 100
_QUEUE = b"queue:"


class Sessions:
    """The verbs about sessions. `together`: all keys are on one server, so that one script may use any of them."""

    def __init__(self, layout: Layout, scripts: Mapping[str, Script], *, together: bool) -> None:
        self._layout = layout
        self._scripts = scripts
        self._together = together
        self._entered: tuple[SessionId, list[str]] = ("", [])
        """Of the session that has beaten last, the queues. Queues are only ever added to a root."""
        self._last_beat: tuple[SessionId, float] = ("", 0.0)

    def _root(self, session_id: SessionId, *args: Any) -> Call:
        return run_script(self._scripts["root"], [self._layout.root(session_id)], args)

    def _call(self, name: str, queue: str, more_keys: Sequence[bytes], *args: Any) -> Call:
        script = self._scripts[name]
        return run_script(script, [*self._layout.of_queue(queue, script), *more_keys], args)

    def _part(self, queue: str, session_id: SessionId, verb: str) -> Call:
        return self._call("part", queue, [self._layout.heartbeat(queue, session_id)], session_id, verb)

    # Opening, beating, closing.

    def open(self, session: Session) -> Verb[None]:
        """See `Store.open_session`."""
        [is_open] = yield Batch([self._root(session.id, "open", session.host, session.pid, *session.queues)])
        if is_open:
            registry = self._layout.sessions
            # Entered after the root is there, so that an entry without a root is one whose time is over.
            entry = run_script(self._scripts["enter"], [registry], [0, session.id])
            yield Batch([entry, *(self._part(queue, session.id, "open") for queue in session.queues)])

    def join(self, session_id: SessionId, queue: str) -> Verb[None]:
        """Give an open session its part in one more queue. `SessionClosed` if it is not open."""
        [is_open] = yield Batch([self._root(session_id, "join", queue)])
        if not is_open:
            raise SessionClosed(f"session {session_id} is not open; it may not claim jobs")
        yield Batch([self._part(queue, session_id, "open")])

    def sign_ttl(self, session_id: SessionId, now: float, usual: float) -> float:
        """How long the sign that a worker lives is to last, from this beat on: longer than usual if it beats more
        seldom, as one does that was given a TTL of its own.
        """
        last, self._last_beat = self._last_beat, (session_id, now)
        since = now - last[1] if last[0] == session_id else 0.0
        return usual if since < usual / 2 else 3 * since

    def beat(self, session_id: SessionId, ttl: float, epoch: str) -> Verb[tuple[Beat, int, tuple[str, int] | None]]:
        """See `Store.beat`; the counter; and what became of the epoch, if it is known.

        A script for all of it, where that is possible, and if the queues are those of the beat before. Otherwise one
        round trip for the root, one for the parts, and the epoch has not been asked.
        """
        milliseconds = round(ttl * 1000)
        last, entered = self._entered
        if self._together and last == session_id:
            keys = [self._layout.root(session_id), self._layout.epoch]
            for queue in entered:
                keys += self._beat_keys(queue, session_id)
            pulse = run_script(self._scripts["pulse"], keys, [session_id, milliseconds, epoch])
            [answer] = yield Batch([pulse])
            raised, parts, found = answer or (None, [], None)
        else:
            entered = []
            [raised] = yield Batch([self._root(session_id, "beat")])
            parts, found = [], None
        if raised is None:
            return Beat(open=False, held=0, cancel=()), 0, None
        count, fields = raised
        queues = _queues_among(fields)
        more = [queue for queue in queues if queue not in entered]
        args = [session_id, milliseconds]
        parts += yield Batch(
            [run_script(self._scripts["beat"], self._beat_keys(queue, session_id), args) for queue in more]
        )
        self._entered = session_id, queues
        held = dict(
            zip((self._layout.processing(queue, session_id) for queue in [*entered, *more]), parts, strict=True)
        )
        cancel = dict.fromkeys(job_id.decode() for part in parts for job_id in part[2])
        beat = Beat(
            open=all(part[0] for part in parts), held=sum(part[1] for part in held.values()), cancel=tuple(cancel)
        )
        return beat, count, None if found is None else (found[0].decode(), found[1])

    def _beat_keys(self, queue: str, session_id: SessionId) -> list[bytes]:
        own = self._layout.of_queue(queue, self._scripts["beat"])
        return [*own, self._layout.processing(queue, session_id), self._layout.heartbeat(queue, session_id)]

    def close(self, session_id: SessionId, if_beat: int | None) -> Verb[bool]:
        """See `Store.close_session`. One that was begun before is completed."""
        [[closed, fields]] = yield Batch([self._root(session_id, "close", "" if if_beat is None else if_beat)])
        yield Batch([self._part(queue, session_id, "close") for queue in _queues_among(fields)])
        return bool(closed)

    # Reading.

    def page(self, cursor: str | None, limit: int) -> Verb[SessionPage]:
        """See `Store.sessions`: the registry by SSCAN, never the whole key space."""
        entries, after = yield from self._entries(cursor, limit)
        return SessionPage(tuple(_view(session_id, flat) for session_id, flat in entries if flat), after)

    def _entries(self, cursor: str | None, limit: int) -> Verb[tuple[list[tuple[SessionId, list[bytes]]], str | None]]:
        """Some sessions of the registry, each with its root, if it has one, and where the next page begins."""
        registry = self._layout.sessions
        if self._together:
            script = run_script(self._scripts["page"], [registry], [cursor or 0, limit, self._layout.root("")])
            [[after, *flat]] = yield Batch([script], writes=False)
            ids = [session_id.decode() for session_id in flat[::2]]
            return list(zip(ids, flat[1::2], strict=True)), None if after == b"0" else after.decode()
        [[after, found]] = yield Batch([Call(("SSCAN", registry, cursor or 0, "COUNT", limit), registry)], writes=False)
        ids = [session_id.decode() for session_id in found]
        roots = [self._layout.root(session_id) for session_id in ids]
        flats = yield Batch([Call(("HGETALL", root), root) for root in roots], writes=False)
        return list(zip(ids, flats, strict=True)), None if after == b"0" else after.decode()

    def held(self, session_id: SessionId) -> Verb[list[Job]]:
        """See `Store.held`."""
        root = self._layout.root(session_id)
        [fields] = yield Batch([Call(("HKEYS", root), root)], writes=False)
        return (yield from self._jobs_of([session_id], _queues_among(fields), 1_000_000, "held"))

    def lost(self, limit: int, queues: Sequence[str], session_id: SessionId | None) -> Verb[list[Job]]:
        """See `Store.lost`. Completes what a close has begun: its root is closed, a part of it perhaps not yet."""
        jobs: list[Job] = []
        for queue in queues:
            cursor = b"0"
            while len(jobs) < limit:
                holders, cursor = yield from self._holders(queue, cursor, session_id)
                yield from self._close_parts(queue, holders)
                jobs += yield from self._jobs_of(holders, [queue], limit - len(jobs), "lost")
                if cursor == b"0":
                    break
        if not jobs and session_id is None:  # there is time for those that hold nothing
            for queue in queues:
                yield from self._complete_closes(queue)
        return jobs

    def astray(self) -> Verb[list[str] | None]:
        """The queues in which `lost` could find anything; None for any."""
        if not self._together:
            return None
        registry = self._layout.queues
        args = [f"{self._layout.namespace}:", self._layout.root("")]
        [queues] = yield Batch([run_script(self._scripts["astray"], [registry], args)], writes=False)
        return sorted(queue.decode() for queue in queues)

    def _holders(self, queue: str, cursor: bytes, session_id: SessionId | None) -> Verb[tuple[list[SessionId], bytes]]:
        if session_id is not None:
            return [session_id], b"0"
        holders = self._layout.key(queue, "holders")
        command = ("SSCAN", holders, cursor, "COUNT", _HOLDERS_AT_ONCE)
        [[after, ids]] = yield Batch([Call(command, holders)], writes=False)
        return [holder.decode() for holder in ids], after

    def _complete_closes(self, queue: str) -> Verb[None]:
        """Close the parts of sessions whose root is closed, also of those that hold nothing."""
        parts = self._layout.key(queue, "parts")
        cursor = b"0"
        while True:
            command = ("HSCAN", parts, cursor, "COUNT", _HOLDERS_AT_ONCE)
            [[cursor, flat]] = yield Batch([Call(command, parts)], writes=False)
            pairs = zip(flat[::2], flat[1::2], strict=True)
            yield from self._close_parts(queue, [session_id.decode() for session_id, part in pairs if part == b"1"])
            if cursor == b"0":
                return

    def _close_parts(self, queue: str, sessions: Sequence[SessionId]) -> Verb[None]:
        """Close the open parts of those sessions whose root is not open."""
        roots = [self._layout.root(session_id) for session_id in sessions]
        parts = self._layout.key(queue, "parts")
        found = yield Batch(
            [
                *(Call(("HGET", root, "open"), root) for root in roots),
                *(Call(("HGET", parts, session_id), parts) for session_id in sessions),
            ],
            writes=False,
        )
        standing = zip(sessions, found[: len(sessions)], found[len(sessions) :], strict=True)
        half_closed = [session_id for session_id, root, part in standing if root != b"1" and part == b"1"]
        yield Batch([self._part(queue, session_id, "close") for session_id in half_closed])

    def _jobs_of(self, sessions: Sequence[SessionId], queues: Iterable[str], limit: int, which: str) -> Verb[list[Job]]:
        found: list[Job] = []
        if sessions:
            for queue in queues:
                keys = [self._layout.processing(queue, session_id) for session_id in sessions]
                [flat] = yield Batch([self._call("held", queue, keys, limit, which, *sessions)], writes=False)
                jobs, unreadable = readable(queue, flat)
                found += jobs
                for session_id in sessions if unreadable else ():
                    yield from self.bury(queue, session_id, unreadable)
        return found

    def bury(self, queue: str, session_id: SessionId, unreadable: Sequence[bytes]) -> Verb[None]:
        """Make dead letters of what the session holds of these jobs, which nobody can read."""
        if unreadable:
            keys = [self._layout.processing(queue, session_id)]
            yield Batch([self._call("bury", queue, keys, session_id, *unreadable)])

    # Tidying.

    def prune(self, limit: int, queues: Sequence[str]) -> Verb[int]:
        """Remove sessions that were closed long ago and hold nothing. How many. `queues`: all there are."""
        removed = 0
        cursor: str | None = None
        now: int | None = None
        while removed < limit:
            entries, cursor = yield from self._entries(cursor, _HOLDERS_AT_ONCE)
            if now is None and any(not root or not _view(session_id, root).open for session_id, root in entries):
                [now] = yield Batch([run_script(self._scripts["now"], [], [])], writes=False)  # as a rule nobody asks
            for session_id, root in entries:
                if removed < limit and now is not None and _is_over(session_id, root, now):
                    # Without a root it is one that was removed half-way.
                    its_queues = _queues_among(root[::2]) if root else queues
                    removed += yield from self._prune_one(session_id, its_queues)
            if cursor is None:
                break
        return removed

    def _prune_one(self, session_id: SessionId, queues: Sequence[str]) -> Verb[int]:
        held = [self._layout.processing(queue, session_id) for queue in queues]
        found = yield Batch([Call(("EXISTS", key), key) for key in held], writes=False)
        if any(found):
            return 0
        [gone] = yield Batch([self._root(session_id, "expire", CLOSED_SESSION_KEPT)])
        if gone:
            strike_off = Call(("SREM", self._layout.sessions, session_id), self._layout.sessions)
            yield Batch([*(self._part(queue, session_id, "forget") for queue in queues), strike_off])
        return int(gone)


def _is_over(session_id: SessionId, root: Sequence[bytes], now: int) -> bool:
    """Whether it is worth asking: its node, which may have another clock, decides."""
    if not root:
        return True
    view = _view(session_id, root)
    return not view.open and view.beat_at + CLOSED_SESSION_KEPT <= now


def _queues_among(fields: Sequence[bytes]) -> list[str]:
    return sorted(field[len(_QUEUE) :].decode() for field in fields if field.startswith(_QUEUE))


def _view(session_id: SessionId, flat: Sequence[bytes]) -> SessionView:
    root = dict(zip(flat[::2], flat[1::2], strict=True))
    return SessionView(
        id=session_id,
        beat=_number(root.get(b"beat")),
        open=root.get(b"open") == b"1",
        opened_at=_number(root.get(b"opened_at")),
        beat_at=_number(root.get(b"beat_at")),
        host=root.get(b"host", b"").decode(errors="backslashreplace"),
        pid=_number(root.get(b"pid")),
        queues=tuple(filter(None, root.get(b"queues", b"").decode(errors="backslashreplace").split("\t"))),
    )


def _number(text: bytes | None) -> int:
    """0 for what is none: one session that somebody spoilt must not hide the others from a keeper."""
    return int(text) if text and text.isdigit() else 0
