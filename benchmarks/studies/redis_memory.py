"""What a job costs in Redis: bytes per job, ready and in flight, beside BullMQ and RQ on the same server.

Bytes are the growth of `used_memory` (INFO memory) over the empty server, divided by the jobs; it is read after every
client but this one has gone. Before each measurement comes a small run and a FLUSHALL, so that what is there once, such
as cached scripts, does not count. Each job has the same payload, a JSON object of 100 bytes that does not compress well
(RQ compresses), in a queue `bench`. Everything else has its default: an RQ job has its description, which repeats most
of the payload, and BullMQ its stream of events, of at most about ten thousand. BullMQ's figures differ by 32 bytes from
one server to the next: whether the small hash of a job still has its first table depends on the server's hash seed.

In flight: ours are claimed a hundred at a time under sessions of a hundred jobs each, and the sessions count. BullMQ's
are taken with `getNextJob` and have a lock each; its check for stalled jobs, which notes every active job once more,
has not run yet. RQ's are begun as its worker begins them; the keys of the workers, one for each job in flight, do not
count. RQ begins about a thousand jobs a second, so there are fewer of them. `benchmarks/peers` has both programs.
"""

import asyncio
import json
import random
import string
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from benchmarks.measure import quiet_progress, scaled
from benchmarks.peers import PEERS, Peer, PeerMissingError
from holdfast.job import NewJob
from holdfast.ports import SYSTEM
from holdfast.store import MOST_PER_CALL, ClaimRequest, InsertStatus, Session
from holdfast.stores import open_store
from tests.servers import RedisServer

JOBS = scaled(100_000, 1_000)
IN_FLIGHT = {"Holdfast": JOBS, "BullMQ": JOBS, "RQ": scaled(20_000, 1_000)}
WARM_UP = 1_000
SESSION_JOBS = 100
PAYLOAD = json.dumps(
    {"text": "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=89))}, separators=(",", ":")
)
assert len(PAYLOAD) == 100
SETTLE_SECONDS = 30.0
STEADY_BYTES = 4_096


async def _fill(port: int, count: int, payload: bytes) -> None:
    async with open_store(f"redis://127.0.0.1:{port}/0", SYSTEM) as store:
        for done in range(0, count, MOST_PER_CALL):
            jobs = [
                NewJob(id=SYSTEM.ids.job_id(), task="noop", payload=payload, queue="bench")
                for _ in range(min(MOST_PER_CALL, count - done))
            ]
            answers = await store.insert(jobs)
            assert all(answer.status is InsertStatus.CREATED for answer in answers)


async def _start(port: int, count: int) -> None:
    async with open_store(f"redis://127.0.0.1:{port}/0", SYSTEM) as store:
        for _ in range(0, count, SESSION_JOBS):
            session = Session(id=SYSTEM.ids.session_id(), host="worker-1", pid=1, queues=("bench",))
            await store.open_session(session)
            claimed = await store.claim(ClaimRequest(session_id=session.id, queues=("bench",), limit=SESSION_JOBS))
            assert len(claimed.jobs) == SESSION_JOBS


class Ours:
    """Holdfast, with the verbs of a peer."""

    name = "Holdfast"

    def fill(self, port: int, count: int, payload: str) -> None:
        asyncio.run(_fill(port, count, payload.encode()))

    def start(self, port: int, count: int) -> None:
        asyncio.run(_start(port, count))


def _steady_memory(connection: redis.Redis) -> int:
    """What the server uses when the other clients have gone, and their buffers with them."""
    deadline = time.monotonic() + SETTLE_SECONDS
    before = -1
    while time.monotonic() < deadline:
        info = connection.info()
        used = int(info["used_memory"])
        if info["connected_clients"] == 1 and abs(used - before) < STEADY_BYTES:
            return used
        before = used
        time.sleep(0.5)
    raise RuntimeError("the server's memory does not come to rest, or a client stays connected")


def _measured(contestant: Ours | Peer, server: RedisServer, count: int, *, started: bool) -> float:
    """Bytes per job, of jobs that are ready or that were started."""
    with redis.Redis(port=server.port) as connection:
        contestant.fill(server.port, WARM_UP, PAYLOAD)
        contestant.start(server.port, WARM_UP)
        connection.flushall()
        empty = _steady_memory(connection)
        contestant.fill(server.port, count, PAYLOAD)
        if started:
            contestant.start(server.port, count)
        return (_steady_memory(connection) - empty) / count


def _installed() -> list[Peer]:
    """The peers that are there or can be installed; why one is left out goes to stderr."""
    peers = []
    for install in PEERS:
        try:
            peers.append(install())
        except PeerMissingError as error:
            print(f"redis-memory leaves a peer out: {error}", file=sys.stderr)
    return peers


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """Two results for each peer that is there, ready and in flight, and one of ours alone. Here a ratio is the other's
    bytes to ours: above 1, ours is the smaller one.
    """
    peers = _installed()
    contestants: list[Ours | Peer] = [Ours(), *peers]
    ready: dict[str, float] = {}
    in_flight: dict[str, float] = {}
    with quiet_progress() as progress, RedisServer() as server:
        bar = progress.add_task("measuring", total=2 * len(contestants))
        for contestant in contestants:
            name = contestant.name
            progress.update(bar, description=f"{name}: ready", refresh=True)
            ready[name] = _measured(contestant, server, JOBS, started=False)
            progress.update(bar, description=f"{name}: in flight", advance=1, refresh=True)
            in_flight[name] = _measured(contestant, server, IN_FLIGHT[name], started=True)
            progress.update(bar, advance=1, refresh=True)
    title = f"Redis: memory of a job with a payload of {len(PAYLOAD)} bytes"
    for state, figures in (("ready", ready), ("in flight", in_flight)):
        for peer in peers:
            ours, reference = figures["Holdfast"], figures[peer.name]
            yield {
                "benchmark": f"{title}, {state}: {peer.name} {peer.version} / Holdfast",
                "ours": ours,
                "reference": reference,
                "ratio": reference / ours,
                "target": None,
                "unit": "bytes/job",
            }
    yield {
        "benchmark": f"{title}: in flight / ready",
        "ours": in_flight["Holdfast"],
        "reference": ready["Holdfast"],
        "ratio": in_flight["Holdfast"] / ready["Holdfast"],
        "target": None,
        "unit": "bytes/job",
    }
