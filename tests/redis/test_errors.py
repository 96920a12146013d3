"""What a server may say instead of an answer: each error has its remedy, its type and its advice, on real servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from holdfast.errors import InvalidOption, OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.job import NewJob, State
from holdfast.ports import SYSTEM
from holdfast.store import CancelAnswer, InsertStatus, Session
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis.faults import REMEDIES, Remedy, ended_midway, remedy_for
from holdfast.stores.redis.topology import slot_of
from holdfast.stores.redis.wire import ReplyError
from tests.postgres.helpers import claim, eventually, finish, new_job, new_jobs, wait_until
from tests.redis.fake import FORWARD, NOTHING, FakeServer, error
from tests.redis.helpers import outside, store_at
from tests.servers import RedisCluster, RedisRefusedError, RedisServer, missing_server_policy, wait_for_replica

PAYLOAD = b'{"card":"4242"}'
PASSWORD = "hunter2"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server whose settings may be changed."""
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server


@pytest.fixture
def fresh(server: RedisServer) -> RedisServer:
    server.ask("FLUSHALL")
    return server


def job(**changes: Any) -> NewJob:
    return new_job(**{"payload": PAYLOAD, **changes})


def discreet(caught: pytest.ExceptionInfo[StoreError]) -> str:
    """The message, which holds neither a password nor a payload, also in what it was raised from."""
    told: BaseException | None = caught.value
    while told is not None:
        assert PASSWORD not in f"{told} {told!r}"
        assert "4242" not in f"{told} {told!r}"
        told = told.__cause__ or told.__context__
    return str(caught.value)


async def number_of_jobs(url: str, queue: str = "default") -> int:
    return int(outside(url).hlen(f"holdfast:{{{queue}}}:jobs"))


# The table, each line of it by a server that says so.


@pytest.mark.parametrize("code", [code for code, (remedy, _) in REMEDIES.items() if remedy is Remedy.RETRY])
async def test_what_goes_away_by_itself_is_waited_for(fresh: RedisServer, code: str) -> None:
    said: list[bytes] = []

    def answer(words: list[bytes]) -> Any:
        if words[0] == b"EVALSHA" and len(said) < 2:
            said.append(words[0])
            return error(f"{code} not now")
        return FORWARD

    with FakeServer(answer, behind=fresh.port) as fake:
        async with store_at(fake.url) as store:
            said.clear()
            [inserted] = await store.insert([job()])
            assert inserted.status is InsertStatus.CREATED
            assert len(said) == 2


@pytest.mark.parametrize(
    "code", [code for code, (remedy, _) in REMEDIES.items() if remedy not in (Remedy.REDIRECT, Remedy.RELOAD)]
)
async def test_what_stays_is_told(fresh: RedisServer, code: str) -> None:
    refusing = False

    def answer(words: list[bytes]) -> Any:
        return error(f"{code} never, and {PASSWORD} neither"[: 200 if False else 40]) if refuses(words) else FORWARD

    def refuses(words: list[bytes]) -> bool:
        return refusing and words[0] == b"EVALSHA"

    remedy, advice = REMEDIES[code]
    with FakeServer(answer, behind=fresh.port) as fake:
        async with store_at(fake.url) as store:
            refusing = True
            fake.commands.clear()
            with pytest.raises(StoreUnavailable) as caught:
                await store.insert([job()])
            tries = fake.commands.count("EVALSHA")
            assert tries == (1 if remedy is Remedy.FATAL else 4)
            told = str(caught.value)
            assert code in told
            assert advice in told
            assert told.endswith("Nothing was written")
            store.open_blocking()
            with pytest.raises(StoreUnavailable, match=code):
                await asyncio.to_thread(store.insert_blocking, [job()])
    assert await number_of_jobs(fresh.url) == 0


async def test_an_error_that_nobody_knows_is_told_once(fresh: RedisServer) -> None:
    odd = False

    def answer(words: list[bytes]) -> Any:
        return error("ERR odd") if odd and words[0] == b"EVALSHA" else FORWARD

    with FakeServer(answer, behind=fresh.port) as fake:
        async with store_at(fake.url) as store:
            odd = True
            fake.commands.clear()
            with pytest.raises(StoreUnavailable, match=r"'ERR odd'\. Nothing was written"):
                await store.insert([job()])
            assert fake.commands.count("EVALSHA") == 1


