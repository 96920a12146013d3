"""What the server's errors mean: one table. Everything that a server may answer instead of doing what it was asked."""

from __future__ import annotations

from enum import Enum

from holdfast.errors import StoreUnavailable
from holdfast.stores.redis.wire import Place, ReplyError


class Remedy(Enum):
    """What to do about an error. In every case the command was not carried out."""

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
    advice = REMEDIES.get(_code(error), (Remedy.FATAL, ""))[1]
    said = str(error).partition("\n")[0][:200]
    return StoreUnavailable(f"Redis at {place} says {said!r}{': ' if advice else ''}{advice}. Nothing was written")


def redirection(error: ReplyError) -> tuple[int, Place]:
    """The slot and the node that a MOVED or ASK names."""
    _, slot, where = str(error).split()[:3]
    host, _, port = where.rpartition(":")
    return int(slot), Place(host, int(port))


def _code(error: ReplyError) -> str:
    return str(error).partition(" ")[0]
