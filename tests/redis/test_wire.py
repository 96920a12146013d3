"""The connections: replies go to those who asked, whatever is cancelled, late, forked or closed; and who may listen."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from holdfast import Holdfast
from holdfast.config import RedisSettings, Settings
from holdfast.errors import InvalidOption, StoreError, StoreUnavailable
from holdfast.ports import SYSTEM
from holdfast.store import InsertStatus
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis.dispatch import Batch, Call
from holdfast.stores.redis.wire import Access, BlockingLine, Line, LineFailed, Place, ReplyError
from tests.postgres.helpers import eventually, new_job, new_jobs, wait_until
from tests.redis.fake import FORWARD, NOTHING, FakeServer, text
from tests.redis.helpers import outside, store_at
from tests.servers import RedisServer, free_port, missing_server_policy

SECRET = "hunter2"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server on which nobody else connects."""
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server


def clients(server: RedisServer) -> int:
    """How many connections it has, without the one that asks."""
    return len(server.ask("CLIENT", "LIST").splitlines()) - 1


async def say(store: RedisStore, *words: str) -> list[str]:
    """What the server says after us, in one batch."""
    replies = await store._connections.execute(Batch([Call(("ECHO", word)) for word in words], writes=False))
    return [reply.decode() for reply in replies]


def say_blocking(store: RedisStore, *words: str) -> list[str]:
    replies = store._connections._execute_blocking(Batch([Call(("ECHO", word)) for word in words], writes=False))
    return [reply.decode() for reply in replies]


# Replies and those who asked.


@pytest.mark.parametrize("seed", range(3))
async def test_a_cancelled_call_hands_its_reply_to_nobody(server: RedisServer, seed: int) -> None:
    chance = random.Random(seed)
    right = cancelled = 0

    async def caller(number: int) -> None:
        nonlocal right, cancelled
        for turn in range(40):
            words = [f"{number}.{turn}.{part}" * chance.choice((1, 1, 5000)) for part in range(chance.randint(1, 4))]
            call = asyncio.ensure_future(say(store, *words))
            if chance.random() < 0.4:
                for _ in range(chance.randint(0, 3)):
                    await asyncio.sleep(0)
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.random() / 500)
                call.cancel()
            try:
                assert await call == words
                right += 1
            except asyncio.CancelledError:
                cancelled += 1

    async with store_at(server.url) as store:
        await asyncio.gather(*map(caller, range(15)))
        assert right > 100
        assert cancelled > 50