def test_what_older_servers_say_is_understood() -> None:
    """Before 7.0 an error inside a script is wrapped in another."""
    about = "ERR Error running script (call to f_5d2a): @user_script:3: @user_script: 3: "
    for said, remedy, perhaps in (
        (f"{about}-OOM command not allowed when used memory > 'maxmemory'. ", Remedy.FATAL, False),
        (f"{about}-READONLY You can't write against a read only replica. ", Remedy.RECONNECT, False),
        (f"{about}-MISCONF Redis is configured to save RDB snapshots, but", Remedy.FATAL, False),
        (f"{about}WRONGTYPE Operation against a key holding the wrong kind of value ", Remedy.FATAL, True),
        (f"{about}-NOPERM The user executing the script can't run this command", Remedy.FATAL, True),
        ("OOM command not allowed when used memory. script: 5d2a, on @user_script:3.", Remedy.FATAL, False),
        ("WRONGTYPE Operation against a key script: 5d2a, on @user_script:3.", Remedy.FATAL, True),
        ("ERR user_script:3: attempt to index a nil value script: 5d2a, on @user_script:3.", Remedy.FATAL, True),
        ("ERR unknown command 'EVALSHA'", Remedy.FATAL, False),
        ("NOPERM this user has no permissions to run the 'evalsha' command", Remedy.FATAL, False),
        ("NOSCRIPT No matching script. Please use EVAL.", Remedy.RELOAD, False),
    ):  # fmt: skip
        assert (remedy_for(ReplyError(said)), ended_midway(ReplyError(said))) == (remedy, perhaps), said


# A replica.


async def test_a_primary_that_became_a_replica_is_left_for_the_new_one() -> None:
    with missing_server_policy():
        one = RedisServer()
    with one, RedisServer(settings={"replicaof": f"127.0.0.1 {one.port}"}) as other:
        wait_for_replica(one, other)
        async with store_at(one.url) as store:
            await store.insert([job()])
            wait_for_replica(one, other)
            other.ask("REPLICAOF", "NO", "ONE")
            one.ask("REPLICAOF", "127.0.0.1", other.port)
            [inserted] = await store.insert([job()])
            assert inserted.status is InsertStatus.CREATED
            assert await number_of_jobs(other.url) == 2
            [inserted] = await asyncio.to_thread(store.insert_blocking, [job()])
            assert inserted.status is InsertStatus.CREATED
        # A replica whose primary cannot be reached.
        other.kill()
        store = store_at(one.url)
        with pytest.raises(StoreUnavailable) as caught:
            await store.insert([job()])
        store.close()
        told = discreet(caught)
        assert f"127.0.0.1:{one.port} is a replica of 127.0.0.1:{other.port}" in told
        assert f"cannot connect to 127.0.0.1:{other.port}" in told


# A server that is not ready.


async def test_a_server_that_reads_its_data() -> None:
    with missing_server_policy():
        server = RedisServer(settings={"key-load-delay": "10000", "loading-process-events-interval-bytes": "1024"})
    with server:
        store = store_at(server.url)
        await store.insert([job()])
        server.ask("EVAL", "for i = 1, 100 do redis.call('SET', 'k' .. i, string.rep('x', 2000)) end", 0)
        server.ask("SAVE")
        store.close()
        server.kill()
        starting = threading.Thread(target=server.start)
        starting.start()
        loading: list[str] = []
        while starting.is_alive():
            try:
                await store.insert([job()])
            except StoreUnavailable as unavailable:
                loading += [str(unavailable)] * ("LOADING" in str(unavailable))
        starting.join()
        assert loading
        assert "the server is reading its data from disk. Nothing was written" in loading[0]
        before = await number_of_jobs(server.url)
        await store.insert([job()])
        assert await number_of_jobs(server.url) == before + 1
        store.close()


async def test_a_server_that_is_busy_with_a_script(fresh: RedisServer) -> None:
    fresh.ask("CONFIG", "SET", "lua-time-limit", "5")
    async with store_at(fresh.url) as store:
        await store.insert([job()])
        with busy(fresh):
            for _ in range(2):
                with pytest.raises(StoreUnavailable) as caught:
                    await store.insert([job()])
                assert "BUSY" in discreet(caught)
                assert "a script of somebody else keeps the server busy. Nothing was written" in str(caught.value)
        assert await number_of_jobs(fresh.url) == 1
        with busy(fresh, milliseconds=60):
            await store.insert([job()])
        assert await number_of_jobs(fresh.url) == 2


