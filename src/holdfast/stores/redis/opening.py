"""Opening a store: is the server one that keeps jobs, is it laid out as we think, is it the store that we knew?"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from holdfast.errors import InvalidOption, StoreUnavailable, UnsafeStore
from holdfast.stores.redis.dispatch import Batch, Call, Confirmation, Dispatcher, Verb, run_script
from holdfast.stores.redis.layout import Layout, Names
from holdfast.stores.redis.scripts import Script

OLDEST = (6, 2)
FIRST_WITH_WAITAOF = (7, 2)


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

    `InvalidOption` if other names were asked for than it has: jobs would not be found.
    """
    [kept] = yield Batch([Call(("GET", layout.layout), layout.layout)], writes=False)
    if kept is None:
        if not create:
            raise StoreUnavailable(f"there is no Holdfast store {layout.namespace!r} at {where}")
        chosen = msgspec.json.encode(names or Names())
        yield Batch([Call(("SET", layout.layout, chosen, "NX"), layout.layout)])
        [kept] = yield Batch([Call(("GET", layout.layout), layout.layout)], writes=False)
    found = msgspec.json.decode(kept, type=Names)
    if names is not None and names != found:
        raise InvalidOption(
            f"the store {layout.namespace!r} at {where} was laid out with other key names: {kept.decode()}. Use "
            f"these, or another namespace"
        )
    return found


def present_epoch(layout: Layout) -> Verb[tuple[str, int]]:
    """The store's epoch as it is; '' and 0 if it has none."""
    [[found, count]] = yield Batch([Call(("HMGET", layout.epoch, "id", "count"), layout.epoch)], writes=False)
    return (found.decode(), int(count or 0)) if found else ("", 0)


def epoch(layout: Layout, scripts: Mapping[str, Script], expected: str, fresh: str) -> Verb[tuple[str, int]]:
    """The store's epoch: its id and counter, which rises with every call. '' and 0 if it is not the one expected.

    `fresh`: the id to give it if it has none.
    """
    [[found, count]] = yield Batch([run_script(scripts["epoch"], [layout.epoch], [expected, fresh])])
    return found.decode(), count


def confirmation(durability: str, infos: list[dict[str, str]], patience: float) -> Confirmation | None:
    """How to make sure that what was written is safe. `UnsafeStore` if the server has no way to say so."""
    milliseconds = round(patience * 1000)
    if durability == "replicas":
        if any(int(info.get("connected_slaves", "0")) == 0 for info in infos):
            raise UnsafeStore("durability=replicas needs a replica, and a server has none connected")
        return Confirmation(("WAIT", 1, milliseconds), 1, "no replica had it")
    if durability == "aof":
        if any(info.get("aof_enabled", "0") != "1" for info in infos):
            raise UnsafeStore("durability=aof needs appendonly yes, and a server has it off")
        if any(version_of(info) < FIRST_WITH_WAITAOF for info in infos):
            return None
        return Confirmation(("WAITAOF", 1, 0, milliseconds), 1, "it was not on disk")
    return None