async def test_a_reply_that_is_not_waited_for_must_be_read(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a line that forgets who has left gives the next one what is not for it."""
    ask = Line.ask

    async def forgetful(self: Line, commands: Any, timeout: float) -> list[Any]:
        before = set(self._under_way)
        try:
            return await ask(self, commands, timeout)
        except asyncio.CancelledError:
            for exchange in set(self._under_way) - before:
                if exchange[1].cancelled():
                    self._under_way.remove(exchange)
            raise

    monkeypatch.setattr(Line, "ask", forgetful)
    with pytest.raises((AssertionError, StoreError, IndexError)):
        await test_a_cancelled_call_hands_its_reply_to_nobody(server, 0)
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


async def test_a_late_reply_is_nobodys(server: RedisServer) -> None:
    late = True

    def answer(words: list[bytes]) -> Any:
        if late and words == [b"ECHO", b"first"]:
            time.sleep(0.4)
            return text(b"first")
        return FORWARD

    with FakeServer(answer, behind=server.port) as fake:
        store = store_at(f"{fake.url}?timeout=0.15")
        assert await say(store, "before") == ["before"]
        line = await store._connections.line(Place("127.0.0.1", fake.port))
        calls = [asyncio.ensure_future(line.ask([("ECHO", word)], 0.15)) for word in ("first", "second")]
        for call in calls:
            with pytest.raises(LineFailed, match="within the deadline") as caught:
                await call
            assert caught.value.sent
        assert line.closed
        assert await say(store, "third") == ["third"]
        blocking = BlockingLine(Place("127.0.0.1", fake.port), Access(), SYSTEM.clock)
        with pytest.raises(LineFailed, match="timed out"):
            blocking.ask([("ECHO", "first")], 0.15)
        with pytest.raises(LineFailed):
            blocking.ask([("ECHO", "second")], 0.15)
        assert await asyncio.to_thread(say_blocking, store, "fourth") == ["fourth"]
        store.close()


Said = tuple[tuple[bytes, float], ...]


@contextmanager
def saying(*answers: Said) -> Iterator[BlockingLine]:
    """A connection to somebody who answers each of its calls with these pieces, and waits so long before each."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            for answer in answers:
                if not connection.recv(1000):
                    return
                for piece, seconds in answer:
                    time.sleep(seconds)
                    connection.sendall(piece)
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        line = BlockingLine(Place("127.0.0.1", listener.getsockname()[1]), Access(), SYSTEM.clock)
        try:
            yield line
        finally:
            line.close()
            thread.join(10)


def test_a_one_is_a_one_however_it_travels() -> None:
    """The usual reply is known by its bytes: others must not be taken for it, nor may it be missed in pieces."""
    pieces = ((b":", 0.0), (b"1\r", 0.05), (b"\n", 0.05))
    with saying(((b":1\r\n", 0),), pieces, ((b":1\r\n:2\r\n", 0),), ((b":11\r\n", 0),), ((b"$1\r\n1\r\n", 0),)) as line:
        assert [line.ask([("X",)], 5) for _ in range(2)] == [[1], [1]]
        assert line.ask([("X",), ("Y",)], 5) == [1, 2]
        assert [line.ask([("X",)], 5) for _ in range(2)] == [[11], [b"1"]]


def test_one_of_two_replies_is_not_all() -> None:
    with saying(((b":1\r\n", 0), (b":2\r\n", 0.1))) as line:
        assert line.ask([("X",), ("Y",)], 5) == [1, 2]


def test_an_error_is_no_one() -> None:
    with saying(((b"-OOM no\r\n", 0),), ((b":1\r\n", 0),)) as line:
        [reply] = line.ask([("X",)], 5)
        assert isinstance(reply, ReplyError)
        assert line.ask([("X",)], 5) == [1]


@pytest.mark.parametrize("more", [b":1\r\n", b"$5\r\nab"], ids=["a reply", "half a reply"])
def test_a_connection_with_more_on_it_than_was_asked_for_is_not_used_again(more: bytes) -> None:
    with saying(((b":1\r\n" + more, 0),)) as line:
        with pytest.raises(LineFailed, match="unasked") as caught:
            line.ask([("X",)], 5)
        assert caught.value.sent
        with pytest.raises(LineFailed):
            line.ask([("X",)], 5)


@pytest.mark.parametrize("piece", [b"", b":", b":1\r"])
def test_a_one_that_is_late_has_one_deadline(piece: bytes) -> None:
    """Half of it does not begin the time anew."""
    with saying(((piece, 0.3), (b":1\r\n"[len(piece) :], 0.4))) as line:
        with pytest.raises(LineFailed, match="timed out") as caught:
            line.ask([("X",)], 0.5)
        assert caught.value.sent
        with pytest.raises(LineFailed):
            line.ask([("X",)], 5)


def test_a_signal_does_not_begin_the_time_of_a_reply_anew() -> None:
    """A program that gets signals all the time, as from a profiler, still hears of a dead server."""
    with saying(((b":1\r\n", 2.0),)) as line:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            with pytest.raises(LineFailed, match="timed out"):
                line.ask([("X",)], 0.5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n+OK\r\n+OK\r\n", b"*1\r\n$99999999999\r\n"]
)
async def test_something_that_does_not_talk_like_redis(said: bytes) -> None:
    with FakeServer(lambda words: said) as fake:
        store = store_at(f"{fake.url}?timeout=0.3")
        with pytest.raises(StoreError):
            await store.insert([new_job()])
        with pytest.raises(StoreError):
            await asyncio.to_thread(store.insert_blocking, [new_job()])
        store.close()


async def test_nobody_waits_longer_because_others_wait() -> None:
    """Calls that come while a connection, or the store, is being opened share that attempt and its end."""
    with FakeServer(lambda words: NOTHING) as fake:
        store = store_at(f"redis://:{SECRET}@127.0.0.1:{fake.port}/0?timeout=0.3")
        for _ in range(2):
            began = time.monotonic()
            results = await asyncio.gather(*(store.insert([new_job()]) for _ in range(20)), return_exceptions=True)
            assert time.monotonic() - began < 2
            assert {type(result) for result in results} == {StoreUnavailable}
            store._opened = True  # and once more, with only the connection to be opened
        store.close()


async def test_a_connection_whose_opening_was_cancelled_is_closed(server: RedisServer) -> None:
    gc.collect()
    with FakeServer(lambda words: NOTHING if words[0] == b"AUTH" else FORWARD, behind=server.port) as fake:
        access = Access(password=SECRET)
        opening = asyncio.ensure_future(Line.open(Place("127.0.0.1", fake.port), access))
        await eventually(lambda: fake.commands == ["AUTH"])
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        del opening
        await asyncio.sleep(0.01)
        gc.collect()


# Threads, event loops, processes.


def test_threads_and_event_loops_at_once(server: RedisServer) -> None:
    server.ask("FLUSHALL")
    store = store_at(server.url)
    wrong: list[object] = []

    def on_a_loop(number: int) -> None:
        async def main() -> None:
            for turn in range(30):
                word = f"{number}.{turn}"
                said = await asyncio.gather(*(say(store, f"{word}.{part}") for part in range(5)))
                wrong.extend(each for part, each in enumerate(said) if each != [f"{word}.{part}"])
                job = new_job()
                wrong.extend(each for each in await store.insert([job]) if each.job_id != job.id)

        asyncio.run(main())

    def blocking(number: int) -> None:
        store.open_blocking()
        for turn in range(60):
            word = f"b{number}.{turn}"
            wrong.extend(each for each in [say_blocking(store, word)] if each != [word])
            job = new_job()
            wrong.extend(each for each in store.insert_blocking([job]) if each.job_id != job.id)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4) for work in (on_a_loop, blocking)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert outside(server.url).hlen("holdfast:{default}:jobs") == 4 * 30 + 4 * 60
    outside(server.url).connection_pool.disconnect()
    # The event loops have ended, and their connections with them; those of blocking calls are kept for the next.
    wait_until(lambda: 1 <= clients(server) <= 4)
    store.close()
    wait_until(lambda: clients(server) == 0)
    gc.collect()