@contextlib.contextmanager
def busy(server: RedisServer, milliseconds: int = 60_000) -> Iterator[None]:
    """While a script runs that nobody of us has started."""
    script = """local function now() local t = redis.call('TIME') return t[1] * 1000 + t[2] / 1000 end
                local ends = now() + ARGV[1] while now() < ends do end"""
    other = redis.Redis.from_url(server.url, retry=None)
    script = "redis.replicate_commands() " + script if False else script

    def run() -> None:
        with contextlib.suppress(redis.RedisError):
            other.eval(script, 0, milliseconds)

    thread = threading.Thread(target=run)
    thread.start()
    with contextlib.suppress(RedisRefusedError):  # BUSY
        while thread.is_alive():
            server.ask("PING")
            time.sleep(0.001)
    try:
        yield
    finally:
        with contextlib.suppress(redis.RedisError):
            redis.Redis.from_url(server.url, retry=None).script_kill()
        thread.join()
        other.close()


# A server that has forgotten the scripts.


async def test_scripts_that_were_forgotten_in_the_middle_of_everything(fresh: RedisServer) -> None:
    ended = threading.Event()

    def forget() -> None:
        with redis.Redis.from_url(fresh.url) as client:
            while not ended.is_set():
                client.script_flush()
                time.sleep(0.001)

    flushing = threading.Thread(target=forget)
    flushing.start()
    try:
        async with store_at(fresh.url) as store:
            await store.open_session(Session(id="s"))
            added = new_jobs(3_000)
            for first in range(0, 3_000, 1_000):
                answers = await asyncio.to_thread(store.insert_blocking, added[first : first + 1_000])
                assert {answer.status for answer in answers} == {InsertStatus.CREATED}
                again = await store.insert(added[first : first + 1_000])
                assert {answer.status for answer in again} == {InsertStatus.EXISTING}
            taken = []
            while jobs := await claim(store, "s", 1_000):
                assert set(await finish(store, jobs)) == {"applied"}
                taken += [each.id for each in jobs]
            assert sorted(taken) == sorted(each.id for each in added)
            [counts] = await store.counts()
            assert (counts.ready, counts.in_flight, counts.succeeded) == (0, 0, 3_000)
    finally:
        ended.set()
        flushing.join()


# Who may not.


async def test_a_server_that_wants_a_password() -> None:
    with missing_server_policy():
        server = RedisServer(settings={"requirepass": "s3cret"})
    with server:
        for credentials, code, advice in (
            ("", "NOAUTH", "give a password in the store URL"),
            (f":{PASSWORD}@", "WRONGPASS", "the user or the password in the store URL is wrong"),
            (f"somebody:{PASSWORD}@", "WRONGPASS", "the user or the password in the store URL is wrong"),
            ("somebody@", "WRONGPASS", "the user or the password in the store URL is wrong"),
        ):
            store = store_at(f"redis://{credentials}127.0.0.1:{server.port}/0")
            with pytest.raises(StoreUnavailable, match=code) as caught:
                await store.insert([job()])
            assert advice in discreet(caught)
            with pytest.raises(StoreUnavailable, match=code) as caught:
                await asyncio.to_thread(store.insert_blocking, [job()])
            assert advice in discreet(caught)
            store.close()
        store = store_at(f"redis://:s3cret@127.0.0.1:{server.port}/0")
        await store.insert([job()])
        assert "s3cret" not in repr(store)
        store.close()


async def test_a_user_that_may_not(fresh: RedisServer) -> None:
    fresh.ask("ACL", "SETUSER", "guest", "reset", "on", f">{PASSWORD}", "~*", "+@all", "-evalsha")
    store = store_at(f"redis://guest:{PASSWORD}@127.0.0.1:{fresh.port}/0")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="NOPERM") as caught:
            await store.insert([job()])
        assert "let the user do what docs/reference/redis.md lists. Nothing was written" in discreet(caught)
    store.close()


