"""The plans of the hot statements among 200,000 jobs: an index for each, nothing sorted, nothing walked through.

Once with statistics that still say that the tables are empty, and once after ANALYZE TABLE. The statements are not
copied here: they are recorded while the verbs run, so this cannot fall behind the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from holdfast.job import Job, Key, State
from holdfast.lifecycle import Failed, Succeeded, replay, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import DepthLimit, JobQuery
from holdfast.stores.mysql import MysqlStore
from holdfast.stores.mysql.drive import adrive
from holdfast.stores.mysql.pool import AsyncPooledLine
from holdfast.stores.mysql.tables import Tables
from holdfast.testing.suite.harness import BOOM
from tests.mysql.helpers import TABLES, claim, done, drop, new_job, new_jobs, sql, store_at
from tests.servers import MariaDbServer

NS = "plans"
READY, HELD, KEPT = 200_000, 3_000, 30_000


class Step:
    """One line of a plan."""

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.row = row
        with_partitions = len(row) == 12  # as MySQL has it
        self.table, self.type, self.key = (str(row[at]) for at in ((2, 4, 6) if with_partitions else (2, 3, 5)))
        self.extra = str(row[-1])

    def __repr__(self) -> str:
        return repr(self.row)

    def walks(self) -> bool:
        """Whether it reads a whole table of ours, if it may be large. `m`: the moves; `g`: the gates; `<...>`: what
        other steps found."""
        return self.type == "ALL" and not self.table.startswith("<") and self.table not in ("m", "g", f"{NS}_sessions")


Plan = list[Step]


@pytest.fixture(scope="module", params=["statistics of empty tables", "after ANALYZE TABLE"])
def filled(request: pytest.FixtureRequest, mariadb_server: MariaDbServer) -> Iterator[str]:
    url = mariadb_server.url
    drop(url, NS)
    store = store_at(url, NS)
    store._open_blocking()
    store.close()
    for table in TABLES:
        sql(url, f"ALTER TABLE {NS}_{table} STATS_PERSISTENT = 1, STATS_AUTO_RECALC = 0")
        sql(url, f"ANALYZE TABLE {NS}_{table}")
    fill(url)
    if request.param == "after ANALYZE TABLE":
        for table in TABLES:
            sql(url, f"ANALYZE TABLE {NS}_{table}")
    yield url
    drop(url, NS)


def fill(url: str) -> None:
    """Jobs in two queues with three priorities and three shares each; jobs held by 30 sessions; a history."""

    def ids(first: int, count: int) -> str:
        return (
            f"(SELECT n, CONCAT(LPAD(HEX(n), 8, '0'), '-0000-7000-8000-000000000000') AS id FROM "
            f"(SELECT {first} + seq AS n FROM seq_0_to_{count - 1}) AS numbers) AS made"
        )

    sql(
        url,
        f"INSERT INTO {NS}_ready (id, task, payload, queue, priority, share, run_at, created_at) "
        f"SELECT LOWER(id), 't', '{{}}', IF(MOD(n, 4) = 0, 'mail', 'default'), ELT(1 + MOD(n DIV 4, 3), 0, 5, 10), "
        f"ELT(1 + MOD(n DIV 12, 3), '', 'a', 'b'), 1000000 + n, 1 FROM {ids(0, READY)}",
    )
    sql(
        url,
        f"INSERT INTO {NS}_in_flight (id, task, payload, task_version, queue, share, priority, max_retries, retention, "
        f"created_at, reason, run_at, version, session_id, attempt, failures, crashes, snoozes, suspect, cancel_asked) "
        f"SELECT LOWER(id), 't', '{{}}', '1', 'default', '', 5, 3, 1, 1, 'claimed', n, 1, CONCAT('s', MOD(n, 30)), 0, "
        f"0, 0, 0, 0, 0 FROM {ids(READY, HELD)}",
    )
    sql(
        url,
        f"INSERT INTO {NS}_ended (id, task, payload, task_version, queue, share, priority, max_retries, retention, "
        f"created_at, state, reason, run_at, version, attempt, failures, crashes, snoozes, suspect, cancel_asked, "
        f"ended_at, expires_at) SELECT LOWER(id), 't', '{{}}', '1', 'default', '', 5, 3, 1, 1, "
        f"IF(MOD(n, 50) = 0, 'failed', 'succeeded'), 'succeeded', n, 1, 1, 0, 0, 0, 0, 0, n, "
        f"IF(MOD(n, 50) = 0, NULL, n) FROM {ids(READY + HELD, KEPT)}",
    )
    sql(url, f"INSERT INTO {NS}_gates SELECT CONCAT('s', seq) FROM seq_0_to_27")
    sql(url, f"INSERT INTO {NS}_sessions SELECT CONCAT('s', seq), 0, seq < 28, 1, 1, '', 1, '' FROM seq_0_to_29")
    sql(
        url,
        f"INSERT INTO {NS}_keys SELECT 'default', CONCAT('k', seq), 'h', '', 9007199254740991 FROM seq_0_to_20000",
    )


class Recorder:
    """Remembers the plan of everything that is sent."""

    def __init__(self) -> None:
        self.plans: list[tuple[str, Plan]] = []

    def note(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self.plans.append((statement, [Step(row) for row in rows]))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    send = AsyncPooledLine.send

    async def recording(line: AsyncPooledLine, statements: Sequence[str]) -> Any:
        for statement in statements:
            if re.match(r"\(?(SELECT|UPDATE|DELETE|INSERT)", statement) and " VALUES (" not in statement:
                # On the same connection: to explain a statement the server may read, and lock, a row.
                [answer] = await send(line, [f"EXPLAIN {statement}"])
                recorder.note(statement, answer.rows)
        return await send(line, statements)

    monkeypatch.setattr(AsyncPooledLine, "send", recording)
    return recorder


@pytest.fixture
async def store(filled: str) -> Any:
    opened = store_at(filled, NS)
    opened._identity = ("known",)  # what it asks when it opens is not of interest
    yield opened
    opened.close()


def faults_in(recorder: Recorder) -> list[str]:
    """What is wrong with the plans: tables walked through, rows sorted."""
    found = []
    for statement, plan in recorder.plans:
        large = re.search(rf"{NS}_(ready|in_flight|ended|keys)", statement)
        for step in plan:
            if "filesort" in step.extra:
                found.append(f"sorted: {step} in {statement:.300}")
            if large and step.walks():
                found.append(f"walked through: {step} in {statement:.300}")
    return found


async def test_a_look_that_finds_nothing(store: MysqlStore, recorder: Recorder) -> None:
    """An idle worker's claim is one statement, which locks nothing and reads a few rows of an index."""
    await claim(store, "s1", limit=100, queues=("empty", "none"))
    recorder.plans.clear()
    assert await claim(store, "s1", limit=100, queues=("empty", "none")) == []
    [(statement, plan)] = recorder.plans
    assert "LOCK" not in statement
    assert "UPDATE" not in statement
    assert faults_in(recorder) == []
    assert {step.key for step in plan if step.table.endswith("_ready")} <= {"PRIMARY"}


