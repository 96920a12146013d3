"""Which server has which key: one server, one found by sentinels, or the nodes of a cluster.

What is not known is found out by `discover`, a generator that asks servers: it works for both kinds of connections.
"""

from __future__ import annotations

import binascii
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.errors import StoreUnavailable
from holdfast.stores.redis.faults import advice_for
from holdfast.stores.redis.wire import Command, LineFailed, Place, ReplyError

SLOTS = 16_384
_FOLLOWED_AT_MOST = 8


class Send(msgspec.Struct, frozen=True):
    """Commands for one server. `plain`: without a greeting, as for a sentinel. `apart`: on a connection of its own
    kind, because the replies may be slow.
    """

    place: Place
    commands: Sequence[Command]
    plain: bool = False
    apart: bool = False
    timeout: float | None = None


class Pause(msgspec.Struct, frozen=True):
    """Wait so many seconds."""

    seconds: float


Result = list[Any] | LineFailed | ReplyError
Asking = Generator[list[Send] | Pause, list[Result], None]


def slot_of(key: bytes) -> int:
    """The slot of a key: the checksum of its hash tag, the text between the first braces, if there is one."""
    opened = key.find(b"{")
    if opened >= 0:
        closed = key.find(b"}", opened + 1)
        if closed > opened + 1:
            key = key[opened + 1 : closed]
    return binascii.crc_hqx(key, 0) % SLOTS


class Topology(Protocol):
    """The servers behind a store URL."""

    shown: str
    cluster: bool

    def place_of(self, key: bytes | None) -> Place | None:
        """Where the key is (None: any server will do), or None if that must be found out first."""

    def discover(self) -> Asking:
        """Find out. `StoreUnavailable` if no server answers."""

    def doubt(self) -> None:
        """What is known may be wrong."""

    def redirect(self, slot: int, place: Place) -> None:
        """A server says where the slot is."""

    def masters(self) -> list[Place]:
        """Every server that takes writes, as far as is known."""


def _told(result: Result) -> str:
    if isinstance(result, ReplyError):
        return f"{result}{advice_for(result)}"
    return str(result) if isinstance(result, LineFailed) else "no use"


class OneServer:
    """The primary among some servers: the one that says so, wherever a replica points to."""

    cluster = False

    def __init__(self, seeds: Sequence[Place]) -> None:
        self.shown = f"redis://{','.join(map(str, seeds))}"
        self._seeds = list(seeds)
        self._primary: Place | None = None

    def place_of(self, key: bytes | None) -> Place | None:
        """See `Topology`."""
        return self._primary

    def discover(self) -> Asking:
        """Ask each for its role. A replica names its primary."""
        candidates = list(self._seeds)
        said: list[str] = []
        for place in candidates:
            [answer] = yield [Send(place, [("ROLE",)])]
            if isinstance(answer, list) and isinstance(answer[0], list):
                role = answer[0]
                if role[0] == b"master":
                    self._primary = place
                    return
                pointed = Place(role[1].decode(), int(role[2]))
                said.append(f"{place} is a replica of {pointed}")
                if role[0] == b"slave" and pointed not in candidates and len(candidates) < _FOLLOWED_AT_MOST:
                    candidates.append(pointed)
            elif isinstance(answer, list) and str(answer[0]).startswith("NOPERM"):
                self._primary = place  # it may not say; then it is the one that was named
                return
            else:
                reply = answer[0] if isinstance(answer, list) else answer
                said.append(f"{place}: {_told(reply)}")
        raise StoreUnavailable(f"no primary at {self.shown}: {'; '.join(said)}")

    def doubt(self) -> None:
        """See `Topology`."""
        self._primary = None

    def redirect(self, slot: int, place: Place) -> None:
        """See `Topology`. Only a node of a cluster says such a thing."""
        raise StoreUnavailable(f"{self.shown} is a node of a cluster: use redis+cluster:// for it")

    def masters(self) -> list[Place]:
        """See `Topology`."""
        return [self._primary] if self._primary else []


class Watched(OneServer):
    """The primary that sentinels name."""

    def __init__(self, sentinels: Sequence[Place], name: str) -> None:
        super().__init__(sentinels)
        self.shown = f"redis+sentinel://{','.join(map(str, sentinels))}/{name}"
        self._name = name

    def discover(self) -> Asking:
        """Ask the sentinels, and the server that they name for its role: they may not have noticed yet."""
        said: list[str] = []
        for sentinel in self._seeds:
            command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name)
            [answer] = yield [Send(sentinel, [command], plain=True)]
            if not isinstance(answer, list) or not isinstance(answer[0], list):
                unknown = f"does not know {self._name!r}" if isinstance(answer, list) else _told(answer)
                said.append(f"sentinel {sentinel}: {unknown}")
                continue
            place = Place(answer[0][0].decode(), int(answer[0][1]))
            [answer] = yield [Send(place, [("ROLE",)])]
            if isinstance(answer, list) and isinstance(answer[0], list) and answer[0][0] == b"master":
                self._primary = place
                return
            said.append(f"sentinel {sentinel} names {place}, which is no primary: {_told(answer)}")
        raise StoreUnavailable(f"no primary at {self.shown}: {'; '.join(said)}")


class Cluster:
    """The nodes of a cluster, each with its slots."""

    cluster = True

    def __init__(self, seeds: Sequence[Place]) -> None:
        self.shown = f"redis+cluster://{','.join(map(str, seeds))}"
        self._seeds = list(seeds)
        self._nodes: list[Place | None] = []

    def place_of(self, key: bytes | None) -> Place | None:
        """See `Topology`."""
        if not self._nodes:
            return None
        return self._nodes[slot_of(key) if key is not None else 0]

    def discover(self) -> Asking:
        """Ask one node after the other, first those that were there before, for the map of slots."""
        said: list[str] = []
        for place in dict.fromkeys([*self.masters(), *self._seeds]):
            [answer] = yield [Send(place, [("CLUSTER", "SLOTS")])]
            if isinstance(answer, list) and isinstance(answer[0], list) and answer[0]:
                nodes: list[Place | None] = [None] * SLOTS
                for first, last, master, *_ in answer[0]:
                    host = (master[0] or b"").decode() or place.host
                    nodes[first : last + 1] = [Place(host, int(master[1]))] * (last + 1 - first)
                self._nodes = nodes
                return
            said.append(f"{place}: {_told(answer[0] if isinstance(answer, list) else answer)}")
        raise StoreUnavailable(f"no node of {self.shown} answers: {'; '.join(said)}")

    def doubt(self) -> None:
        """See `Topology`. The nodes are kept as those to ask first."""
        self._seeds = list(dict.fromkeys([*self._seeds, *self.masters()]))
        self._nodes = []

    def redirect(self, slot: int, place: Place) -> None:
        """See `Topology`."""
        if self._nodes:
            self._nodes[slot] = place

    def masters(self) -> list[Place]:
        """See `Topology`."""
        return list(dict.fromkeys(node for node in self._nodes if node is not None))
