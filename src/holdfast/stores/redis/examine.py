"""What a Redis server says about itself: what an accepted job survives in it, and what is in the way."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.store import Finding, Verdict, oldest_ready
from holdfast.stores.redis.dispatch import Batch, Call, Dispatcher, Verb
from holdfast.stores.redis.opening import FIRST_WITH_WAITAOF, UNKNOWN, inspect, setting, version_of
from holdfast.stores.redis.verbs import Verbs

_ALMOST_FULL = 0.8

Info = dict[str, str]


def examine(dispatcher: Dispatcher, verbs: Verbs, durability: str) -> Verb[list[Finding]]:
    """Everything that is found, the first about what an accepted job survives. On a cluster: at its weakest node."""
    infos = yield from inspect(dispatcher)
    fsyncs = yield from setting("appendfsync", dispatcher.topology.masters())
    oldest = yield from _oldest_ready(verbs)
    return [
        *_durability(infos, fsyncs, durability),
        _server(infos, dispatcher.topology.shown),
        Finding("eviction", "noeviction"),
        _memory(infos),
        _saving(infos),
        oldest,
    ]


def _durability(infos: Sequence[Info], fsyncs: Sequence[str], durability: str) -> list[Finding]:
    appends = all(info.get("aof_enabled") == "1" for info in infos)
    always = appends and all(fsync == "always" for fsync in fsyncs)
    flushes = appends and all(fsync in ("always", "everysec") for fsync in fsyncs)
    replicas = min((int(info.get("connected_slaves", "0")) for info in infos), default=0)
    waits_for_disk = durability == "aof" and all(version_of(info) >= FIRST_WITH_WAITAOF for info in infos)
    if not appends:
        crash = "not a crash of the server: what came since the last snapshot would be lost"
    elif always or waits_for_disk or all(fsync == "no" for fsync in fsyncs):
        crash = "a crash of the server"
    else:  # while a flush is under way, it answers before it writes
        crash = "nearly every crash of the server: what it was told during a flush, two seconds at most, would be lost"
    if always or waits_for_disk:
        power = "a power cut, if the disk honours flushes"
    elif flushes:
        power = "not a power cut: up to two seconds would be lost"
    else:
        power = "not a power cut"
    if durability == "replicas":
        failover = "most failovers: a replica had it before it was accepted"
    elif replicas:
        failover = "not every failover: what the replica has not yet got would be lost"
    else:
        failover = "not the loss of the server: it has no replica"
    verdict = Verdict.OK if always or waits_for_disk else Verdict.WEAK if appends else Verdict.BAD
    findings = [
        Finding("survives", "; ".join(["a crash of any worker or producer", crash, power, failover]), verdict),
        Finding(
            "appendonly",
            "yes" if appends else "no",
            Verdict.OK if appends else Verdict.BAD,
            "" if appends else "set appendonly yes: without it, accepted jobs are in memory only",
        ),
    ]
    if appends:
        findings.append(_fsync(fsyncs, waits_for_disk))
    findings.append(_replicas(replicas, durability))
    return findings


def _fsync(fsyncs: Sequence[str], waits_for_disk: bool) -> Finding:
    value = "/".join(sorted(set(fsyncs)))
    if UNKNOWN in fsyncs:
        return Finding("appendfsync", "hidden from this user", Verdict.WEAK, "let it run CONFIG GET appendfsync")
    if "no" in fsyncs:
        return Finding("appendfsync", value, Verdict.WEAK, "set appendfsync everysec: the system flushes when it likes")
    if waits_for_disk or value == "always":
        return Finding("appendfsync", value)
    advice = "for jobs that must survive a power cut, set appendfsync always, or use durability=aof with Redis 7.2"
    return Finding("appendfsync", value, Verdict.WEAK, advice)


def _replicas(replicas: int, durability: str) -> Finding:
    if not replicas:
        return Finding("replicas", "0", Verdict.WEAK, "the server is the only place where the jobs are: add a replica")
    if durability == "replicas":
        return Finding("replicas", f"{replicas}, waited for")
    advice = "durability=replicas in the store URL waits until one of them has a new job"
    return Finding("replicas", f"{replicas}, not waited for", Verdict.WEAK, advice)


def _server(infos: Sequence[Info], where: str) -> Finding:
    names = {f"{info.get('server_name', 'redis').title()} {_version(info)}" for info in infos}
    nodes = f" on {len(infos)} masters" if len(infos) > 1 else ""
    return Finding("server", f"{', '.join(sorted(names))}{nodes} at {where}")


def _version(info: Info) -> str:
    return info.get("valkey_version") or info.get("redis_version", "of unknown version")


def _memory(infos: Sequence[Info]) -> Finding:
    used = sum(int(info.get("used_memory", "0")) for info in infos)
    most = sum(int(info.get("maxmemory", "0")) for info in infos)
    fullest = max(
        (int(info.get("used_memory", "0")) / limit for info in infos if (limit := int(info.get("maxmemory", "0")))),
        default=0.0,
    )
    value = f"{used / 2**20:,.0f} MiB used" + (f" of {most / 2**20:,.0f}" if most else ", no limit set")
    if fullest < _ALMOST_FULL:
        return Finding("memory", value)
    advice = "new jobs are refused when it is full: raise maxmemory, or let workers catch up"
    return Finding("memory", value, Verdict.WEAK, advice)


def _saving(infos: Sequence[Info]) -> Finding:
    names = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    failed = sorted({name for info in infos for name in names if info.get(name, "ok") != "ok"})
    if not failed:
        return Finding("saving", "ok")
    return Finding("saving", f"{', '.join(failed)}: failed", Verdict.BAD, "look at the server's log: is its disk full?")


def _oldest_ready(verbs: Verbs) -> Verb[Finding]:
    replies = []
    for queue in (yield from verbs.queues()):
        lanes = verbs.layout.key(queue, "lanes")
        [waiting] = yield Batch([Call(("HKEYS", lanes), lanes)], writes=False)
        keys = [key for lane in waiting for key in verbs.lane_keys(queue, lane.decode())]
        replies += yield Batch([verbs.call("oldest", queue, [], keys)], writes=False)
    now = max((reply[0] for reply in replies), default=0)
    due = [reply[1] for reply in replies if reply[1] >= 0]
    return oldest_ready(min(due) if due else None, now)