async def test_a_user_that_may_not_in_the_middle_of_a_script(fresh: RedisServer) -> None:
    """A script is not taken back: what it wrote before the command that was refused is there."""
    async with store_at(fresh.url):
        pass
    fresh.ask("ACL", "SETUSER", "guest", "reset", "on", f">{PASSWORD}", "~*", "+@all", "-zadd")
    async with store_at(f"redis://guest:{PASSWORD}@127.0.0.1:{fresh.port}/0") as store:
        new = job()
        with pytest.raises(OutcomeUnknown, match=r"can't run this command|ACL failure in script") as caught:
            await store.insert([new])
        assert caught.value.ids == [new.id]
        assert "let the user do what docs/reference/redis.md lists" in discreet(caught)
        assert "Nothing was written" not in str(caught.value)
    assert await number_of_jobs(fresh.url) == 1


# A server that cannot save.


async def test_a_server_that_cannot_save() -> None:
    with missing_server_policy():
        server = RedisServer(settings={"dbfilename": "blocked.rdb"})
    with server:
        (server.folder / "blocked.rdb" / "by a folder").mkdir(parents=True)
        async with store_at(server.url) as store:
            await store.insert([job()])
            server.ask("CONFIG", "SET", "save", "3600 1")
            server.ask("BGSAVE", "SCHEDULE")
            wait_until(lambda: server.info("persistence")["rdb_last_bgsave_status"] == "err")
            with pytest.raises(StoreUnavailable, match="MISCONF") as caught:
                await store.insert([job()])
            assert "cannot save to disk and takes no writes: look at its log. Nothing was written" in discreet(caught)
            with pytest.raises(StoreUnavailable, match="MISCONF"):
                await store.open_session(Session(id="s"))
            assert (await store.counts())[0].ready == 1
            server.ask("CONFIG", "SET", "save", "")
            await store.insert([job()])


# Keys of somebody else.


async def test_a_key_that_holds_something_else(fresh: RedisServer) -> None:
    async with store_at(fresh.url) as store:
        fresh.ask("SET", "holdfast:{taken}:jobs", "of somebody else")
        new = job(queue="taken")
        with pytest.raises(OutcomeUnknown, match="WRONGTYPE") as caught:
            await store.insert([new])
        assert "a key of ours holds something else: does another program use it?" in discreet(caught)
        assert caught.value.ids == [new.id]
        with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
            await store.get(new.id)
        fresh.ask("DEL", "holdfast:{taken}:jobs")
        [inserted] = await store.insert([new])
        assert inserted.status is InsertStatus.CREATED


async def test_what_was_written_beside_a_refusal_is_not_denied(fresh: RedisServer) -> None:
    """The first queue of a batch is refused for good, the second has its job: "nothing was written" would be a lie."""
    denied = False

    def answer(words: list[bytes]) -> Any:
        return error("OOM no") if denied and words[0] == b"EVALSHA" and b"holdfast:{a}:jobs" in words else FORWARD

    with FakeServer(answer, behind=fresh.port) as fake:
        async with store_at(fake.url) as store:
            await store.insert([job(queue="a"), job(queue="b")])
            denied = True
            for attempt in (1, 2):
                new = [job(queue="a"), job(queue="b")]
                insert = store.insert(new) if attempt == 1 else asyncio.to_thread(store.insert_blocking, new)
                with pytest.raises(OutcomeUnknown, match="OOM") as caught:
                    await insert
                assert caught.value.ids == [each.id for each in new]
                assert "Nothing was written" not in str(caught.value)
                assert await number_of_jobs(fresh.url, "a") == 1
                assert await number_of_jobs(fresh.url, "b") == 1 + attempt


async def test_a_lost_answer_is_not_called_nothing(fresh: RedisServer) -> None:
    silent = False

    def answer(words: list[bytes]) -> Any:
        return NOTHING if silent and words[0] == b"EVALSHA" else FORWARD

    with FakeServer(answer, behind=fresh.port) as fake:
        store = store_at(f"{fake.url}?timeout=0.2")
        await store.insert([job()])
        silent = True
        new = job()
        with pytest.raises(OutcomeUnknown, match="no answer from") as caught:
            await store.insert([new])
        assert "Nothing was written" not in str(caught.value)
        assert caught.value.ids == [new.id]
        with pytest.raises(StoreUnavailable, match=r"no answer from .*Nothing was written"):
            await store.get(new.id)
        store.close()


