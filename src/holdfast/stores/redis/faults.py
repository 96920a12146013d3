"""What the server's errors mean: one table. Everything that a server may answer instead of doing what it was asked."""

from __future__ import annotations

import re
from enum import Enum

from holdfast.errors import StoreUnavailable
from holdfast.stores.redis.wire import Place, ReplyError

_IN_A_SCRIPT = re.compile(r"@user_script: ?\d+: -?([A-Z]+) ")
"""How servers before 7.0 wrap the error of a command that a script gave."""
_NOT_ALLOWED_IN_A_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""What servers since 7.0 say without a code."""
_BEFORE_THE_FIRST_WRITE = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOSCRIPT", "BUSY", "LOADING"})


class Remedy(Enum):
    """What to do about an error. In every case the command was not carried out (but see `ended_midway`)."""

    RETRY = "retry"
    """The server will be able to in a moment."""
    RECONNECT = "reconnect"
    """It is no longer the server to talk to: find the one that is."""
    REDIRECT = "redirect"
    """It names the node that has the key."""
    RELOAD = "reload"
    """It does not know the script: send its text."""
    FATAL = "fatal"
    """It will not go away by itself."""


REMEDIES: dict[str, tuple[Remedy, str]] = {
    "LOADING": (Remedy.RETRY, "the server is reading its data from disk"),
    "BUSY": (Remedy.RETRY, "a script of somebody else keeps the server busy"),
    "TRYAGAIN": (Remedy.RETRY, "the queue's slot is being moved to another node"),
    "CLUSTERDOWN": (Remedy.RETRY, "the cluster has no master for the queue's slot"),
    "NOREPLICAS": (Remedy.RETRY, "the server has fewer replicas than min-replicas-to-write demands"),
    "READONLY": (Remedy.RECONNECT, "it is a replica now"),
    "MASTERDOWN": (Remedy.RECONNECT, "it is a replica, and its primary is down"),
    "UNBLOCKED": (Remedy.RECONNECT, "it has become a replica"),
    "MOVED": (Remedy.REDIRECT, "another node has the queue"),
    "ASK": (Remedy.REDIRECT, "another node is about to have the queue"),
    "NOSCRIPT": (Remedy.RELOAD, "the server has forgotten our scripts"),
    "OOM": (Remedy.FATAL, "it has reached its maxmemory: raise it, or let workers catch up"),
    "MISCONF": (Remedy.FATAL, "the server cannot save to disk and takes no writes: look at its log"),
    "NOAUTH": (Remedy.FATAL, "give a password in the store URL"),
    "WRONGPASS": (Remedy.FATAL, "the user or the password in the store URL is wrong"),
    "NOPERM": (Remedy.FATAL, "let the user do what docs/reference/redis.md lists"),
    "WRONGTYPE": (Remedy.FATAL, "a key of ours holds something else: does another program use it?"),
    "CROSSSLOT": (Remedy.FATAL, "on a cluster use redis+cluster://"),
    "NOPROTO": (Remedy.FATAL, "is it a Redis server?"),
}  # fmt: skip


def remedy_for(error: ReplyError) -> Remedy:
    """What to do about it. What is not in the table is not known to go away."""
    return REMEDIES.get(_code(error), (Remedy.FATAL, ""))[0]


def unavailable(error: ReplyError, place: Place) -> StoreUnavailable:
    """The error of our tree for a command that the server refused."""
    said = str(error).partition("\n")[0][:200]
    return StoreUnavailable(f"Redis at {place} says {said!r}{advice_for(error)}")


def advice_for(error: ReplyError) -> str:
    """What to do about it, to be put behind what the server said."""
    advice = REMEDIES.get(_code(error), (Remedy.FATAL, ""))[1]
    return f": {advice}" if advice else ""


def ended_midway(error: ReplyError) -> bool:
    """Whether a script met something that is not as we left it, perhaps after its first writes: they stay."""
    return "user_script" in str(error) and _code(error) not in _BEFORE_THE_FIRST_WRITE


def redirection(error: ReplyError, asked: Place) -> tuple[int, Place]:
    """The slot and the node that a MOVED or ASK of that node names. One without a host is where the asked one is."""
    _, slot, where = str(error).split()[:3]
    host, _, port = where.rpartition(":")
    return int(slot), Place(host or asked.host, int(port))


def _code(error: ReplyError) -> str:
    if any(told in str(error) for told in _NOT_ALLOWED_IN_A_SCRIPT):
        return "NOPERM"
    wrapped = _IN_A_SCRIPT.findall(str(error)) if str(error).startswith("ERR ") else []
    return wrapped[-1] if wrapped else str(error).partition(" ")[0]
