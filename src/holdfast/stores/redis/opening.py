"""Opening a store: is the server one that keeps jobs, is it laid out as we think, is it the store that we knew?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.errors import InvalidOption, SchemaOutdated, StoreUnavailable, UnsafeStore
from holdfast.stores.redis.dispatch import Batch, Call, Confirmation, Dispatcher, Verb, run_script
from holdfast.stores.redis.layout import Layout, Names
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redis.wire import Place

OLDEST = (6, 2)
FIRST_WITH_WAITAOF = (7, 2)
LAYOUT = 2
"""How jobs are written. It rises when what a release before wrote could not be read: such a store is refused."""
UNKNOWN = "unknown"


class _Kept(msgspec.Struct, frozen=True):
    """What is kept of a store's layout. The first one had the names only."""

    version: int = 1
    names: Names = Names()


def information(reply: bytes) -> dict[str, str]:
    """What INFO says, by name."""
    pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def version_of(info: Mapping[str, str]) -> tuple[int, ...]:
    """The server's version, as the Redis version that it is compatible with."""
    return tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", "0"))[:3])


def inspect(dispatcher: Dispatcher) -> Verb[list[dict[str, str]]]:
    """What every server that takes writes says about itself. `UnsafeStore` if one of them may drop jobs."""
    yield Batch([Call(("PING",))], writes=False)
    masters = dispatcher.topology.masters()
    replies = yield Batch([Call(("INFO",), place=place) for place in masters], writes=False)
    every = [information(reply) for reply in replies]
    for place, info in zip(masters, every, strict=True):
        if version_of(info) < OLDEST:
            raise UnsafeStore(
                f"{place} is Redis {info.get('redis_version', 'of unknown version')}: it takes 6.2 or newer"
            )
        if info.get("arch_bits", "64") != "64":
            raise UnsafeStore(f"{place} is a build for {info['arch_bits']} bits: it cannot count microseconds exactly")
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise UnsafeStore(
                f"{place} has maxmemory-policy {policy}: it may throw jobs away when memory is short. Set it to "
                f"noeviction: CONFIG SET maxmemory-policy noeviction"
            )
        if info.get("cluster_enabled") == "1" and not dispatcher.topology.cluster:
            raise InvalidOption(f"{place} is a node of a cluster: use redis+cluster:// for it")
    return every


def settle_layout(layout: Layout, names: Names | None, *, create: bool, where: str) -> Verb[Names]:
    """The names that the store was laid out with; `names`, or the usual ones, if it is new.

    `InvalidOption` if other names were asked for than it has: jobs would not be found. `SchemaOutdated` if its jobs are
    not written as this version does.
    """
    [kept] = yield Batch([Call(("GET", layout.layout), layout.layout)], writes=False)
    if kept is None:
        if not create:
            raise StoreUnavailable(
                f"there is no Holdfast store {layout.namespace!r} at {where}: `holdfast migrate` or the first "
                f"enqueue makes one"
            )
        chosen = _kept(names or Names())
        yield Batch([Call(("SET", layout.layout, chosen, "NX"), layout.layout)], writes=False)  # may be repeated
        [kept] = yield Batch([Call(("GET", layout.layout), layout.layout)], writes=False)
    found = msgspec.json.decode(kept, type=_Kept)
    if found.version != LAYOUT:
        raise SchemaOutdated(
            f"the store {layout.namespace!r} at {where} has layout {found.version}, this version of Holdfast writes "
            f"{LAYOUT}: let the version that made it work off its jobs, or use another namespace"
        )
    if names is not None and names != found.names:
        raise InvalidOption(
            f"the store {layout.namespace!r} at {where} was laid out with other key names: {kept.decode()}. Use "
            f"these, or another namespace"
        )
    return found.names


def _kept(names: Names) -> bytes:
    return msgspec.json.encode(_Kept(LAYOUT, names))


def present_epoch(layout: Layout) -> Verb[tuple[str, int]]:
    """The store's epoch as it is; '' and 0 if it has none."""
    [[found, count]] = yield Batch([Call(("HMGET", layout.epoch, "id", "count"), layout.epoch)], writes=False)
    return (found.decode(), int(count or 0)) if found else ("", 0)


def epoch(
    layout: Layout, scripts: Mapping[str, Script], expected: str, fresh: str, *, anew: bool = False
) -> Verb[tuple[str, int]]:
    """The store's epoch: its id and counter, which rises with every call. '' and 0 if it is not the one expected.

    `fresh`: the id to give it if it has none, or `anew`, if it still has the one expected: whoever else expects that
    one hears of it. Others may have been faster; theirs is answered then.
    """
    # A counter that rises once more than it had to is no harm: it may be repeated.
    args = [expected, fresh, "anew" if anew else ""]
    [[found, count]] = yield Batch([run_script(scripts["epoch"], [layout.epoch], args)], writes=False)
    return found.decode(), count


def keep_layout(layout: Layout) -> Verb[None]:
    """Write down the names in use, if the store was emptied and does not know them any more."""
    chosen = _kept(layout.names)
    yield Batch([Call(("SET", layout.layout, chosen, "NX"), layout.layout)], writes=False)


def setting(name: str, places: Sequence[Place]) -> Verb[list[str]]:
    """A setting of each server, or `UNKNOWN` if this user may not read it."""
    calls = [Call(("CONFIG", "GET", name), place=place, may_fail=True) for place in places]
    replies = yield Batch(calls, writes=False)
    return [reply[1].decode() if isinstance(reply, list) and len(reply) == 2 else UNKNOWN for reply in replies]


def confirmation(
    durability: str, infos: Sequence[Mapping[str, str]], masters: Sequence[Place], patience: float
) -> Verb[Confirmation | None]:
    """How to make sure that what was written is safe; None if every answer already says so. `UnsafeStore` if the
    server has no way to say so.
    """
    milliseconds = round(patience * 1000)
    if durability == "replicas":
        if any(int(info.get("connected_slaves", "0")) == 0 for info in infos):
            raise UnsafeStore("durability=replicas needs a replica, and a server has none connected")
        return Confirmation(("WAIT", 1, milliseconds), 1, "no replica had it")
    if durability == "aof":
        if any(info.get("aof_enabled", "0") != "1" for info in infos):
            raise UnsafeStore("durability=aof needs appendonly yes, and a server has it off")
        if any(version_of(info) < FIRST_WITH_WAITAOF for info in infos):
            yield from _require_fsync(masters)
            return None
        if "no" in (yield from setting("appendfsync", masters)):
            raise UnsafeStore(
                "durability=aof needs appendfsync everysec or always: with no, nobody knows when it is on disk"
            )
        return Confirmation(("WAITAOF", 1, 0, milliseconds), 1, "it was not on disk")
    return None


def _require_fsync(masters: Sequence[Place]) -> Verb[None]:
    """Before WAITAOF there was no other way than to let the server flush before each answer."""
    found = yield from setting("appendfsync", masters)
    for place, fsync in zip(masters, found, strict=True):
        if fsync == "always":
            continue
        seen = "hides its appendfsync from this user" if fsync == UNKNOWN else f"has appendfsync {fsync}"
        advice = "let it run CONFIG GET appendfsync" if fsync == UNKNOWN else "set appendfsync always"
        raise UnsafeStore(
            f"durability=aof needs WAITAOF, which Redis 7.2 brought, or appendfsync always, and {place} {seen}: "
            f"{advice}"
        )
