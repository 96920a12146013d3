"""The Lua scripts: one for each verb, put together from `lua/`. The names of a queue's keys are its first locals."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

import msgspec

AT_ONCE = 100
"""Moves, ids or rows in one script: longer batches travel as several, one after the other, in one round trip. A script
keeps every other client waiting, so it must not take more than about a millisecond."""
INSERTED_AT_ONCE = 250
SUCCEEDED_AT_ONCE = 250
CLAIMED_AT_ONCE = 300
_CONSTANTS = {
    "MOST_PROMOTED": 250,
    "MOST_TRACES": 250,
    "MOST_LOOKS": 4,
    "MOST_LOOKED": 250,
    "MOST_BYTES": 4 * 1024 * 1024,
    "MOST_COMPLETED": 10_000,
}
SERVER_CLOCK = "local clock = redis.call('TIME')\nlocal now = clock[1] * 1000000 + clock[2]\n"
"""The server's own clock, in microseconds, the same for the whole script."""

_MOVING = ("jobs", "states", "later", "lanes", "meta", "holders", "cancels", "expiry", "dead", "completed", "keys",
           "key_expiry", "wake", "idle_lanes")  # fmt: skip
_PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "insert": (
        ("jobs", "later", "lanes", "meta", "keys", "key_expiry", "index", "wake", "checkpoints"),
        ("common", "wake", "insert"),
    ),
    "put": (("meta", "index", "jobs", "lanes", "wake"), ("wake", "put")),
    "claim": (
        ("jobs", "states", "later", "lanes", "meta", "parts", "holders", "progress", "wake"),
        ("common", "wake", "claim"),
    ),
    "apply": ((*_MOVING, "parts", "index", "outbox"), ("common", "wake", "moves", "apply")),
    "cancel": (_MOVING, ("common", "wake", "moves", "cancel")),
    "bury": (_MOVING, ("common", "wake", "moves", "bury")),
    "beat": (("parts", "cancels"), ("beat",)),
    "part": (("parts", "holders"), ("part",)),
    "held": (("jobs", "states", "progress", "parts"), ("listed", "held")),
    "note": (("jobs", "states", "progress", "parts"), ("common", "note")),
    "read": (("jobs", "states", "progress"), ("listed", "read")),
    "find": (("jobs", "states", "progress", "index", "dead"), ("listed", "find")),
    "forget": (("jobs", "states", "progress", "index", "expiry", "dead", "meta"), ("remove", "forget")),
    "prune": (
        ("jobs", "states", "progress", "index", "expiry", "dead", "meta", "keys", "key_expiry"),
        ("common", "remove", "prune"),
    ),
    "counts": (("meta", "later"), ("common", "counts")),
    "sweep": (("lanes", "idle_lanes"), ("sweep",)),
    "oldest": (("jobs", "states", "later"), ("oldest",)),
    "pause": (("meta", "wake"), ("wake", "pause")),
    "pass_on": (("meta", "lanes", "later", "wake"), ("wake", "pass_on")),
    "root": ((), ("root",)),
    "epoch": ((), ("epoch",)),
    "enter": ((), ("enter",)),
    "now": ((), ("now",)),
    "page": ((), ("page",)),
    "astray": ((), ("astray",)),
    "pulse": ((), ("pulse",)),
}
_WITHIN = {"pulse": ("root", "beat", "epoch")}
"""Which scripts a script calls: for it, each is a function of its keys and arguments."""


class Script(msgspec.Struct, frozen=True):
    """One script. `keys`: which of a queue's keys come first; others may follow."""

    name: str
    keys: tuple[str, ...]
    text: str
    sha: str


def load_scripts(clock: str = SERVER_CLOCK) -> dict[str, Script]:
    """Every script by its name, with that clock."""
    return {name: _script(name, keys, pieces, clock) for name, (keys, pieces) in _PARTS.items()}


def _script(name: str, keys: tuple[str, ...], pieces: tuple[str, ...], clock: str) -> Script:
    text = clock
    for within in _WITHIN.get(name, ()):
        text += f"local function {within}(KEYS, ARGV)\n{_body(*_PARTS[within])}\nend\n"
    text += _body(keys, pieces)
    return Script(name, keys, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _body(keys: tuple[str, ...], pieces: tuple[str, ...]) -> str:
    text = f"local {', '.join(keys)} = unpack(KEYS, 1, {len(keys)})\n" if keys else ""
    constants = {"OWN_KEYS": len(keys), **_CONSTANTS}
    bodies = [_piece(piece) for piece in pieces]
    used = {constant: value for constant, value in constants.items() if any(constant in body for body in bodies)}
    text += "".join(f"local {constant} = {value}\n" for constant, value in used.items())
    return text + "\n".join(bodies)


@cache
def _piece(name: str) -> str:
    return (resources.files("holdfast.stores.redis") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