def test_an_event_loop_that_ends_leaves_nothing(server: RedisServer) -> None:
    """Also in the middle of a call, and of a wait for jobs."""
    store = store_at(server.url)

    async def use() -> None:
        assert await say(store, "x") == ["x"]
        asyncio.ensure_future(say(store, "y"))  # noqa: RUF006

        async def wait() -> None:
            async for _ in store.wakeups({"default"}):
                pass

        waiting = asyncio.ensure_future(wait())
        await eventually(lambda: "cmd=blpop" in server.ask("CLIENT", "LIST"))
        assert not waiting.done()

    for _ in range(3):
        asyncio.run(use())
        gc.collect()
        wait_until(lambda: clients(server) == 0)


def test_a_store_that_is_dropped_closes_its_connections(server: RedisServer) -> None:
    store = store_at(server.url)
    store.open_blocking()
    assert clients(server) > 0
    del store
    gc.collect()
    wait_until(lambda: clients(server) == 0)


async def test_a_closed_store_opens_again(server: RedisServer) -> None:
    store = store_at(server.url)
    for _ in range(2):
        assert await say(store, "x") == ["x"]
        assert await asyncio.to_thread(say_blocking, store, "y") == ["y"]
        assert clients(server) == 2
        store.close()
        await eventually(lambda: clients(server) == 0)


@pytest.mark.parametrize("blocking", [False, True])
async def test_connections_that_are_kept_ready(server: RedisServer, blocking: bool) -> None:
    store = store_at(server.url, settings=Settings(redis=RedisSettings(min_idle_conns=3)))
    if blocking:
        await asyncio.to_thread(store.open_blocking)
    else:
        await store.counts()
    assert clients(server) == (3 if blocking else 4)
    store.close()
    await eventually(lambda: clients(server) == 0)


