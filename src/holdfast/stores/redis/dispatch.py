"""From a batch of commands to replies: to the right servers, over all that may get in the way.

The decisions are in `Dispatcher.execute`, a generator that yields what to send and how long to wait. `connections.py`
carries that out, on an event loop or on the calling thread.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeGuard, TypeVar

import msgspec

from holdfast.errors import OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.ports import Ports
from holdfast.stores.redis.faults import Remedy, ended_midway, redirection, remedy_for, unavailable
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redis.topology import Pause, Result, Send, Topology
from holdfast.stores.redis.wire import Command, LineFailed, Place, ReplyError, unpacked

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.008, 0.5
_MOST_REDIRECTIONS = 8
LEAST_WAIT = 0.05
"""Seconds that the last attempt has for its answer, however long those before it took."""


class Call(msgspec.Struct, frozen=True, gc=False):
    """One command, or one script with its keys and arguments. `key`: where it goes. `place`: there in any case.
    `may_fail`: an error is an answer like any other.
    """

    command: Command
    key: bytes | None = None
    script: Script | None = None
    place: Place | None = None
    may_fail: bool = False


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Calls that travel together; those to one server are carried out in this order. `durable`: wait until what they
    wrote is as safe as the store was asked to make it.
    """

    calls: Sequence[Call]
    writes: bool = True
    durable: bool = False


class Packed(msgspec.Struct, frozen=True, gc=False):
    """A call of a script that writes, as it travels: for what is called so often that its words are not put together
    each time. `key`: where it goes.
    """

    data: bytes
    key: bytes
    script: Script

    def batch(self) -> Batch:
        """The same call for the machinery that deals with whatever may get in the way."""
        return Batch((Call(unpacked(self.data), self.key, self.script),))


Verb = Generator[Batch, list[Any], T]


def run_script(script: Script, keys: Sequence[bytes], args: Sequence[Any]) -> Call:
    """The call of a script with all its keys."""
    return Call(("EVALSHA", script.sha, len(keys), *keys, *args), keys[0] if keys else None, script)


class Confirmation(msgspec.Struct, frozen=True):
    """A command that waits until writes are safe, and how many must say so."""

    command: Command
    needed: int
    what: str

    def missing(self, reply: Any) -> str | None:
        """What is missing, by the server's reply."""
        if isinstance(reply, ReplyError):
            return str(reply)
        confirmed = reply[0] if isinstance(reply, list) else reply
        return None if confirmed >= self.needed else f"{self.what} in time"


def is_complete(result: Result) -> TypeGuard[list[Any]]:
    """Whether it is an answer to every call, none of them an error."""
    return type(result) is list and not any(type(reply) is ReplyError for reply in result)


class Dispatcher:
    """Decides what to send where, and what to do about errors."""

    def __init__(self, topology: Topology, *, max_retries: int, patience: float, ports: Ports) -> None:
        self.topology = topology
        self.confirmation: Confirmation | None = None
        self._max_retries = max_retries
        self._patience = patience
        self._ports = ports

    def direct(self, batch: Batch) -> Send | None:
        """What `execute` would send first, if all of it goes to one server that is known, and nothing has to be waited
        for: the usual case, without preparations for the others. A result that `is_complete` is the answer.
        """
        calls = batch.calls
        if (batch.durable and self.confirmation is not None) or (len(calls) > 1 and self.topology.cluster):
            return None
        first = calls[0] if calls else None
        if first is None or first.place is not None or (place := self.topology.place_of(first.key)) is None:
            return None
        if len(calls) == 1:
            return Send(place, (first.command,))
        if any(call.place is not None for call in calls):
            return None
        return Send(place, [call.command for call in calls])

    def execute(
        self, batch: Batch, sent: Send | None = None, result: Result | None = None, began: float | None = None
    ) -> Generator[list[Send] | Pause, list[Result], list[Any]]:
        """The replies to the calls, in their order. Who has waited for as long as one answer may take tries no more.

        `sent`, `result`, `began`: what was sent as `direct` says, with what result, and when.
        `StoreUnavailable` if none was carried out, `OutcomeUnknown` if one that writes may have been.
        """
        attempt = _Attempt(batch, self.topology, self.confirmation if batch.durable else None)
        retries = redirections = 0
        deadline = (self._ports.clock.monotonic() if began is None else began) + self._patience
        while attempt.open:
            trouble: StoreError | None = None
            if sent is not None and result is not None:
                attempt.was_sent_to(sent.place)
                trouble = attempt.take([result])
                sent = None
            else:
                try:
                    sends = yield from attempt.routed()
                except StoreUnavailable as error:
                    trouble = error
                else:
                    if not batch.durable:  # a confirmation has a time of its own, which the server keeps
                        left = max(LEAST_WAIT, deadline - self._ports.clock.monotonic())
                        sends = [msgspec.structs.replace(send, timeout=left) for send in sends]
                    results = yield sends
                    trouble = attempt.take(results)
            if trouble is None:
                redirections += 1
                if redirections > _MOST_REDIRECTIONS:
                    raise attempt.failure(StoreUnavailable(f"the nodes of {self.topology.shown} point to each other"))
                continue
            retries += 1
            late = self._ports.clock.monotonic() >= deadline
            if retries > self._max_retries or late or not attempt.may_repeat:
                raise attempt.failure(trouble)
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**retries)
            yield Pause(pause * (0.5 + self._ports.random.fraction()))
        return attempt.answers


