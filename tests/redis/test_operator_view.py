"""What an operator sees with plain `redis-cli`, under the names that they chose, and what each setting does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast import Holdfast, Settings, State, WorkerSettings
from holdfast.config import RedisSettings
from holdfast.errors import InvalidOption, OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.job import Job, NewJob
from holdfast.lifecycle import Applied, Failed, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, JobQuery, Session
from holdfast.stores.redis import RedisStore
from tests.cli.helpers import failure, records, run
from tests.redis.helpers import empty, outside, store_at
from tests.servers import RedisCluster, RedisServer
from tests.worker.programs import eventually

NAMESPACE = "viewed"
TTL = 4.0
SEED_001 = RedisSettings(
    processing_list_pattern="jobqueue:worker:%s:processing",
    heartbeat_key_pattern="jobqueue:processing:worker:%s",
    completed_list="jobqueue:completed",
    dead_letter_list="jobqueue:dead_letter",
    queues={"high": "jobqueue:high_priority", "low": "jobqueue:low_priority"},
    brpoplpush_timeout=1.0,
    pool_size_multiplier=10,
    min_idle_conns=2,
    dial_timeout=5.0,
    read_timeout=3.0,
    write_timeout=3.0,
    max_retries=3,
)
USUAL = {
    "processing": f"{NAMESPACE}:{{default}}:processing:%s",
    "heartbeat": f"{NAMESPACE}:{{default}}:heartbeat:%s",
    "completed": f"{NAMESPACE}:{{default}}:completed",
    "dead": f"{NAMESPACE}:{{default}}:dead",
    "high": f"{NAMESPACE}:{{default}}:ready:0",
    "low": f"{NAMESPACE}:{{default}}:ready:10",
}
CHOSEN = {
    "processing": "jobqueue:worker:%s:processing",
    "heartbeat": "jobqueue:processing:worker:%s",
    "completed": "jobqueue:completed",
    "dead": "jobqueue:dead_letter",
    "high": "jobqueue:high_priority",
    "low": "jobqueue:low_priority",
}


def settings(redis: RedisSettings | None = None, **worker: Any) -> Settings:
    return Settings(
        redis=redis or RedisSettings(), worker=WorkerSettings(**{"lease_ttl": TTL, "concurrency": 1, **worker})
    )


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    for namespace in (NAMESPACE, "jobqueue"):
        empty(redis_server.url, namespace)
    return f"{redis_server.url}?namespace={NAMESPACE}"


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that nobody else sends commands to."""
    with RedisServer() as server:
        yield server