async def test_claim(store: MysqlStore, recorder: Recorder) -> None:
    assert len(await claim(store, "s1", limit=100, queues=("mail", "empty"))) == 100
    assert len(await claim(store, "s1", limit=5, queues=("empty", "default"))) == 5
    assert faults_in(recorder) == []
    pulls = [plan for text, plan in recorder.plans if "FOR UPDATE SKIP LOCKED" in text]
    assert pulls
    for plan in pulls:
        assert [(step.key, step.type in ("ref", "range")) for step in plan] == [("PRIMARY", True)]
    hops = [plan for text, plan in recorder.plans if "SELECT priority, share, run_at" in text]
    assert len(hops) >= 20
    for plan in hops:
        assert {step.key for step in plan if not step.table.startswith("<")} <= {"PRIMARY", "None"}
    moved = [plan for text, plan in recorder.plans if text.startswith((f"INSERT INTO {NS}_in_flight", "DELETE j"))]
    assert {step.key for plan in moved for step in plan} - {"None"} == {"by_id"}


async def test_settle(store: MysqlStore, recorder: Recorder) -> None:
    jobs = await claim(store, "s2", limit=100)
    recorder.plans.clear()
    moves = [*done(jobs[1:]), settle(jobs[0], Failed(BOOM), RetryPolicy(), SYSTEM.random)]
    assert await store.apply(moves) == ["applied"] * 100
    assert faults_in(recorder) == []
    looks = [plan for text, plan in recorder.plans if "FOR UPDATE" in text]
    assert {step.key for plan in looks for step in plan} == {"PRIMARY"}
    moved = [plan for text, plan in recorder.plans if text.startswith("INSERT INTO")]
    assert len(moved) == 2
    alike, one_by_one = moved
    assert [(step.table, step.type, step.key) for step in alike] == [("s", "range", "PRIMARY")]
    assert [(step.table, step.type, step.key) for step in one_by_one][1:] == [("s", "eq_ref", "PRIMARY")]