FORKING = """
import asyncio, os, sys
from holdfast.ports import SYSTEM
from holdfast.stores import open_store
from holdfast.stores.redis.dispatch import Batch, Call

store = open_store(sys.argv[1], SYSTEM)
store.open_blocking()

def say(who):
    for turn in range(300):
        word = f"{who}.{turn}"
        [said] = store._connections._execute_blocking(Batch([Call(("ECHO", word))], writes=False))
        assert said.decode() == word, (said, word)

async def asay(who):
    for turn in range(100):
        words = [f"{who}.{turn}.{part}" for part in range(3)]
        calls = (store._connections.execute(Batch([Call(("ECHO", word))], writes=False)) for word in words)
        said = [reply.decode() for [reply] in await asyncio.gather(*calls)]
        assert said == words, (said, words)

async def ids():
    [said] = await store._connections.execute(Batch([Call(("CLIENT", "ID"))], writes=False))
    return said

async def main():
    before = await ids()
    child = os.fork()
    if child == 0:
        try:
            asyncio._set_running_loop(None)
            assert asyncio.run(ids()) != before
            say("child")
            asyncio.run(asay("child"))
            store.close()
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    await asay("parent")
    say("parent")
    _, status = os.waitpid(child, 0)
    await asay("parent again")
    assert await ids() == before
    print(os.waitstatus_to_exitcode(status))

asyncio.run(main())
say("parent at last")
store.close()
"""


def test_a_child_has_connections_of_its_own(server: RedisServer) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(FORKING), server.url],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# Where to connect, and as whom.

WORD = "p@ss:w/or?d #%&é+[x]"
USER = "us:er@ho/st%"


async def test_special_characters(server: RedisServer) -> None:
    server.ask("ACL", "SETUSER", USER, "reset", "on", f">{WORD}", "~*", "&*", "+@all")
    server.ask("ACL", "SETUSER", "open", "reset", "on", "nopass", "~*", "&*", "+@all")
    for who in (f"{quote(USER, safe='')}:{quote(WORD, safe='')}", "open:anything", "open"):
        store = store_at(f"redis://{who}@127.0.0.1:{server.port}/0?namespace=special")
        [whoami] = await store._connections.execute(Batch([Call(("ACL", "WHOAMI"))], writes=False))
        assert whoami.decode() == ("open" if who.startswith("open") else USER)
        assert await asyncio.to_thread(say_blocking, store, "x") == ["x"]
        store.close()


async def test_database_numbers(server: RedisServer) -> None:
    for number in (0, 3):
        store = store_at(f"redis://127.0.0.1:{server.port}/{number}?namespace=db{number}")
        await store.insert([new_job()])
        await asyncio.to_thread(store.insert_blocking, [new_job()])
        store.close()
    keys = {number: outside(server.url.replace("/0", f"/{number}")).keys("db*:{default}:jobs") for number in (0, 3)}
    assert keys == {0: [b"db0:{default}:jobs"], 3: [b"db3:{default}:jobs"]}
    for number in (0, 3):
        outside(server.url.replace("/0", f"/{number}")).connection_pool.disconnect()
    store = store_at(f"redis://127.0.0.1:{server.port}/99")
    with pytest.raises(StoreUnavailable, match="DB index is out of range"):
        await store.insert([new_job()])
    store.close()


async def test_several_hosts(server: RedisServer) -> None:
    nobody = free_port()
    store = store_at(f"redis://127.0.0.1:{nobody},127.0.0.1:{server.port},127.0.0.1:{nobody}/0?namespace=several")
    [inserted] = await store.insert([new_job()])
    assert inserted.status is InsertStatus.CREATED
    store.close()
    store = store_at(f"redis://:{SECRET}@127.0.0.1:{nobody},127.0.0.1:{free_port()}/0")
    with pytest.raises(StoreUnavailable) as caught:
        await store.insert([new_job()])
    assert str(caught.value).count("cannot connect to") == 2
    assert SECRET not in str(caught.value)
    store.close()