class RedisCli:
    """`redis-cli`, as an operator types it."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self, *words: object) -> list[str]:
        command = ["redis-cli", "-p", str(self._port), *map(str, words)]
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=20, check=True
        ).stdout
        assert not answer.startswith(("ERR", "WRONGTYPE")), answer
        return answer.splitlines()

    def number(self, *words: object) -> int:
        [line] = self(*words)
        return int(line)


@pytest.fixture
def cli(redis_server: RedisServer) -> RedisCli:
    return RedisCli(redis_server.port)


def new_job(**fields: Any) -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), **{"task": "t", "payload": b"{}", **fields})


# What can be seen.


@pytest.mark.parametrize(
    ("redis", "names"), [(RedisSettings(), USUAL), (SEED_001, CHOSEN)], ids=["usual names", "those of seed 001"]
)
def test_an_operator_sees_every_job_with_redis_cli(
    url: str, cli: RedisCli, redis: RedisSettings, names: dict[str, str]
) -> None:
    begun, finish = threading.Event(), threading.Event()
    with Holdfast(url, settings=settings(redis)) as app:

        @app.task
        def long(number: int) -> int:
            begun.set()
            finish.wait(30)
            return number

        @app.task(max_retries=0)
        async def broken() -> None:
            raise ValueError("on purpose")

        # Ready lists, in the order of serving.
        broken_job = broken.options(priority="high").enqueue()
        running = long.options(priority="high").enqueue(1)
        low = [long.options(priority="low").enqueue(number) for number in range(3)]
        assert cli.number("LLEN", names["high"]) == 2
        assert cli("LRANGE", names["high"], 0, -1) == [broken_job.id, running.id]
        assert cli("LRANGE", names["low"], 0, -1) == [job.id for job in low]

        with app.start_worker(), _at_the_end(finish):
            assert begun.wait(30)
            session = running.refresh().details.session_id  # type: ignore[union-attr]
            assert session

            # A worker: what it works on, and that it lives.
            processing = names["processing"].replace("%s", session)
            eventually(lambda: broken_job.id not in cli("HKEYS", processing), "the broken one is settled")
            held = cli("HKEYS", processing)  # a worker may fetch the next jobs before it can start them
            assert {running.id} <= set(held) <= {running.id, *(job.id for job in low)}
            assert cli.number("HLEN", processing) == len(held)
            heartbeat = names["heartbeat"].replace("%s", session)
            eventually(lambda: cli.number("EXISTS", heartbeat), "the first beat")
            assert re.fullmatch(r"holds [1-4] jobs", cli("GET", heartbeat)[0])
            assert 0 < cli.number("PTTL", heartbeat) <= TTL * 1000

            # Dead letters.
            assert cli("ZRANGE", names["dead"], 0, -1) == [broken_job.id]
            finish.set()
            for job in low:
                job.result(timeout=30)

        # What is completed, newest first. A worker that has stopped leaves nothing behind.
        assert cli("LRANGE", names["completed"], 0, -1) == [job.id for job in (*reversed(low), running)]
        assert cli.number("EXISTS", processing, heartbeat, names["high"], names["low"]) == 0

        # A job: a line of numbers, a line of JSON, its arguments.
        record = cli("HGET", f"{NAMESPACE}:{{default}}:jobs", low[1].id)
        assert len(record) == 3
        assert re.fullmatch(r"\d{16}\t\d{16}\t\d+\t10\t\t", record[0])
        assert json.loads(record[1])["task"] == low[1].details.task  # type: ignore[union-attr]
        assert json.loads(record[2]) == {"number": 1}
        row = cli("HGET", f"{NAMESPACE}:{{default}}:states", broken_job.id)
        assert row[0].startswith("failed\texhausted\t1\t")


@contextlib.contextmanager
def _at_the_end(event: threading.Event) -> Iterator[None]:
    """Whatever happens, nobody waits for it any longer."""
    try:
        yield
    finally:
        event.set()


def test_with_the_names_of_seed_001_nothing_is_left_under_the_usual_ones(url: str, cli: RedisCli) -> None:
    with Holdfast(url, settings=settings(SEED_001)) as app:

        @app.task
        async def quick() -> None: ...

        with app.start_worker():
            for priority in ("high", "low"):
                quick.options(priority=priority).enqueue().result(timeout=30)
    kinds = {key.rsplit(":", 1)[-1] for key in cli("--scan", "--pattern", f"{NAMESPACE}:*")}
    assert not kinds & {"completed", "dead"}
    assert not [key for key in cli("--scan") if key.startswith(f"{NAMESPACE}:{{default}}:ready")]


async def test_what_shares_a_processing_hash_is_forgotten_with_its_session(url: str, redis_server: RedisServer) -> None:
    """A pattern without {queue}: a worker of two queues has one hash for both."""
    chosen = RedisSettings(processing_list_pattern="jobqueue:worker:%s:processing")
    client = outside(redis_server.url)
    async with store_at(url, settings=settings(chosen)) as store:
        await store.open_session(Session(id="w", queues=("a", "b")))
        await store.insert([new_job(queue="a"), new_job(queue="b")])
        jobs = [job for queue in "ab" for job in await claimed(store, "w", queue)]
        assert client.hlen("jobqueue:worker:w:processing") == 2
        assert (await store.beat("w")).held == 2
        assert sorted(job.queue for job in await store.held("w")) == ["a", "b"]
        assert (
            await store.apply([settle(job, Succeeded(b"1"), RetryPolicy(), SYSTEM.random) for job in jobs])
            == [Applied.APPLIED] * 2
        )
        assert not client.exists("jobqueue:worker:w:processing")
        await store.close_session("w")
        client.hincrby(f"{NAMESPACE}:session:w", "beat_at", -7_200_000_000)
        await store.prune(100)
        assert not list(client.scan_iter(f"{NAMESPACE}:*:holders"))


async def test_queues_that_share_the_list_of_dead_letters_are_told_apart(url: str, redis_server: RedisServer) -> None:
    chosen = RedisSettings(dead_letter_list="jobqueue:dead_letter", completed_list="jobqueue:completed")
    async with store_at(url, settings=settings(chosen)) as store:
        await store.open_session(Session(id="w", queues=("a", "b")))
        await store.insert([new_job(queue="a"), new_job(queue="b")])
        for queue in "ab":
            [job] = await claimed(store, "w", queue)
            await store.apply([settle(job, Failed(failure(), permanent=True), RetryPolicy(), SYSTEM.random)])
        assert outside(redis_server.url).zcard("jobqueue:dead_letter") == 2
        for queues in ("a", "b", "ab"):
            query = JobQuery(states=(State.FAILED,), queue=queues if len(queues) == 1 else None)
            assert sorted(job.queue for job in (await store.find(query)).jobs) == list(queues)


async def claimed(store: RedisStore, session: str, queue: str = "default") -> list[Job]:
    return list((await store.claim(ClaimRequest(session_id=session, queues=(queue,), limit=10))).jobs)


# Names that do not fit.


async def test_settings_that_differ_from_the_layout_of_the_store_are_refused(url: str) -> None:
    async with store_at(url, settings=settings(SEED_001)) as store:
        await store.insert([new_job(priority=0)])
    others = [
        RedisSettings(completed_list="jobqueue:done"),
        RedisSettings(queues={"high": "jobqueue:high_priority"}),
    ]
    for other in others:
        with pytest.raises(InvalidOption, match=r"laid out with other key names.*jobqueue:completed"):
            async with store_at(url, settings=settings(other)):
                pass
    for same in (None, settings(), settings(SEED_001)):  # without names of their own they use those that are there
        async with store_at(url, settings=same) as store:
            [tally] = await store.counts()
            assert tally.ready == 1
            await store.open_session(Session(id="w", queues=("default",)))
    assert len(await _claim_all(url)) == 1


async def _claim_all(url: str) -> list[Job]:
    async with store_at(url) as store:
        return await claimed(store, "w")


def test_commands_with_only_a_url_find_the_jobs_of_a_store_with_names_of_its_own(url: str) -> None:
    with Holdfast(url, settings=settings(SEED_001)) as app:

        @app.task(max_retries=0)
        async def broken() -> None:
            raise ValueError("on purpose")

        with app.start_worker():
            job = broken.options(priority="high").enqueue()
            with contextlib.suppress(Exception):
                job.result(timeout=30)
        waiting = broken.options(priority="high").enqueue()
    assert [dead["id"] for dead in records(run("dead", "list", "--json", store=url))] == [job.id]
    assert run("dead", "replay", job.id, store=url).exit_code == 0
    listed = {listed["id"]: listed["state"] for listed in records(run("jobs", "list", "--json", store=url))}
    assert listed == {job.id: "ready", waiting.id: "ready"}
    assert run("jobs", "cancel", waiting.id, store=url).exit_code == 0
    [queue] = records(run("queues", "list", "--json", store=url))
    assert (queue["queue"], queue["ready"], queue["cancelled"]) == ("default", 1, 1)
    assert run("doctor", url).exit_code in (0, 1)  # this server keeps nothing on disk


def test_a_store_that_is_not_there_is_not_made_by_a_command(url: str, redis_server: RedisServer) -> None:
    result = run("jobs", "list", store=f"{redis_server.url}?namespace=nowhere")
    assert result.exit_code == 1
    assert "there is no Holdfast store 'nowhere'" in result.stderr
    assert not list(outside(redis_server.url).scan_iter("nowhere:*"))


async def test_names_without_the_queue_are_refused_on_a_cluster_at_start_up(redis_cluster: RedisCluster) -> None:
    empty(redis_cluster.url, NAMESPACE)
    url = f"{redis_cluster.url}?namespace={NAMESPACE}"
    for redis in (
        SEED_001,
        RedisSettings(completed_list="jobqueue:completed"),
        RedisSettings(dead_letter_list="jobqueue:{other}:{queue}:dead"),
        RedisSettings(queues={"5": "jobqueue:normal"}),
    ):
        with pytest.raises(InvalidOption, match=r"on a cluster the key name .* must contain \{queue\}"):
            async with store_at(url, settings=settings(redis)):
                pass
    # Nothing of it has stayed: names that fit are accepted afterwards.
    fitting = RedisSettings(
        processing_list_pattern="jobqueue:{queue}:worker:%s:processing",
        queues={"high": "jobqueue:{queue}:high", "low": "{queue}:low"},
    )
    async with store_at(url, settings=settings(fitting)) as store:
        await store.insert([new_job(queue=queue, priority=priority) for queue in "abc" for priority in (0, 10)])
        await store.open_session(Session(id="w", queues=("a", "b", "c")))
        for queue in "abc":
            assert [job.priority for job in await claimed(store, "w", queue)] == [0, 10]
        assert outside(redis_cluster.url).hlen("jobqueue:{b}:worker:w:processing") == 2


async def test_one_ready_list_for_two_queues_is_refused(url: str) -> None:
    chosen = RedisSettings(queues={"high": "jobqueue:high_priority"})
    async with store_at(url, settings=settings(chosen)) as store:
        await store.insert([new_job(queue="a")])
        with pytest.raises(InvalidOption, match=r"'jobqueue:high_priority' has no \{queue\} in its name.*not a, b"):
            await store.insert([new_job(queue="b")])
        with pytest.raises(InvalidOption, match="one queue only"):
            await store.open_session(Session(id="w", queues=("a", "b")))
        await store.insert([new_job(queue="a", priority=0)])
        await store.open_session(Session(id="w", queues=("a",)))
        assert len(await claimed(store, "w", "a")) == 2


@pytest.mark.parametrize(
    ("redis", "told"),
    [
        ({"processing_list_pattern": "jobqueue:processing"}, "exactly one %s"),
        ({"heartbeat_key_pattern": "jobqueue:%s:%s"}, "exactly one %s"),
        ({"completed_list": "jobqueue:%d"}, "no % in it"),
        ({"completed_list": "jobqueue:x", "dead_letter_list": "jobqueue:x"}, "have the same name"),
        ({"queues": {"high": "jobqueue:x", "low": "jobqueue:x"}}, "have the same name"),
    ],
)
def test_names_that_cannot_work_are_refused(redis_server: RedisServer, redis: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidOption, match=told):
        store_at(redis_server.url, settings=settings(RedisSettings(**redis)))


@pytest.mark.parametrize("lease_ttl", [1.0, 1.9])
def test_a_wait_of_more_than_half_the_ttl_is_refused(lease_ttl: float) -> None:
    with pytest.raises(InvalidOption, match=r"must not be more than half of worker\.lease_ttl"):
        settings(SEED_001, lease_ttl=lease_ttl)
    settings(SEED_001, lease_ttl=2.0)


# What the settings do.


class Monitor:
    """Every command that a server gets, as `MONITOR` shows it: from programs, and those that scripts give."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(b"MONITOR\r\n")
        assert self._socket.recv(5) == b"+OK\r\n"

    def over(self, seconds: float) -> tuple[Counter[str], Counter[str]]:
        """How many of each came in that time."""
        deadline = time.monotonic() + seconds
        text = b""
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with contextlib.suppress(TimeoutError):
                text += self._socket.recv(65536)
        self._socket.close()
        lines = re.findall(r'^\+[\d.]+ \[\d+ (\S+)\] "(\w+)"', text.decode(errors="replace"), re.MULTILINE)
        return (
            Counter(name.upper() for source, name in lines if source != "lua"),
            Counter(name.upper() for source, name in lines if source == "lua"),
        )