# A cluster.


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Two nodes whose slots may be moved."""
    with missing_server_policy():
        cluster = RedisCluster(masters=2)
    with cluster:
        yield cluster


class Move:
    """A slot on its way to the other node."""

    def __init__(self, cluster: RedisCluster, key: str) -> None:
        self.slot = slot_of(key.encode())
        self.source = cluster.owner(key)
        [self.target] = [node for node in cluster.nodes if node is not self.source]

    def begin(self) -> None:
        self.target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.source.ask("CLUSTER", "MYID"))
        self.source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.target.ask("CLUSTER", "MYID"))

    def carry(self) -> None:
        while keys := self.source.ask("CLUSTER", "GETKEYSINSLOT", self.slot, 3):
            self.source.ask("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys)

    def end(self) -> None:
        for node in (self.target, self.source):
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", self.target.ask("CLUSTER", "MYID"))


async def test_a_queue_moves_to_another_node_while_it_is_used(cluster: RedisCluster) -> None:
    refused: list[str] = []

    async def stubbornly(work: Any) -> Any:
        while True:
            try:
                return await work()
            except (StoreUnavailable, OutcomeUnknown) as error:
                refused.append(str(error))
                await asyncio.sleep(0.01)

    async with store_at(cluster.url) as store:
        await store.open_session(Session(id="s", queues=("default",)))
        added = new_jobs(400)
        done: list[str] = []

        async def produce() -> None:
            for first in range(0, len(added), 4):
                await stubbornly(lambda first=first: store.insert(added[first : first + 4]))

        async def consume() -> None:
            while len(done) < len(added):
                jobs = await stubbornly(lambda: claim(store, "s", 10))
                answers = await stubbornly(lambda jobs=jobs: finish(store, jobs)) if jobs else []
                assert set(answers) <= {"applied", "already"}
                done.extend(each.id for each in jobs)
                await asyncio.sleep(0)

        async def move() -> None:
            for _ in range(4):
                moving = Move(cluster, "{default}")
                for step in (moving.begin, moving.carry, moving.carry, moving.end):
                    await asyncio.to_thread(step)
                    await asyncio.sleep(0.02)

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
            group.create_task(move())
        assert sorted(done) == sorted(each.id for each in added)
        [counts] = await store.counts()
        assert (counts.ready, counts.in_flight, counts.succeeded) == (0, 0, 400)
        assert all("TRYAGAIN" in each for each in refused), refused


async def test_a_moved_slot_is_followed_at_once(cluster: RedisCluster) -> None:
    """MOVED: also by blocking calls, and without a retry."""
    async with store_at(cluster.url) as store:
        [first] = await store.insert([job(queue="moved")])
        moving = Move(cluster, "{moved}")
        moving.begin()
        moving.carry()
        moving.end()
        [second] = await store.insert([job(queue="moved")])
        [third] = await asyncio.to_thread(store.insert_blocking, [job(queue="moved")])
        for inserted in (first, second, third):
            assert inserted.status is InsertStatus.CREATED
            found = await store.get(inserted.job_id)
            assert found is not None
            assert found.state is State.READY
        assert cluster.owner("{moved}") is moving.target


async def test_a_key_on_its_way_is_asked_for_where_it_is(cluster: RedisCluster) -> None:
    """ASK: a session's root is a key of its own, so it can be used in the middle of a move."""
    async with store_at(cluster.url) as store:
        await store.open_session(Session(id="nomad"))
        for forget in (False, True):
            moving = Move(cluster, "holdfast:session:nomad")
            moving.begin()
            moving.carry()
            if forget:
                moving.target.ask("SCRIPT", "FLUSH")
            assert (await store.beat("nomad")).open
            assert (await store.beat("nomad")).open
            moving.end()
            assert (await store.beat("nomad")).open
        [view] = [view for view in (await store.sessions()).sessions if view.id == "nomad"]
        assert view.beat == 6