class _Attempt:
    """A batch under way."""

    def __init__(self, batch: Batch, topology: Topology, confirmation: Confirmation | None) -> None:
        self._batch = batch
        self._topology = topology
        self._confirmation = confirmation
        self._sent: list[tuple[Place, list[int]]] = []
        self._asking: dict[int, Place] = {}
        self._with_text: set[str] = set()
        self.answers: list[Any] = [None] * len(batch.calls)
        self.open = list(range(len(batch.calls)))
        self.may_repeat = True
        self._written = False
        self._fatal: StoreError | None = None

    def was_sent_to(self, place: Place) -> None:
        """All of it was sent there, without `routed`."""
        self._sent = [(place, list(self.open))]

    def routed(self) -> Generator[list[Send] | Pause, list[Result], list[Send]]:
        """What to send for the calls that have no answer yet."""
        places = [self._place(at) for at in self.open]
        if None in places:
            yield from self._topology.discover()
            places = [self._place(at) for at in self.open]
        groups: dict[Place, list[int]] = {}
        for at, place in zip(self.open, places, strict=True):
            if place is None:
                raise StoreUnavailable(f"{self._topology.shown} has no server for a part of its slots")
            groups.setdefault(place, []).append(at)
        self._sent = list(groups.items())
        return [self._send(place, calls) for place, calls in self._sent]

    def _place(self, at: int) -> Place | None:
        call = self._batch.calls[at]
        return call.place or self._asking.get(at) or self._topology.place_of(call.key)

    def _send(self, place: Place, calls: list[int]) -> Send:
        commands: list[Command] = []
        for at in calls:
            if at in self._asking:
                commands.append(("ASKING",))
            call = self._batch.calls[at]
            if call.script is not None and call.script.sha in self._with_text:
                commands.append(("EVAL", call.script.text, *call.command[2:]))
            else:
                commands.append(call.command)
        if self._confirmation is None:
            return Send(place, commands)
        return Send(place, [*commands, self._confirmation.command], apart=True)

    def take(self, results: Sequence[Result]) -> StoreError | None:
        """Keep the answers. What is in the way of the others, if it is more than a wrong address or a lost script.

        Every answer is looked at before an error is raised: it depends on whether any of them has written.
        """
        trouble: StoreError | None = None
        unconfirmed: StoreError | None = None
        self.open, self._fatal = [], None
        for (place, calls), result in zip(self._sent, results, strict=True):
            if isinstance(result, ReplyError):  # to the greeting
                self._fatal = unavailable(result, place)
                continue
            if isinstance(result, LineFailed):
                trouble = self._lost(calls, result)
                continue
            missing = self._confirmation.missing(result.pop()) if self._confirmation else None
            for at, reply in self._without_asking(calls, result):
                trouble = self._take_one(at, reply, place) or trouble
            if missing and self._written:
                unconfirmed = OutcomeUnknown(f"it was written to {place}, but not confirmed: {missing}")
        self.open.sort()
        if self._fatal is not None:
            raise self.failure(self._fatal)
        if unconfirmed is not None and trouble is None:
            raise unconfirmed
        return trouble

    def _without_asking(self, calls: list[int], replies: list[Any]) -> list[tuple[int, Any]]:
        rest = iter(replies)
        told = []
        for at in calls:
            if at in self._asking:
                next(rest)
                del self._asking[at]
            told.append((at, next(rest)))
        return told

    def _lost(self, calls: list[int], failed: LineFailed) -> StoreError:
        self._topology.doubt()
        self.open += calls
        if failed.sent and self._batch.writes:
            self._written, self.may_repeat = True, False
        return StoreUnavailable(str(failed))

    def _take_one(self, at: int, reply: Any, place: Place) -> StoreError | None:
        if not isinstance(reply, ReplyError) or self._batch.calls[at].may_fail:
            self.answers[at] = reply
            self._written = self._written or self._batch.writes
            return None
        remedy = remedy_for(reply)
        if remedy is Remedy.FATAL:
            self._written = self._written or (self._batch.writes and ended_midway(reply))
            self._fatal = unavailable(reply, place)
            return None
        self.open.append(at)
        script = self._batch.calls[at].script
        if remedy is Remedy.RELOAD and script is not None:
            self._with_text.add(script.sha)
            return None
        if remedy is Remedy.REDIRECT:
            slot, to = redirection(reply, place)
            if str(reply).startswith("ASK "):
                self._asking[at] = to
            else:
                self._topology.redirect(slot, to)
            return None
        if remedy is Remedy.RECONNECT:
            self._topology.doubt()
        return unavailable(reply, place)

    def failure(self, trouble: StoreError) -> StoreError:
        """The error for the batch as a whole."""
        if not isinstance(trouble, StoreUnavailable):
            return trouble
        if self._written:
            return OutcomeUnknown(f"the write may or may not have happened: {trouble}")
        return StoreUnavailable(f"{trouble}. Nothing was written")