async def test_settle_with_results_of_their_own(store: MysqlStore, recorder: Recorder) -> None:
    jobs = await claim(store, "s2", limit=20)
    recorder.plans.clear()
    moves = [settle(job, Succeeded(b"%d" % n), RetryPolicy(), SYSTEM.random) for n, job in enumerate(jobs)]
    assert await store.apply(moves) == ["applied"] * 20
    assert faults_in(recorder) == []
    [plan] = [plan for text, plan in recorder.plans if text.startswith("INSERT INTO")]
    assert [(step.table, step.type, step.key) for step in plan][1:] == [("s", "eq_ref", "PRIMARY")]
    found = [await store.get(job.id) for job in jobs]
    assert [job.result for job in found if job] == [b"%d" % number for number in range(20)]


async def first(store: MysqlStore, state: State) -> Job:
    return (await store.find(JobQuery(states=(state,), limit=1))).jobs[0]


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(lambda store: store.insert([new_job()]), id="insert"),
        pytest.param(lambda store: store.insert(new_jobs(20, key=None)), id="insert many"),
        pytest.param(lambda store: store.insert([new_job(key=Key("k7", "h", 1)), new_job()]), id="keys"),
        pytest.param(lambda store: store.insert([new_job()], limits={"default": DepthLimit(max_depth=9)}), id="depth"),
        pytest.param(lambda store: store.beat("s3"), id="beat"),
        pytest.param(lambda store: store.held("s4"), id="held"),
        pytest.param(lambda store: store.sessions(limit=9), id="sessions"),
        pytest.param(lambda store: store.sessions(cursor="s15", limit=9), id="more sessions"),
        pytest.param(lambda store: store.lost(1000), id="lost"),
        pytest.param(lambda store: store.lost(1000, session_id="s28"), id="lost by session"),
        pytest.param(lambda store: store.close_session("s5"), id="close"),
        pytest.param(lambda store: store.prune(100), id="prune"),
        pytest.param(lambda store: store.get("00000001-0000-7000-8000-000000000000"), id="get"),
        pytest.param(lambda store: store.find(JobQuery(states=(State.FAILED,), limit=20)), id="dead letters"),
    ],
)
async def test_every_other_verb(store: MysqlStore, recorder: Recorder, verb: Callable[[MysqlStore], Any]) -> None:
    await verb(store)
    assert recorder.plans
    assert faults_in(recorder) == []


async def test_operators(store: MysqlStore, recorder: Recorder) -> None:
    ready, held, failed = [await first(store, state) for state in (State.READY, State.IN_FLIGHT, State.FAILED)]
    succeeded = await first(store, State.SUCCEEDED)
    recorder.plans.clear()
    assert await store.request_cancel([ready.id, held.id]) == ["cancelled", "asked"]
    assert await store.apply([replay(failed)]) == ["applied"]
    assert await store.forget([succeeded.id]) == 1
    assert faults_in(recorder) == []


async def reads(store: MysqlStore, plan: Callable[[], Any]) -> int:
    """How many rows the server's storage engine was asked for."""
    deadline = store._server.deadline()
    async with store._pool.aline(deadline) as line:

        async def read() -> int:
            [answer] = await line.send(["SHOW SESSION STATUS LIKE 'Handler_read%'"])
            return sum(int(value) for _, value in answer.rows)

        before = await read()
        own = await read() - before
        await adrive(store._steps(plan, deadline), line)
        return await read() - before - 2 * own


async def test_a_claim_reads_no_more_than_it_takes(store: MysqlStore) -> None:
    """Measured, not explained."""
    from holdfast.store import ClaimRequest

    request = ClaimRequest(session_id="s6", queues=("default",), limit=10)
    await store.claim(request)
    count = await reads(store, lambda: store._verbs.claims.claim(request))
    print(f"rows read by a claim of ten among {READY:,}: {count}")
    assert count < 400


async def test_the_guard_of_these_tests_works(
    store: MysqlStore, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statements that may not use the index by id are found out."""
    monkeypatch.setattr(
        Tables,
        "by_id",
        lambda tables, table, alias="": (
            f"{NS}_{table} {alias} IGNORE INDEX (PRIMARY, by_id)"
            if table == "ready"
            else f"{NS}_{table} {alias} IGNORE INDEX (PRIMARY)"
        ),
    )
    await store.get("00000001-0000-7000-8000-000000000000")
    assert faults_in(recorder) != []
