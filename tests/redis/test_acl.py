"""The users of docs/reference/redis.md may do what they need, and no more."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

import holdfast.stores.redis
from holdfast.errors import OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.job import Key
from holdfast.store import Checkpoint, InsertStatus, JobQuery, Session
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis.faults import REMEDIES
from tests.cli.helpers import records, run
from tests.cli.test_doctor import verdicts
from tests.postgres.helpers import HOUR, claim, finish, new_job, new_jobs
from tests.redis.acl import add_users, password_of, rules, url_of
from tests.redis.helpers import store_at
from tests.servers import RedisServer, missing_server_policy

USERS = ("holdfast-worker", "holdfast-producer", "holdfast-reader")
FOREIGN = "shop:prices"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with missing_server_policy():
        server = RedisServer(settings={"appendonly": "yes"})
    with server:
        add_users(server)
        yield server


@pytest.fixture
async def worker(server: RedisServer) -> AsyncIterator[RedisStore]:
    server.ask("FLUSHALL")
    server.ask("SET", FOREIGN, "of somebody else")
    async with store_at(url_of(server, "holdfast-worker")) as store:
        await store.open_session(Session(id="s", queues=("default",)))
        yield store


def client(server: RedisServer, user: str) -> Any:
    return redis.Redis.from_url(url_of(server, user))


def test_the_page_names_every_command_and_no_other() -> None:
    folder = Path(holdfast.stores.redis.__file__).parent
    used = {word for path in folder.glob("lua/*.lua") for word in re.findall(r"redis\.call\('(\w+)'", path.read_text())}
    said = [re.findall(r'\(\(?"([A-Z]{3,})"(?:, "(SLOTS|GET)")?', path.read_text()) for path in folder.glob("*.py")]
    used |= {"|".join(filter(None, words)) for each in said for words in each}
    used |= {"EVAL", "TIME"}
    used -= {"AUTH", "SENTINEL", "WAITAOF", *REMEDIES}  # needs no right; of another server; of newer ones; are errors
    granted = {word[1:].upper() for word in rules()["holdfast-worker"] if word.startswith("+")}
    assert granted == used
    for user in USERS:
        others = {word[1:].upper() for word in rules()[user] if word.startswith("+")}
        assert others <= granted
        assert "-@all" in rules()[user]
        assert all(word.startswith("~holdfast:") for word in rules()[user] if "~" in word)


def test_the_lines_are_those_of_an_aclfile(tmp_path: Path) -> None:
    path = tmp_path / "users.acl"
    lines = [f"user {user} {' '.join(words)}" for user, words in rules().items()]
    path.write_text("\n".join(["user default on nopass ~* &* +@all", *lines, ""]))
    path.chmod(0o644)
    with missing_server_policy():
        server = RedisServer(settings={"aclfile": str(path)})
    with server:
        assert set(server.ask("ACL", "USERS")) == {"default", *USERS}
        store = store_at(url_of(server, "holdfast-worker"))
        store.open_blocking()
        [inserted] = store.insert_blocking([new_job()])
        assert inserted.status is InsertStatus.CREATED
        store.close()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    "command",
    [
        ("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",), ("DBSIZE",), ("FLUSHALL",), ("FLUSHDB",), ("SWAPDB", "0", "1"),
        ("CONFIG", "SET", "maxmemory", "0"), ("CONFIG", "REWRITE"), ("DEBUG", "SLEEP", "0"), ("SHUTDOWN", "NOSAVE"),
        ("REPLICAOF", "NO", "ONE"), ("ACL", "LIST"), ("ACL", "SETUSER", "me", "+@all"), ("MONITOR",), ("SAVE",),
        ("CLIENT", "LIST"), ("SCRIPT", "FLUSH"), ("MODULE", "LIST"), ("SUBSCRIBE", "news"), ("PUBLISH", "news", "x"),
        ("RENAME", "holdfast:queues", "holdfast:x"), ("MIGRATE", "h", "1", "holdfast:queues", "0", "1"),
        ("GET", FOREIGN), ("SET", FOREIGN, "x"), ("HGET", FOREIGN, "x"), ("DEL", FOREIGN), ("SADD", FOREIGN, "x"),
        ("EVAL", "return redis.call('GET', KEYS[1])", "1", FOREIGN),
        ("EVAL", f"return redis.call('GET', '{FOREIGN}')", "0"),
        ("EVAL", "return redis.call('KEYS', '*')", "0"),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_nobody_may(server: RedisServer, worker: RedisStore, user: str, command: tuple[str, ...]) -> None:
    with client(server, user) as connected, pytest.raises(redis.RedisError) as refused:
        connected.execute_command(*command)
    in_script_or_off = ("The user executing the script can't", "ACL failure in script", "command not allowed")
    assert isinstance(refused.value, NoPermissionError) or any(told in str(refused.value) for told in in_script_or_off)
    assert server.ask("GET", FOREIGN) == "of somebody else"


# Each in its role. The worker's is the conformance suite: tests/store/test_redis_acl.py.


@pytest.mark.parametrize("new", [False, True])
async def test_a_producer_enqueues(server: RedisServer, worker: RedisStore, new: bool) -> None:
    if new:  # it is the first to come to an empty server
        server.ask("FLUSHALL")
    async with store_at(url_of(server, "holdfast-producer")) as producer:
        keyed = new_job(key=Key("k", "h", HOUR))
        answers = await producer.insert(
            [*new_jobs(250), new_job(delay=HOUR), new_job(priority=1, share="a"), keyed, new_job(queue="other")]
        )
        assert {answer.status for answer in answers} == {InsertStatus.CREATED}
        [again] = await asyncio.to_thread(producer.insert_blocking, [new_job(key=Key("k", "h", HOUR))])
        assert again.job_id == keyed.id
        await producer.insert([new_job()], checkpoint=Checkpoint("default", "source", None, "1"))
        assert await producer.checkpoint("default", "source") == "1"
    async with store_at(url_of(server, "holdfast-worker")) as store:
        await store.open_session(Session(id="w", queues=("default",)))
        assert len(await claim(store, "w", 1000)) == 253
        assert [counts.queue for counts in await store.counts()] == ["default", "other"]


async def test_a_producer_does_nothing_else(server: RedisServer, worker: RedisStore) -> None:
    [inserted] = await worker.insert([new_job()])
    taken = await claim(worker, "s")
    async with store_at(url_of(server, "holdfast-producer")) as producer:
        for attempt in (
            producer.open_session(Session(id="p", queues=("default",))),
            claim(producer, "s"),
            finish(producer, taken),
            producer.request_cancel([inserted.job_id]),
            producer.close_session("s"),
            producer.get(inserted.job_id),
            producer.prune(10),
            producer.beat("s"),
        ):
            with pytest.raises((StoreUnavailable, OutcomeUnknown), match="NOPERM") as caught:
                await attempt
            assert "let the user do what docs/reference/redis.md lists" in str(caught.value)
            assert password_of("holdfast-producer") not in str(caught.value)
    assert await finish(worker, taken) == ["applied"]


async def test_a_reader_looks(server: RedisServer, worker: RedisStore) -> None:
    await worker.insert(new_jobs(3))
    await claim(worker, "s", 1)
    await worker.open_session(Session(id="dead", queues=("default",)))
    [lost] = await claim(worker, "dead", 1)
    await worker.close_session("dead")
    async with store_at(url_of(server, "holdfast-reader")) as reader:
        assert len((await reader.find(JobQuery())).jobs) == 3
        assert await reader.get(lost.id) is not None
        assert [counts.ready for counts in await reader.counts()] == [1]
        assert len((await reader.sessions()).sessions) == 2
        assert [job.id for job in await reader.lost(10)] == [lost.id]
        assert [job.id for job in await reader.held("dead")] == [lost.id]
        before = {key: server.ask("DUMP", key) for key in server.ask("KEYS", "*")}
        for attempt in (
            reader.insert([new_job()]),
            reader.open_session(Session(id="r", queues=("default",))),
            claim(reader, "s"),
            finish(reader, [lost]),
            reader.request_cancel([lost.id]),
            reader.forget([lost.id]),
            reader.set_paused("default", True),
            reader.prune(10),
            reader.close_session("s"),
        ):
            with pytest.raises(StoreError, match=r"NOPERM|can't run this command|ACL failure in script"):
                await attempt
        assert {key: server.ask("DUMP", key) for key in server.ask("KEYS", "*")} == before


async def test_a_reader_asks_the_doctor(server: RedisServer, worker: RedisStore) -> None:
    await worker.insert(new_jobs(2))
    await worker.open_session(Session(id="dead", queues=("default",)))
    await claim(worker, "dead", 1)
    await worker.close_session("dead")
    result = await asyncio.to_thread(run, "doctor", url_of(server, "holdfast-reader"))
    found = verdicts(result)
    assert "bad" not in found.values(), result.stdout
    assert found["lost jobs"] == "weak"
    assert found["queue default"] == "ok"
    [record] = records(await asyncio.to_thread(run, "doctor", "--json", url_of(server, "holdfast-reader")))
    assert password_of("holdfast-reader") not in str(record)
