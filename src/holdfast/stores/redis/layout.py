"""The names of the keys. Everything of a queue has its hash tag, `{queue}`, so that a cluster keeps it on one node.

Some names are for operators, and theirs to choose: what each worker works on, its heartbeat, the ready lists, completed
jobs, dead letters. In such a name `{queue}` stands for the queue's hash tag and `%s` for the worker's session. The
store keeps its layout, so that every program finds the jobs, whatever settings it was started with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from holdfast.errors import InvalidOption, shown
from holdfast.job import SessionId
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redis.topology import slot_of

_NAMESPACE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,63}")
_TAG = "{queue}"
_MOST_CACHED = 10_000


class Names(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names that an operator may choose; '' for the usual one. `ready`: by the number of the priority."""

    processing: str = ""
    heartbeat: str = ""
    completed: str = ""
    dead: str = ""
    ready: Mapping[str, str] = {}


class Layout:
    """Every key by what it is for."""

    def __init__(self, namespace: str, names: Names) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise InvalidOption(
                f"namespace {shown(namespace)} must be a letter and then up to 63 letters, digits, '_', '.', ':' or '-'"
            )
        self.namespace = namespace
        self._cached: dict[tuple[str, str], list[bytes]] = {}
        self.sessions = f"{namespace}:sessions".encode()
        self.queues = f"{namespace}:queues".encode()
        self.epoch = f"{namespace}:epoch".encode()
        self.layout = f"{namespace}:layout".encode()
        self.use(names)

    def use(self, names: Names) -> None:
        """Use these names from now on. `InvalidOption` if they cannot work."""
        namespace = self.namespace
        self.names = names
        self._cached.clear()
        self._patterns = {
            "processing": names.processing or f"{namespace}:{_TAG}:processing:%s",
            "heartbeat": names.heartbeat or f"{namespace}:{_TAG}:heartbeat:%s",
            "completed": names.completed or f"{namespace}:{_TAG}:completed",
            "dead": names.dead or f"{namespace}:{_TAG}:dead",
        }
        self._ready = {int(priority): name for priority, name in names.ready.items()}
        self._refuse_unclear_names()

    def _refuse_unclear_names(self) -> None:
        for what, pattern in self._patterns.items():
            wanted = 1 if what in ("processing", "heartbeat") else 0
            if pattern.count("%s") != wanted or "%" in pattern.replace("%s", ""):
                need = "exactly one %s, which stands for the worker" if wanted else "no % in it"
                raise InvalidOption(f"the name of the {what} key, {shown(pattern)}, must have {need}")
        chosen = [*self._patterns.values(), *self._ready.values()]
        for one in self._ready.values():
            if any(other.startswith(f"{one}:") for other in chosen):
                raise InvalidOption(
                    f"the ready list {shown(one)} has shares whose names would begin like another key's"
                )
        if len(set(chosen)) < len(chosen):
            raise InvalidOption(f"two kinds of keys have the same name: {', '.join(sorted(chosen))}")

    def refuse_across_slots(self) -> None:
        """`InvalidOption` if a cluster could not keep everything of a queue on one node."""
        probe = "a.queue"
        slot = slot_of(b"{%s}" % probe.encode())
        for pattern in (*self._patterns.values(), *self._ready.values()):
            if slot_of(_fill(pattern, probe)) != slot:
                raise InvalidOption(
                    f"on a cluster the key name {shown(pattern)} must contain {_TAG}, the queue's hash tag, before any "
                    f"other brace: everything of a queue is on one node"
                )

    @property
    def one_queue_only(self) -> str | None:
        """A ready list that all queues would share, so that there can only be one queue; None if there is none."""
        return next((name for name in self._ready.values() if _TAG not in name), None)

    # Keys of a queue.

    def of_queue(self, queue: str, script: Script) -> list[bytes]:
        """The script's own keys. Not to be changed."""
        keys = self._cached.get((queue, script.name))
        if keys is None:
            if len(self._cached) >= _MOST_CACHED:
                self._cached.clear()
            keys = self._cached[queue, script.name] = [self.key(queue, name) for name in script.keys]
        return keys

    def key(self, queue: str, name: str) -> bytes:
        """One of the queue's keys."""
        if name in self._patterns:
            return _fill(self._patterns[name], queue)
        return f"{self.namespace}:{{{queue}}}:{name}".encode()

    def ready(self, queue: str, lane: str) -> bytes:
        """The list of a lane ("priority, tab, share")."""
        priority, _, share = lane.partition("\t")
        pattern = self._ready.get(int(priority)) or f"{self.namespace}:{_TAG}:ready:{priority}"
        key = _fill(pattern, queue)
        return key + f":{share}".encode() if share else key

    def due(self, queue: str, lane: str) -> bytes:
        """Those of a lane that came back, or were delayed."""
        return f"{self.namespace}:{{{queue}}}:due:{lane.replace(chr(9), ':')}".encode()

    def processing(self, queue: str, session_id: SessionId) -> bytes:
        """What a worker has in flight."""
        return _fill(self._patterns["processing"], queue).replace(b"%s", session_id.encode())

    def heartbeat(self, queue: str, session_id: SessionId) -> bytes:
        """The sign that a worker lives."""
        return _fill(self._patterns["heartbeat"], queue).replace(b"%s", session_id.encode())

    # Keys of none.

    def root(self, session_id: SessionId) -> bytes:
        """The session itself."""
        return f"{self.namespace}:session:{session_id}".encode()


def _fill(pattern: str, queue: str) -> bytes:
    return pattern.replace(_TAG, f"{{{queue}}}").encode()
