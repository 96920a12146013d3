"""A Redis that hands over to its replica, in good order or because it was killed: alone, with a sentinel, in a cluster.

Replication is not waited for, unless the store was asked to (`durability=replicas`): what was accepted in the last
moment may be missing afterwards. How much that was is said here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.errors import OutcomeUnknown
from holdfast.job import JobId, NewJob, State
from holdfast.ports import SYSTEM
from holdfast.store import JobQuery
from holdfast.stores import open_store
from tests.faults.engines import RedisDatabase
from tests.faults.producer import Producer
from tests.faults.stage import ServerStage
from tests.faults.test_server_killed import RESUMED_WITHIN, time_until_work_goes_on, wait_for_progress
from tests.servers import (
    RedisCluster,
    RedisSentinel,
    RedisServer,
    missing_server_policy,
    wait_for_replica,
)
from tests.worker.programs import eventually

PROCESSES = 2
FAST = 0.002


class Deployment(RedisDatabase):
    """Several servers, reached by a URL of their own."""

    def __init__(self, server: RedisServer, address: str) -> None:
        super().__init__(server)
        self._address = address

    def url(self, *, port: int = 0, timeout: float = 10.0) -> str:
        return f"{self._address}?timeout={timeout:g}"


@pytest.fixture
def pair() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary and its replica."""
    with ExitStack() as stack:
        with missing_server_policy():
            primary = RedisServer()
        stack.enter_context(primary)
        replica = stack.enter_context(RedisServer(settings={"replicaof": f"127.0.0.1 {primary.port}"}))
        wait_for_replica(primary, replica)
        primary.ask("SET", "probe", 1)
        wait_for_replica(primary, replica)  # a new replica is sent nothing for up to a second
        yield primary, replica


def address(*servers: RedisServer) -> str:
    return f"redis://{','.join(f'127.0.0.1:{server.port}' for server in servers)}/0"


def is_primary(server: RedisServer) -> bool:
    try:
        return server.info("replication")["role"] == "master"
    except ConnectionError:  # a sentinel ends all connections of who it promotes
        return False


def hand_over(
    folder: Path, database: RedisDatabase, harm: Callable[[], None], *, replicas_left: bool = False
) -> tuple[list[JobId], list[JobId]]:
    """Work under load, while the server that has the jobs changes. What is missing of what was accepted, and of what
    was accepted with `durability=replicas`.
    """
    with ServerStage(folder, database) as stage:
        careful_store = open_store(f"{database.url(timeout=1)}&durability=replicas", SYSTEM)
        supervisor = stage.supervisor(processes=PROCESSES, concurrency=5)
        processes = set(stage.open_sessions().values())
        with Producer(stage.store, every=FAST) as producer, Producer(careful_store, every=FAST) as careful:
            wait_for_progress(stage, 25)
            harm()
            promoted = time.monotonic()
            resumed = time_until_work_goes_on(stage, producer, promoted)
            confirmed = time_until_work_goes_on(stage, careful, promoted) if replicas_left else 0.0
            wait_for_progress(stage, 25)
            for each in (producer, careful):
                each.stop()
                assert each.error is None, repr(each.error)
            jobs = stage.wait_for_end([])
        lost = [[job_id for job_id in each.accepted if job_id not in jobs] for each in (producer, careful)]
        print(f"work went on {resumed:.2f} s after the promotion, replicas confirmed jobs after {confirmed:.2f} s")
        print(f"{producer}: {len(lost[0])} lost; confirmed by replicas: {careful}: {len(lost[1])} lost")
        assert {job.state for job in jobs.values()} == {State.SUCCEEDED}
        assert [job_id for each in (producer, careful) for job_id in each.refused if job_id in jobs] == []
        eventually(lambda: set(stage.open_sessions().values()) == processes, "every process has its session")
        assert not supervisor.lines("found dead")
        runs = stage.runs()
        again = [job_id for job_id in jobs if runs[job_id] > 1]
        print(f"{len(again)} of {len(jobs)} jobs ran again")
        assert [job_id for job_id in jobs if not runs[job_id]] == []
        careful_store.close()  # type: ignore[attr-defined]
    assert resumed <= RESUMED_WITHIN
    assert confirmed <= RESUMED_WITHIN
    return lost[0], lost[1]


@pytest.mark.parametrize("named", ["both", "the old primary"])
def test_a_hand_over_in_good_order_loses_nothing(
    tmp_path: Path, pair: tuple[RedisServer, RedisServer], named: str
) -> None:
    primary, replica = pair

    def fail_over() -> None:
        primary.ask("FAILOVER", "TO", "127.0.0.1", replica.port, "TIMEOUT", 5000)
        eventually(lambda: is_primary(replica), "the replica is promoted")

    database = Deployment(replica, address(*pair) if named == "both" else address(primary))
    lost = hand_over(tmp_path, database, fail_over, replicas_left=True)
    assert lost == ([], [])
    assert not is_primary(primary)


def test_a_sentinel_promotes_the_replica_of_a_primary_that_was_killed(
    tmp_path: Path, pair: tuple[RedisServer, RedisServer]
) -> None:
    primary, replica = pair
    with RedisSentinel(primary) as sentinel:

        def kill() -> None:
            primary.kill()
            eventually(lambda: is_primary(replica), "the replica is promoted")

        _, careful = hand_over(tmp_path, Deployment(replica, sentinel.url), kill)
    assert careful == []


def test_the_replica_takes_over_for_a_master_of_a_cluster_that_was_killed(tmp_path: Path) -> None:
    with RedisCluster(masters=3, replicas=1, settings={"cluster-node-timeout": "1000"}) as cluster:
        owner = cluster.owner("{default}")

        def kill() -> None:
            owner.kill()
            eventually(lambda: cluster.owner("{default}") is not owner, "its replica is promoted")

        _, careful = hand_over(tmp_path, Deployment(owner, cluster.url), kill)
    assert careful == []


# Negative control.


async def test_what_no_replica_has_is_lost_and_with_durability_replicas_it_was_not_accepted(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    primary, replica = pair
    first, second, third = (NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(3))
    url = f"{address(*pair)}?timeout=1"
    async with open_store(url, SYSTEM) as store, open_store(f"{url}&durability=replicas", SYSTEM) as careful:
        await careful.insert([first])
        replica.ask("REPLICAOF", "NO", "ONE")  # it hears nothing any more
        await store.insert([second])
        with pytest.raises(OutcomeUnknown) as unknown:
            await careful.insert([third])
        assert list(unknown.value.ids) == [third.id]
        primary.kill()
        assert [job.id for job in (await store.find(JobQuery())).jobs] == [first.id]