async def test_nodes_that_point_to_each_other(cluster: RedisCluster) -> None:
    """A redirection without end is an error, not a loop."""
    pointing = False
    one: FakeServer

    def answer(words: list[bytes]) -> Any:
        if pointing and words[0] == b"EVALSHA":
            return error(f"MOVED {slot_of(b'{default}')} 127.0.0.1:{one.port}")
        if words[:2] == [b"CLUSTER", b"SLOTS"]:
            host = b"$9\r\n127.0.0.1\r\n"
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n" + host + f":{one.port}\r\n".encode()
        return b"+OK\r\n"

    with FakeServer(answer) as one:
        pointing = True
        store = store_at(f"redis+cluster://127.0.0.1:{one.port}")
        store._opened = True
        with pytest.raises(StoreUnavailable, match=r"point to each other\. Nothing was written"):
            await store.insert([job()])
        assert one.commands.count("EVALSHA") == 9
        store.close()


async def test_a_node_that_does_not_say_where_it_is(redis_server: RedisServer) -> None:
    """An address without a host, as of `cluster-preferred-endpoint-type unknown-endpoint`, is that of the one asked."""
    sent_away = False

    def answer(words: list[bytes]) -> Any:
        nonlocal sent_away
        if words[:2] == [b"CLUSTER", b"SLOTS"]:
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$-1\r\n" + f":{one.port}\r\n".encode()
        if words[0] == b"EVALSHA" and not sent_away:
            sent_away = True
            return error(f"MOVED {slot_of(b'{default}')} :{one.port}")
        return FORWARD

    with FakeServer(answer, behind=redis_server.port) as one:
        store = store_at(f"redis+cluster://127.0.0.1:{one.port}?namespace=unsaid")
        [inserted] = await store.insert([job()])
        assert inserted.status is InsertStatus.CREATED
        assert sent_away
        store.close()


async def test_a_node_of_a_cluster_by_the_wrong_name(cluster: RedisCluster, fresh: RedisServer) -> None:
    with pytest.raises(InvalidOption, match=r"is a node of a cluster: use redis\+cluster:// for it"):
        async with store_at(cluster.nodes[0].url):
            pass
    with pytest.raises(StoreUnavailable, match="cluster support disabled"):
        async with store_at(f"redis+cluster://127.0.0.1:{fresh.port}"):
            pass


async def test_a_cluster_that_lacks_a_slot(cluster: RedisCluster) -> None:
    store = store_at(cluster.url)
    await store.insert([job(queue="lacking")])
    slot, owner = slot_of(b"{lacking}"), cluster.owner("{lacking}")
    await eventually(lambda: owner.ask("CLUSTER", "COUNTKEYSINSLOT", slot) > 0)
    owner.ask("CLUSTER", "DELSLOTS", slot)
    with pytest.raises(StoreUnavailable, match="CLUSTERDOWN") as caught:
        await store.insert([job(queue="lacking")])
    assert "the cluster has no master for the queue's slot. Nothing was written" in discreet(caught)
    store.close()
    with pytest.raises(StoreUnavailable, match=r"CLUSTERDOWN|has no server for a part of its slots"):
        async with store_at(cluster.url) as other:
            await other.insert([job(queue="lacking")])
    owner.ask("CLUSTER", "ADDSLOTS", slot)
    cluster.wait()


# Verbs over many jobs.


async def test_a_long_list_is_one_step(fresh: RedisServer) -> None:
    """What is cut into pieces travels together: an error is about all of them."""
    calls = 0
    denied = False

    def answer(words: list[bytes]) -> Any:
        nonlocal calls
        calls += words[0] == b"EVALSHA"
        return error("OOM no") if denied and words[0] == b"EVALSHA" and calls > 1 else FORWARD

    with FakeServer(answer, behind=fresh.port) as fake:
        async with store_at(fake.url) as store:
            added = new_jobs(150)
            ids = [each.id for each in added]
            await store.insert(added)
            assert await store.request_cancel(ids) == [CancelAnswer.CANCELLED] * 150
            assert await store.forget([SYSTEM.ids.job_id()]) == 0  # the server knows the script
            calls, denied = 0, True
            with pytest.raises(OutcomeUnknown, match="OOM"):
                await store.forget(ids)
            denied = False
            assert await store.forget(ids) == 50
            assert await store.request_cancel([*ids, SYSTEM.ids.job_id()]) == [CancelAnswer.GONE] * 151


def _unused(store: RedisStore) -> None:
    """Keeps the type of the stores in sight."""