async def test_an_ipv6_address() -> None:
    with missing_server_policy():
        server = RedisServer(settings={"bind": "127.0.0.1 -::1"})
    with server:
        try:
            socket.create_connection(("::1", server.port), timeout=1).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
        store = store_at(f"redis://[::1]:{server.port}/0")
        [inserted] = await store.insert([new_job()])
        assert inserted.status is InsertStatus.CREATED
        assert repr(store) == f"<RedisStore redis://[::1]:{server.port}>"
        store.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"redis://u:{SECRET}@host:port/0", "the store URL cannot be read"),
        (f"redis://u:{SECRET}@host:0/0", "the store URL cannot be read"),
        (f"redis://u:{SECRET}@host:99999/0", "the store URL cannot be read"),
        (f"redis://u:{SECRET}@host:٣/0", "the store URL cannot be read"),
        (f"redis://u:{SECRET}@:6379/0", "the store URL cannot be read"),
        (f"redis://u:{SECRET}@[::1/0", "the store URL cannot be read"),
        (f"redis://u:{SECRET}@a,,b/0", "the store URL cannot be read"),
        (f"redis://u:{SECRET}@h/zero", "the database of a Redis URL is a number"),
        (f"redis://u:{SECRET}@h/-1", "the database of a Redis URL is a number"),
        (f"redis://u:{SECRET}@h/0/1", "the database of a Redis URL is a number"),
        (f"redis://u:6379/{SECRET}@h/0", "special characters"),
        (f"redis://u:6379?{SECRET}@h/0", "special characters"),
        (f"redis://u:6379?a={SECRET}@h/0", "unknown option 'a'"),
        (f"redis://u:63#{SECRET}@h/0", "'#'"),
        (f"redis://u:{SECRET}@h/0?namespace=1", "namespace '1' must be"),
        (f"redis://u:{SECRET}@h/0?timeout=never", "timeout='never' is not valid"),
        (f"redis://u:{SECRET}@h/0?timeout=0", "timeout must be 0.1 to 3600"),
        (f"redis://u:{SECRET}@h/0?ssl_ca=x", "ssl_ca is for rediss://"),
        (f"redis://u:{SECRET}@h/0?colour=red", "unknown option 'colour'"),
        (f"redis://u:{SECRET}@h/0?durability=x&durability=x", "names an option twice"),
        (f"redis+cluster://u:{SECRET}@h/0", "a cluster has one database"),
        (f"redis+sentinel://u:{SECRET}@h", "the URL names no primary"),
        (f"redis+sentinel://u:{SECRET}@h/name/x", "the database of a Redis URL is a number"),
        (f"rediss://u:{SECRET}@h/0?ssl_ca=/nowhere.pem", "ssl_ca='/nowhere.pem' cannot be read"),
    ],
)  # fmt: skip
def test_urls_that_cannot_be_read(url: str, said: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        store_at(url)
    assert said in str(caught.value)
    told: BaseException | None = caught.value
    while told is not None:
        assert SECRET not in f"{told!r} {told}"
        told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "no.such.host.invalid"])
async def test_a_host_that_cannot_be(host: str) -> None:
    store = store_at(f"redis://u:{SECRET}@{host}:6379/0?timeout=1")
    with pytest.raises(StoreUnavailable, match="cannot connect to") as caught:
        await store.insert([new_job()])
    assert SECRET not in str(caught.value)
    with pytest.raises(StoreUnavailable, match="cannot connect to"):
        await asyncio.to_thread(store.insert_blocking, [new_job()])
    store.close()


def test_a_password_is_never_shown() -> None:
    url = f"redis://user:{SECRET}@127.0.0.1:1/0"
    store = store_at(url)
    shown = (
        f"{store!r} {store.topology.shown} {store._access!r} {store._access} {store._arguments!r} {store._options!r}"
    )
    assert SECRET not in shown
    assert SECRET not in repr(Holdfast(url))
    assert SECRET not in repr(Access(password=SECRET, username="user"))


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 and localhost that signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
               "-days", "2", "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=redis.test",
               "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:TRUE"]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)
    return folder / "cert.pem"


@pytest.fixture(scope="module")
def encrypted(certificate: Path) -> Iterator[tuple[RedisServer, int]]:
    port = free_port()
    with missing_server_policy():
        server = RedisServer(
            settings={
                "tls-port": str(port),
                "tls-cert-file": str(certificate),
                "tls-key-file": str(certificate.with_name("key.pem")),
                "tls-auth-clients": "no",
            }
        )
    with server:
        yield server, port


