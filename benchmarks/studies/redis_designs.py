"""Where a job's record could be in Redis: bytes per job, and the server's processor time to write, read and remove it.

- one hash: ours. A field of one hash for each queue; a job that was claimed has a second, small field for its state.
- a string each: a key of its own for each record.
- a hash each: a key of its own, one field for each part of the record, as BullMQ and RQ have it.
- small hashes: a hundred records in each of many hashes, chosen by the id. Records of more than 64 bytes, as they all
  are, do not fit the compact encoding, so it saves nothing.
- binary ids: as ours, with the sixteen bytes of an id instead of its text, in the hash, the list and the index.
- no index: as ours, without the sorted set by which jobs are listed in the order of their ids.

The waiting line is the same list everywhere, with the index unless it says otherwise. Each design holds a hundred
thousand jobs with a payload of 100 bytes. The work is done a hundred jobs at a time by pipelines of plain commands:
what scripts cost on top is the same for all. Processor time is the server's own figure, so other work on the machine
does not count.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis

from benchmarks.measure import quiet_progress, scaled
from benchmarks.studies.redis_memory import PAYLOAD
from holdfast.job import NewJob
from holdfast.ports import SYSTEM
from holdfast.stores.redis.records import body_of
from tests.servers import RedisServer

JOBS = scaled(100_000, 1_000)
BATCH = 100
STAMPS = b"1763000000000000\t1763000000000000\t"
OURS = "one hash"

Record = tuple[str, bytes]


class Design(msgspec.Struct, frozen=True):
    """How records are written, read and removed, by pipelined commands."""

    write: Callable[[Any, Sequence[Record]], None]
    read: Callable[[Any, Sequence[str]], None]
    remove: Callable[[Any, Sequence[str]], None]
    name_of: Callable[[str], str | bytes] = str
    indexed: bool = True


def _binary(job_id: str) -> bytes:
    return uuid.UUID(job_id).bytes


def _bucket(job_id: str) -> str:
    return f"{{q}}:jobs:{int(job_id[-6:], 16) % (JOBS // BATCH)}"


def _write_hash_each(pipe: Any, records: Sequence[Record]) -> None:
    for job_id, record in records:
        fields, description, payload = record.split(b"\n", 2)
        parts = zip(("run", "made", "keep", "priority", "share", "key"), fields.split(b"\t"), strict=True)
        pipe.hset(f"{{q}}:job:{job_id}", mapping={**dict(parts), "about": description, "payload": payload})


def _each(verb: str) -> Callable[[Any, Sequence[str]], None]:
    def work(pipe: Any, ids: Sequence[str]) -> None:
        for job_id in ids:
            getattr(pipe, verb)(f"{{q}}:job:{job_id}")

    return work


def _in_buckets(verb: str) -> Callable[[Any, Sequence[str]], None]:
    def work(pipe: Any, ids: Sequence[str]) -> None:
        for job_id in ids:
            getattr(pipe, verb)(_bucket(job_id), job_id)

    return work


def _write_buckets(pipe: Any, records: Sequence[Record]) -> None:
    for job_id, record in records:
        pipe.hset(_bucket(job_id), job_id, record)


DESIGNS = {
    OURS: Design(
        lambda pipe, records: pipe.hset("{q}:jobs", mapping=dict(records)),
        lambda pipe, ids: pipe.hmget("{q}:jobs", ids),
        lambda pipe, ids: pipe.hdel("{q}:jobs", *ids),
    ),
    "a string each": Design(
        lambda pipe, records: pipe.mset({f"{{q}}:job:{job_id}": record for job_id, record in records}),
        lambda pipe, ids: pipe.mget([f"{{q}}:job:{job_id}" for job_id in ids]),
        lambda pipe, ids: pipe.delete(*(f"{{q}}:job:{job_id}" for job_id in ids)),
    ),
    "a hash each": Design(_write_hash_each, _each("hgetall"), _each("delete")),
    "small hashes": Design(_write_buckets, _in_buckets("hget"), _in_buckets("hdel")),
    "binary ids": Design(
        lambda pipe, records: pipe.hset("{q}:jobs", mapping={_binary(job_id): record for job_id, record in records}),
        lambda pipe, ids: pipe.hmget("{q}:jobs", [_binary(job_id) for job_id in ids]),
        lambda pipe, ids: pipe.hdel("{q}:jobs", *(_binary(job_id) for job_id in ids)),
        name_of=_binary,
    ),
    "no index": Design(
        lambda pipe, records: pipe.hset("{q}:jobs", mapping=dict(records)),
        lambda pipe, ids: pipe.hmget("{q}:jobs", ids),
        lambda pipe, ids: pipe.hdel("{q}:jobs", *ids),
        indexed=False,
    ),
}


def _busy(client: Any) -> float:
    """Seconds that the server has worked."""
    cpu = client.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def _measure(client: Any, design: Design, records: Sequence[Record]) -> tuple[float, float]:
    """Bytes, and microseconds of the server, per job."""
    client.flushall()
    before, started = client.info("memory")["used_memory"], _busy(client)
    batches = [records[first : first + BATCH] for first in range(0, len(records), BATCH)]
    for batch in batches:
        pipe = client.pipeline(transaction=False)
        design.write(pipe, batch)
        names = [design.name_of(job_id) for job_id, _ in batch]
        pipe.rpush("{q}:ready", *names)
        if design.indexed:
            pipe.zadd("{q}:index", dict.fromkeys(names, 0))
        pipe.execute()
    worked = _busy(client) - started
    held = client.info("memory")["used_memory"] - before
    started = _busy(client)
    for batch in batches:
        ids = [job_id for job_id, _ in batch]
        pipe = client.pipeline(transaction=False)
        pipe.lpop("{q}:ready", BATCH)
        design.read(pipe, ids)
        design.remove(pipe, ids)
        if design.indexed:
            pipe.zrem("{q}:index", *map(design.name_of, ids))
        pipe.execute()
    worked += _busy(client) - started
    return held / len(records), worked / len(records) * 1e6


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each other design: its bytes, and its time, beside ours."""
    new = [NewJob(id=SYSTEM.ids.job_id(), task="noop", payload=PAYLOAD.encode(), queue="bench") for _ in range(JOBS)]
    records = [(job.id, STAMPS + body_of(job)) for job in new]
    figures = {}
    with RedisServer() as server, redis.Redis(port=server.port) as client, quiet_progress() as progress:
        task = progress.add_task("designs", total=len(DESIGNS))
        for name, design in DESIGNS.items():
            figures[name] = _measure(client, design, records)
            progress.advance(task)
            progress.refresh()
    for at, unit in enumerate(("bytes/job", "µs/job")):
        for name in DESIGNS:
            if name != OURS:
                ours, reference = figures[OURS][at], figures[name][at]
                yield {
                    "benchmark": f"redis designs: {OURS} beside {name}",
                    "ours": ours,
                    "reference": reference,
                    "unit": unit,
                    "ratio": reference / ours,
                    "target": None,
                }