def calls(server: RedisServer, name: str) -> int:
    found = re.search(rf"cmdstat_{name}:calls=(\d+)", server.ask("INFO", "commandstats"))
    return int(found[1]) if found else 0


def connections(server: RedisServer) -> int:
    """How many there are besides the one that asks."""
    return len(server.ask("CLIENT", "LIST").splitlines()) - 1


@contextlib.contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    """The server as if its machine had frozen."""
    pid = int(server.info()["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("block", [0.5, 2.0])
async def test_one_wait_takes_as_long_as_it_may(own_server: RedisServer, block: float) -> None:
    redis = RedisSettings(brpoplpush_timeout=block)
    async with store_at(own_server.url, settings=settings(redis)) as store:
        waiting = asyncio.ensure_future(_wait_for_ever(store))
        while not calls(own_server, "blpop"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        before, began = calls(own_server, "blpop"), time.monotonic()
        await asyncio.sleep(4.2)
        most = (time.monotonic() - began) / block + 1
        assert most - 2.5 < calls(own_server, "blpop") - before <= most
        waiting.cancel()


async def _wait_for_ever(store: RedisStore) -> None:
    async for _ in store.wakeups(("default",)):
        pass


@pytest.mark.parametrize("how", ["blocking", "event loop"])
def test_idle_connections_are_there_after_the_start(own_server: RedisServer, how: str) -> None:
    chosen = settings(RedisSettings(min_idle_conns=7))
    if how == "blocking":
        with contextlib.closing(store_at(own_server.url, settings=chosen)) as store:
            store.open_blocking()
            assert connections(own_server) == 7
            with ThreadPoolExecutor(7) as threads:
                list(threads.map(lambda _: store.insert_blocking([new_job()]), range(100)))
            assert connections(own_server) == 7
    else:
        with Holdfast(own_server.url, settings=chosen) as app:
            app.open()
            assert connections(own_server) == 7 + 1  # that of the event loop
    assert connections(own_server) == 0


def test_there_are_no_more_blocking_connections_than_the_pool_may_have(own_server: RedisServer) -> None:
    multiplier = 2
    store = store_at(own_server.url, settings=settings(RedisSettings(pool_size_multiplier=multiplier)))
    most = multiplier * (os.cpu_count() or 1)
    with contextlib.closing(store), ThreadPoolExecutor(4 * most) as threads:
        for _ in threads.map(lambda _: store.insert_blocking([new_job()]), range(40 * most)):
            pass
        assert 1 <= connections(own_server) <= most
        assert own_server.ask("HLEN", "holdfast:{default}:jobs") == 40 * most


async def _timed(call: Any) -> tuple[BaseException | None, float]:
    began = time.monotonic()
    try:
        await call
    except StoreError as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


async def test_a_server_that_answers_no_more_is_waited_for_as_long_as_the_settings_say(own_server: RedisServer) -> None:
    redis = RedisSettings(read_timeout=0.4, dial_timeout=0.3, max_retries=0)
    async with store_at(own_server.url, settings=settings(redis)) as store:
        store.insert_blocking([new_job()])
        with stopped(own_server):
            error, seconds = await _timed(store.insert([new_job()]))
            assert isinstance(error, OutcomeUnknown)
            assert 0.35 < seconds < 2
            error, seconds = await _timed(asyncio.to_thread(store.insert_blocking, [new_job()]))
            assert isinstance(error, StoreUnavailable | OutcomeUnknown)
            assert 0.35 < seconds < 2
        await store.insert([new_job()])
    # To send takes no longer than it may, either: so much does not fit into what lies between us.
    slow_to_answer = RedisSettings(read_timeout=30, write_timeout=0.4, max_retries=0)
    with contextlib.closing(store_at(own_server.url, settings=settings(slow_to_answer))) as store:
        store.insert_blocking([new_job()])
        large = [new_job(payload=b"x" * 2**20) for _ in range(40)]
        with stopped(own_server):
            error, seconds = await _timed(asyncio.to_thread(store.insert_blocking, large))
            assert isinstance(error, OutcomeUnknown)
            assert 0.35 < seconds < 5
    # A connection that nobody greets back has not been made.
    with stopped(own_server):
        for call in (_open_async, _open_blocking):
            error, seconds = await _timed(call(f"{own_server.url[:-1]}1", settings(redis)))
            assert isinstance(error, StoreUnavailable)
            assert 0.25 < seconds < 2


async def _open_async(url: str, chosen: Settings) -> None:
    async with store_at(url, settings=chosen):
        pass


async def _open_blocking(url: str, chosen: Settings) -> None:
    await asyncio.to_thread(store_at(url, settings=chosen).open_blocking)


@pytest.fixture
async def full_backlog() -> AsyncIterator[int]:
    """A port at which nobody answers, not even the operating system."""
    with contextlib.ExitStack() as open_ones:
        listener = open_ones.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port: int = listener.getsockname()[1]
        for _ in range(8):
            caller = open_ones.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", port))
        yield port


@pytest.mark.parametrize("open_it", [_open_async, _open_blocking])
async def test_dialling_takes_no_longer_than_it_may(full_backlog: int, open_it: Any) -> None:
    redis = RedisSettings(dial_timeout=0.4, max_retries=0)
    error, seconds = await _timed(open_it(f"redis://127.0.0.1:{full_backlog}/0", settings(redis)))
    assert isinstance(error, StoreUnavailable)
    assert 0.35 < seconds < 2


@pytest.mark.parametrize("max_retries", [0, 1, 3])
@pytest.mark.parametrize("open_it", [_open_async, _open_blocking])
async def test_a_command_is_repeated_as_often_as_it_may_be(max_retries: int, open_it: Any) -> None:
    callers = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            nonlocal callers
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = listener.accept()
                    callers += 1
                    caller.close()

        hanging_up = threading.Thread(target=hang_up, daemon=True)
        hanging_up.start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        error, _ = await _timed(open_it(url, settings(RedisSettings(max_retries=max_retries))))
        assert isinstance(error, StoreUnavailable)
        listener.shutdown(socket.SHUT_RDWR)
    hanging_up.join(10)
    assert callers == max_retries + 1


# The heartbeat of a worker whose TTL is not that of the application's settings.


async def test_the_heartbeat_outlasts_the_time_between_two_beats(own_server: RedisServer) -> None:
    """`holdfast worker --lease-ttl 60` beats every 20 s: the key, for people only, must not come and go."""
    async with store_at(own_server.url, settings=settings(lease_ttl=0.5)) as store:
        await store.open_session(Session(id="w", queues=("default",)))
        await store.beat("w")
        assert 0 < own_server.ask("PTTL", "holdfast:{default}:heartbeat:w") <= 500
        await asyncio.sleep(0.6)
        await store.beat("w")
        assert 1500 < own_server.ask("PTTL", "holdfast:{default}:heartbeat:w") < 6000


# What it costs to wait.


def test_an_idle_worker_costs_little(own_server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured over a minute with the usual settings (a TTL of 15 s, one queue, keepers): 106 commands, of which 61 are
    scripts, which give 316 more.
    """
    seconds = 12.0
    with Holdfast(own_server.url) as app:

        @app.task
        async def quick() -> None: ...

        with app.start_worker():
            quick.enqueue().result(timeout=30)
            time.sleep(0.5)
            sent, in_scripts = Monitor(own_server.port).over(seconds)
    minute = 60 / seconds
    with capsys.disabled():
        print(f"\nidle worker, a minute: {sent.total() * minute:.0f} commands {dict(sent)}")
        print(f"  within scripts: {in_scripts.total() * minute:.0f} {dict(in_scripts)}")
    assert 0 < sent.total() * minute < 400
    assert in_scripts.total() * minute < 1_500
    assert not {"KEYS", "SCAN", "LREM"} & (set(sent) | set(in_scripts))