async def test_tls(encrypted: tuple[RedisServer, int], certificate: Path) -> None:
    server, port = encrypted
    store = store_at(f"rediss://127.0.0.1:{port}/0?ssl_ca={quote(str(certificate))}")
    [inserted] = await store.insert([new_job(payload=b'"%s"' % (b"x" * 300_000))])
    assert inserted.status is InsertStatus.CREATED
    for _ in range(3):
        [inserted] = await asyncio.to_thread(store.insert_blocking, new_jobs(1))
        assert inserted.status is InsertStatus.CREATED
    assert await say(store, "x" * 200_000) == ["x" * 200_000]
    assert clients(server) == 2
    store.close()
    await eventually(lambda: clients(server) == 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_certificate_that_nobody_vouches_for(
    encrypted: tuple[RedisServer, int], certificate: Path, host: str
) -> None:
    """Unknown, or made out to another host: refused, before a password is said."""
    _, port = encrypted
    known = f"?ssl_ca={quote(str(certificate))}" if host == "localhost" else ""
    store = store_at(f"rediss://:{SECRET}@{host}:{port}/0{known}")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed") as caught:
            await store.insert([new_job()])
        assert SECRET not in str(caught.value)
    with pytest.raises(StoreUnavailable, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
        await asyncio.to_thread(store.insert_blocking, [new_job()])
    store.close()
    gc.collect()


async def test_tls_where_there_is_none(encrypted: tuple[RedisServer, int], certificate: Path) -> None:
    server, port = encrypted
    for url in (
        f"rediss://127.0.0.1:{server.port}/0?ssl_ca={quote(str(certificate))}&timeout=0.5",
        f"redis://127.0.0.1:{port}/0?timeout=0.5",
    ):
        store = store_at(url)
        with pytest.raises(StoreUnavailable, match="Nothing was written"):
            await store.insert([new_job()])
        with pytest.raises(StoreUnavailable):
            await asyncio.to_thread(store.insert_blocking, [new_job()])
        store.close()


# Another event loop than that of asyncio.


@pytest.fixture
def fast_loop() -> Iterator[asyncio.Runner]:
    """uvloop, which a worker uses if it is there. Its transports and timers are its own."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


def test_on_uvloop_a_cancelled_call_hands_its_reply_to_nobody(server: RedisServer, fast_loop: asyncio.Runner) -> None:
    fast_loop.run(test_a_cancelled_call_hands_its_reply_to_nobody(server, 0))


def test_on_uvloop_a_late_reply_is_nobodys(server: RedisServer, fast_loop: asyncio.Runner) -> None:
    fast_loop.run(test_a_late_reply_is_nobodys(server))


async def late_reply(server: RedisServer) -> None:
    """Calls with different deadlines on one connection: each is kept, whichever was first, and not before its time."""
    slow = {b"slow": 0.3}

    def answer(words: list[bytes]) -> Any:
        time.sleep(slow.get(words[-1], 0))
        return FORWARD

    with FakeServer(answer, behind=server.port) as fake:
        place = Place("127.0.0.1", fake.port)
        line = await Line.open(place, Access())
        assert await line.ask([("ECHO", "slow")], 2.0) == [b"slow"]
        assert await line.ask([("ECHO", "quick")], 0.2) == [b"quick"]
        patient = asyncio.ensure_future(line.ask([("ECHO", "slow")], 5.0))
        await asyncio.sleep(0)
        began = time.monotonic()
        with pytest.raises(LineFailed, match="within the deadline"):
            await line.ask([("ECHO", "slow")], 0.1)
        assert 0.09 < time.monotonic() - began < 0.29
        with pytest.raises(LineFailed):
            await patient
        assert line.closed


async def test_every_call_has_its_own_deadline(server: RedisServer) -> None:
    await late_reply(server)


def test_on_uvloop_every_call_has_its_own_deadline(server: RedisServer, fast_loop: asyncio.Runner) -> None:
    fast_loop.run(late_reply(server))


async def test_a_second_attempt_has_the_time_that_the_first_left(server: RedisServer) -> None:
    """A read that is tried again, because the first connection was lost late, ends at the same deadline."""
    seen = 0

    def answer(words: list[bytes]) -> Any:
        nonlocal seen
        if words != [b"ECHO", b"lost"]:
            return FORWARD
        seen += 1
        if seen == 1:
            time.sleep(0.7)
            raise ConnectionError("the first connection is lost")
        return NOTHING

    with FakeServer(answer, behind=server.port) as fake:
        store = store_at(f"{fake.url}?timeout=1")
        assert await say(store, "before") == ["before"]
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await say(store, "lost")
        assert seen == 2
        assert time.monotonic() - began < 1.5
        store.close()


def test_all_connections_in_use_and_then_a_late_reply_end_at_one_deadline(server: RedisServer) -> None:
    with FakeServer(lambda words: NOTHING if words == [b"ECHO", b"never"] else FORWARD, behind=server.port) as fake:
        store = store_at(f"{fake.url}?timeout=1")
        store.open_blocking()
        slots = store._connections._slots
        taken = [slots.get_nowait() for _ in range(slots.qsize())]
        threading.Timer(0.6, slots.put, [taken.pop()]).start()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            say_blocking(store, "never")
        assert time.monotonic() - began < 1.5
        store.close()
