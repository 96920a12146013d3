"""What a server says about itself: each weak setting has its verdict and its advice. Also by `holdfast doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.ports import SYSTEM
from holdfast.store import Examinable, Finding, Session, Verdict
from holdfast.stores import open_store
from holdfast.stores.redis import RedisStore
from tests.cli.helpers import records, run
from tests.cli.test_doctor import advice, verdicts
from tests.postgres.helpers import HOUR, claim, new_job, new_jobs, wait_until
from tests.redis.helpers import later_by, store_at
from tests.servers import RedisCluster, RedisServer, missing_server_policy, wait_for_replica


@pytest.fixture(scope="module")
def own_server() -> Iterator[RedisServer]:
    """A server whose settings may be changed."""
    with missing_server_policy():
        server = RedisServer(settings={"appendonly": "yes", "appendfsync": "always", "dbfilename": "snapshot.rdb"})
    with server:
        yield server


@pytest.fixture
def sound(own_server: RedisServer) -> Iterator[RedisServer]:
    """With all settings as they should be, and an empty store, before and after."""
    own_server.ask("FLUSHALL")
    store = store_at(own_server.url)
    store.open_blocking()
    store.close()
    yield own_server
    for name, value in (("appendonly", "yes"), ("appendfsync", "always"), ("maxmemory", "0")):
        own_server.ask("CONFIG", "SET", name, value)


async def found(server: RedisServer, options: str = "") -> dict[str, Finding]:
    store = store_at(f"{server.url}?{options}" if options else server.url)
    findings = await store.examine()
    store.close()
    assert findings[0].name == "survives"
    assert all((finding.verdict is Verdict.OK) <= (finding.advice == "") for finding in findings)
    assert all("\n" not in finding.advice for finding in findings)
    return {finding.name: finding for finding in findings}


def weak(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.verdict.value for name, finding in findings.items() if finding.verdict is not Verdict.OK}


def dump(server: RedisServer) -> dict[str, object]:
    """Everything in it, as it is."""
    return {key: (server.ask("DUMP", key), server.ask("PTTL", key) < 0) for key in server.ask("KEYS", "*")}


async def test_the_best_that_one_server_can_do(sound: RedisServer) -> None:
    assert isinstance(store_at(sound.url), Examinable)
    findings = await found(sound)
    assert weak(findings) == {"replicas": "weak"}
    assert findings["survives"].value == (
        "a crash of any worker or producer; a crash of the server; a power cut, if the disk honours flushes; "
        "not the loss of the server: it has no replica"
    )
    assert findings["server"].value.startswith(("Redis ", "Valkey "))
    assert findings["server"].value.endswith(f"at redis://127.0.0.1:{sound.port}")
    assert findings["eviction"].value == "noeviction"
    assert findings["memory"].value.endswith("MiB used, no limit set")
    assert findings["saving"].value == "ok"
    assert findings["oldest ready job"].value == "none is due"
    assert findings["replicas"].advice == "the server is the only place where the jobs are: add a replica"


@pytest.mark.parametrize(
    ("setting", "value", "expected", "survives", "said"),
    [
        (
            "appendonly",
            "no",
            {"survives": "bad", "appendonly": "bad"},
            "not a crash of the server: what came since the last snapshot would be lost; not a power cut; ",
            "set appendonly yes",
        ),
        (
            "appendfsync",
            "everysec",
            {"survives": "weak", "appendfsync": "weak"},
            "; nearly every crash of the server: what it was told during a flush, two seconds at most, would be lost; "
            "not a power cut: up to two seconds would be lost; ",
            "for jobs that must survive a power cut, set appendfsync always",
        ),
        (
            "appendfsync",
            "no",
            {"survives": "weak", "appendfsync": "weak"},
            "; a crash of the server; not a power cut; ",
            "set appendfsync everysec",
        ),
    ],
)
async def test_a_weak_setting(
    sound: RedisServer, setting: str, value: str, expected: dict[str, str], survives: str, said: str
) -> None:
    sound.ask("CONFIG", "SET", setting, value)
    findings = await found(sound)
    assert weak(findings) == {**expected, "replicas": "weak"}
    assert survives in findings["survives"].value
    assert findings[setting].value == value
    assert findings[setting].advice.startswith(said)
    result = await asyncio.to_thread(run, "doctor", sound.url)
    assert result.exit_code == ("bad" in expected.values())
    told = {name: verdict for name, verdict in verdicts(result).items() if verdict != "ok"}
    assert told == {**expected, "replicas": "weak"}
    assert any(line.startswith(f"{expected[setting]}: {setting}: {said}") for line in advice(result))


async def test_memory_near_the_limit(sound: RedisServer) -> None:
    used = int(sound.info("memory")["used_memory"])
    sound.ask("CONFIG", "SET", "maxmemory", 4 * used)
    memory = (await found(sound))["memory"]
    assert memory.verdict is Verdict.OK
    assert " MiB used of " in memory.value
    sound.ask("CONFIG", "SET", "maxmemory", int(used * 1.1))
    memory = (await found(sound))["memory"]
    assert memory.verdict is Verdict.WEAK
    assert memory.advice == "new jobs are refused when it is full: raise maxmemory, or let workers catch up"


async def test_an_eviction_policy(sound: RedisServer) -> None:
    sound.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        result = await asyncio.to_thread(run, "doctor", sound.url)
        assert result.exit_code == 1
        assert verdicts(result) == {"store": "bad"}
        assert "UnsafeStore" in result.stdout
        assert "maxmemory-policy allkeys-lru" in " ".join(result.stdout.split())
    finally:
        sound.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_a_snapshot_that_failed(sound: RedisServer) -> None:
    blocked = sound.folder / "snapshot.rdb"
    blocked.unlink(missing_ok=True)
    (blocked / "by a folder").mkdir(parents=True)
    sound.ask("BGSAVE", "SCHEDULE")
    wait_until(lambda: sound.info("persistence")["rdb_last_bgsave_status"] == "err")
    saving = (await found(sound))["saving"]
    assert saving == Finding(
        "saving", "rdb_last_bgsave_status: failed", Verdict.BAD, "look at the server's log: is its disk full?"
    )
    assert (await asyncio.to_thread(run, "doctor", sound.url)).exit_code == 1
    (blocked / "by a folder").rmdir()
    blocked.rmdir()
    sound.ask("BGSAVE", "SCHEDULE")
    wait_until(lambda: sound.info("persistence")["rdb_last_bgsave_status"] == "ok")
    assert (await found(sound))["saving"].verdict is Verdict.OK


async def test_replicas(sound: RedisServer) -> None:
    with RedisServer(settings={"replicaof": f"127.0.0.1 {sound.port}"}) as replica:
        wait_for_replica(sound, replica)
        findings = await found(sound)
        assert weak(findings) == {"replicas": "weak"}
        assert findings["replicas"].value == "1, not waited for"
        assert findings["replicas"].advice.startswith("durability=replicas in the store URL")
        assert findings["survives"].value.endswith("not every failover: what the replica has not yet got would be lost")
        findings = await found(sound, "durability=replicas")
        assert weak(findings) == {}
        assert findings["replicas"].value == "1, waited for"
        assert findings["survives"].value.endswith("most failovers: a replica had it before it was accepted")
        # Through the replica it is the primary that is examined.
        findings = await found(replica)
        assert findings["replicas"].value == "1, not waited for"


async def test_settings_that_are_hidden(sound: RedisServer) -> None:
    sound.ask("ACL", "SETUSER", "narrow", "reset", "on", ">hunter2", "~*", "+@all", "-config")
    store = store_at(sound.url.replace("redis://", "redis://narrow:hunter2@"))
    findings = {finding.name: finding for finding in await store.examine()}
    store.close()
    assert findings["appendfsync"] == Finding(
        "appendfsync", "hidden from this user", Verdict.WEAK, "let it run CONFIG GET appendfsync"
    )
    assert findings["survives"].verdict is Verdict.WEAK
    sound.ask("CONFIG", "SET", "appendonly", "no")
    store = store_at(sound.url.replace("redis://", "redis://narrow:hunter2@"))
    findings = {finding.name: finding for finding in await store.examine()}
    store.close()
    assert findings["survives"].verdict is Verdict.BAD


async def test_the_oldest_ready_job(sound: RedisServer) -> None:
    store = store_at(sound.url)
    await store.insert([new_job(delay=HOUR)])
    assert (await found(sound))["oldest ready job"].value == "none is due"
    traces = new_jobs(5, priority=1)
    kept = new_jobs(2, priority=1, share="a")
    await store.insert([*traces, *kept])
    assert await due_for(store, 2 * HOUR) == "due for 2:00:00 (h:mm:ss)"
    # Those that were cancelled stay behind in the list as traces, and are not looked at.
    later_by(store, HOUR // 2)
    await store.insert(new_jobs(2, priority=1))
    await store.request_cancel([job.id for job in (*traces, *kept)])
    assert await due_for(store, HOUR * 5 // 2) == "due for 2:00:00 (h:mm:ss)"
    await store.open_session(Session(id="s", queues=("default",)))
    later_by(store, HOUR // 2)
    assert len(await claim(store, "s")) == 2
    assert (await found(sound))["oldest ready job"].value == "none is due"
    # One that waited for its time, and nobody has claimed since.
    assert await due_for(store, 3 * HOUR) == "due for 2:00:00 (h:mm:ss)"
    store.close()


async def due_for(store: RedisStore, microseconds: int) -> str:
    later_by(store, microseconds)
    [value] = [finding.value for finding in await store.examine() if finding.name == "oldest ready job"]
    return value.replace("1:59:58", "2:00:00").replace("2:00:01", "2:00:00").replace("1:59:59", "2:00:00")


async def test_more_traces_than_are_looked_at(sound: RedisServer) -> None:
    """Hundreds of cancelled jobs before the first that is due do not hide it."""
    store = store_at(sound.url)
    gone = new_jobs(350)
    await store.insert(gone)
    await store.insert(new_jobs(1))
    await store.request_cancel([job.id for job in gone])
    assert await due_for(store, 2 * HOUR) == "due for 2:00:00 (h:mm:ss)"
    store.close()


async def test_it_changes_nothing(sound: RedisServer) -> None:
    store = store_at(sound.url)
    await store.insert([*new_jobs(4), new_job(queue="b", delay=HOUR)])
    await store.open_session(Session(id="s", queues=("default",)))
    await store.open_session(Session(id="dead", queues=("default",)))
    await claim(store, "s", 1)
    await claim(store, "dead", 1)
    await store.close_session("dead")
    await store.set_paused("b", True)
    store.close()
    before = dump(sound)
    result = await asyncio.to_thread(run, "doctor", sound.url)
    assert verdicts(result)["lost jobs"] == "weak"
    assert verdicts(result)["queue b"] == "weak"
    assert dump(sound) == before


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_it_creates_nothing(sound: RedisServer, elsewhere: bool) -> None:
    url = sound.url
    if elsewhere:
        url = f"{url}?namespace=nothing_here"
    else:
        sound.ask("FLUSHALL")
    before = dump(sound)
    store = open_store(url, SYSTEM, existing=True)
    assert isinstance(store, RedisStore)
    with pytest.raises(StoreUnavailable, match=r"there is no Holdfast store '(holdfast|nothing_here)' at redis://"):
        await store.examine()
    store.close()
    result = await asyncio.to_thread(run, "doctor", url)
    assert result.exit_code == 1
    assert verdicts(result) == {"store": "bad"}
    assert "there is no Holdfast store" in " ".join(result.stdout.split())
    assert dump(sound) == before


async def test_nobody_answers() -> None:
    url = "redis://holdfast:hunter2@127.0.0.1:1/0"
    with pytest.raises(
        StoreUnavailable, match=r"no primary at redis://127\.0\.0\.1:1: .*cannot connect to 127\.0\.0\.1:1"
    ):
        await store_at(url).examine()
    result = await asyncio.to_thread(run, "doctor", url)
    assert result.exit_code == 1
    assert verdicts(result) == {"store": "bad"}
    assert "hunter2" not in result.stdout + result.stderr


async def test_a_cluster(redis_cluster: RedisCluster) -> None:
    """Its weakest node counts."""
    url = f"{redis_cluster.url}?namespace=examined"
    async with store_at(url) as store:
        await store.insert([new_job(queue=f"q{number}") for number in range(6)])
        redis_cluster.nodes[1].ask("CONFIG", "SET", "appendonly", "yes")
        findings = {finding.name: finding for finding in await store.examine()}
        redis_cluster.nodes[1].ask("CONFIG", "SET", "appendonly", "no")
    assert findings["appendonly"].verdict is Verdict.BAD
    assert " on 3 masters at redis+cluster://" in findings["server"].value
    assert findings["oldest ready job"].value.startswith("due for 0:00:0")


def test_the_command(sound: RedisServer) -> None:
    result = run("doctor", sound.url)
    assert result.exit_code == 0
    names = ("survives", "appendonly", "appendfsync", "replicas", "server", "eviction", "memory", "saving",
             "oldest ready job", "workers")  # fmt: skip
    assert verdicts(result) == {**dict.fromkeys(names, "ok"), "replicas": "weak"}
    assert advice(result) == ["weak: replicas: the server is the only place where the jobs are: add a replica"]
    sound.ask("ACL", "SETUSER", "secretive", "reset", "on", ">hunter2", "~*", "+@all")
    [record] = records(run("doctor", "--json", sound.url.replace("redis://", "redis://secretive:hunter2@")))
    assert "hunter2" not in str(record)
    assert [finding["verdict"] for finding in record["findings"]].count("ok") == 9
