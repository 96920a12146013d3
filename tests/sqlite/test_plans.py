"""The plans of the hot statements: an index for each, before and after ANALYZE, and nothing that grows with the file.

The statements are not copied here: they are recorded while the verbs run, so this cannot fall behind the code.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.job import Job, State
from holdfast.lifecycle import Applied, Released, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, DepthLimit, JobQuery, Session
from holdfast.stores.rows import LIVE_AS_ENDED, job_from_row
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.verbs import Verbs
from holdfast.stores.sqlite.writer import Writer
from tests.sqlite.helpers import new_job, new_jobs, raw, run_sql

NOW = 2_000_000_000_000_000
LATER = NOW + 365 * 86400 * 1_000_000
ROWS = 100_000
"""In each of two queues."""
VERBS = Verbs("holdfast")

LIVE_BY_ID = r"SEARCH holdfast_live USING PRIMARY KEY \(id=\?\)"
ENDED_BY_ID = r"SEARCH holdfast_ended USING PRIMARY KEY \(id=\?\)"
HELD = r"SEARCH holdfast_live USING (COVERING )?INDEX holdfast_held \(session_id=\?\)"


class Recorder:
    """A connection that remembers the plan of everything it runs."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.plans: list[tuple[str, list[str]]] = []

    def _explain(self, sql: str, parameters: Sequence[Any]) -> None:
        rows = self._connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall()
        self.plans.append((" ".join(sql.split()), [row[3] for row in rows]))

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> sqlite3.Cursor:
        self._explain(sql, parameters)
        return self._connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        rows = list(parameters)
        if rows:
            self._explain(sql, rows[0])
        return self._connection.executemany(sql, rows)

    def of(self, *words: str) -> list[str]:
        """The plan of the one statement in which all these words stand."""
        found = {sql: plan for sql, plan in self.plans if all(word in sql for word in words)}
        assert len(found) == 1, f"{words}: {list(found)}"
        return next(iter(found.values()))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 200,000 jobs in every state, in several queues, lanes and sessions."""
    path = tmp_path_factory.mktemp("plans") / "jobs.db"
    store = SqliteStore(path, durability="relaxed")
    writer = store._open().writer

    def fill(db: sqlite3.Connection) -> None:
        for number in range(3):
            VERBS.open_session(db, Session(id=f"s{number}"), NOW)
        VERBS.open_session(db, Session(id="dead"), NOW)
        for queue in ("default", "mail"):
            for priority in (0, 5, 10):
                for share in ("", "a", "b"):
                    jobs = new_jobs(ROWS // 9, queue=queue, priority=priority, share=share)
                    VERBS.insert(db, jobs, NOW - 1000, {})
        for session in ("s0", "s1", "dead"):
            VERBS.claim(db, ClaimRequest(session_id=session, queues=("mail",), limit=200), NOW)
        VERBS.close_session(db, "dead", None, NOW)
        claimed = VERBS.claim(db, ClaimRequest(session_id="s2", queues=("default",), limit=1000), NOW).claimed().jobs
        VERBS.apply(db, [settle(job, Succeeded(), RetryPolicy(), SYSTEM.random) for job in claimed], NOW)
        db.execute("UPDATE holdfast_ended SET state = 'failed', expires_at = NULL WHERE rowid_is_even(id)")

    def even(job_id: str) -> bool:
        return int(job_id[-1], 16) % 8 == 0

    def run(db: sqlite3.Connection) -> None:
        db.create_function("rowid_is_even", 1, even)
        fill(db)

    writer.run(run)
    store.close()
    return path


@pytest.fixture(scope="module")
def analysed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = _copied(prepared, tmp_path_factory)
    run_sql(path, "ANALYZE")
    return path


@pytest.fixture(scope="module")
def misled(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's ANALYZE, or PRAGMA optimize, saw one row in each table, and thousands came after it."""
    path = _copied(prepared, tmp_path_factory)
    connection = raw(path)
    connection.execute("ANALYZE")
    for rowid, stat in connection.execute("SELECT rowid, stat FROM sqlite_stat1").fetchall():
        one_row = " ".join("1" if word.isdigit() else word for word in stat.split())
        connection.execute("UPDATE sqlite_stat1 SET stat = ? WHERE rowid = ?", (one_row, rowid))
    connection.close()
    return path


def _copied(path: Path, folders: pytest.TempPathFactory) -> Path:
    return Path(shutil.copy(path, folders.mktemp("plans") / "jobs.db"))


@pytest.fixture(params=["before ANALYZE", "after ANALYZE"])
def recorder(prepared: Path, analysed: Path, request: pytest.FixtureRequest) -> Iterator[Recorder]:
    yield from recording(analysed if request.param == "after ANALYZE" else prepared)


@pytest.fixture
def stale(misled: Path) -> Iterator[Recorder]:
    yield from recording(misled)


def recording(path: Path) -> Iterator[Recorder]:
    """What is written meanwhile is rolled back: the file is for all."""
    connection = raw(path)
    connection.execute("BEGIN IMMEDIATE")
    yield Recorder(connection)
    connection.close()


def require(plan: list[str], *steps: str) -> None:
    """Each step is there; nothing is sorted; neither jobs nor history are walked."""
    for step in steps:
        assert any(re.search(step, line) for line in plan), f"no {step!r} in {plan}"
    for line in plan:
        assert "TEMP B-TREE" not in line, plan
        # A walk through a small partial index is no walk through the table. What has arrived is never much.
        assert not re.search(r"SCAN (job|holdfast_(live|ended))(?! USING (COVERING )?INDEX holdfast_held)", line), plan


def job_of(db: Recorder, state: str = "in_flight") -> Job:
    held = "session_id = 's0'" if state == "in_flight" else "session_id IS NULL"
    query = f"SELECT {LIVE_AS_ENDED} FROM holdfast_live WHERE state = ? AND {held} LIMIT 1"
    return job_from_row(db._connection.execute(query, (state,)).fetchone())


def test_claim(recorder: Recorder) -> None:
    claimed = VERBS.claim(recorder, ClaimRequest(session_id="s0", queues=("mail", "empty"), limit=100), NOW).claimed()
    assert len(claimed.jobs) == 100
    VERBS.insert(recorder, [new_job(queue="later", delay=1), new_job(queue="later")], NOW, {})
    assert (
        len(VERBS.claim(recorder, ClaimRequest(session_id="s0", queues=("later",), limit=9), NOW).claimed().jobs) == 1
    )
    lanes = r"SEARCH holdfast_live USING (COVERING )?INDEX holdfast_lanes "
    require(
        recorder.of("UPDATE holdfast_live SET state = 'in_flight'"),
        LIVE_BY_ID,
        lanes + r"\(queue=\? AND priority=\? AND share=\? AND run_at<\?\)",
    )
    require(
        recorder.of("SELECT json_group_array"),
        lanes + r"\(queue=\? AND priority=\? AND share=\? AND run_at<\?\)",
    )
    require(recorder.of("SELECT run_at"), lanes + r"\(queue=\? AND priority=\? AND share=\?\)")
    hops = [plan for sql, plan in recorder.plans if "SELECT priority, share" in sql]
    assert len(hops) >= 9
    for plan in hops:
        require(plan, lanes + r"\(queue=\?")
    for _, plan in recorder.plans:
        require(plan)


def test_a_claim_reads_no_more_than_it_takes(tmp_path: Path) -> None:
    """Measured, not explained: the steps of SQLite's machine do not grow with the queue."""

    def steps(rows: int) -> int:
        path = tmp_path / f"{rows}.db"
        store = SqliteStore(path, durability="relaxed")
        writer = store._open().writer
        writer.run(lambda db: VERBS.open_session(db, Session(id="s"), NOW))
        for _ in range(rows // 1000):
            writer.run(lambda db: VERBS.insert(db, new_jobs(1000), NOW - 1000, {}))
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return 0

        writer._connection.set_progress_handler(tick, 10)
        writer.run(lambda db: VERBS.claim(db, ClaimRequest(session_id="s", queues=("default",), limit=10), NOW))
        writer._connection.set_progress_handler(None, 0)
        store.close()
        return count

    few, many = steps(1_000), steps(20_000)
    print(f"steps (tens) of a claim of ten: {few} among 1,000, {many} among 20,000")
    assert many <= few * 1.5 + 5


def test_settle(recorder: Recorder) -> None:
    move = settle(job_of(recorder), Succeeded(), RetryPolicy(), SYSTEM.random)
    assert VERBS.apply(recorder, [move], NOW) == [Applied.APPLIED]
    job = r"SEARCH job USING PRIMARY KEY \(id=\?\)"
    require(recorder.of("INSERT INTO holdfast_ended"), job)
    require(recorder.of("DELETE FROM holdfast_live"), LIVE_BY_ID)


def test_settle_what_is_not_held(recorder: Recorder) -> None:
    """One move of two is refused: the copies are taken back before each is judged."""
    held = settle(job_of(recorder), Succeeded(), RetryPolicy(), SYSTEM.random)
    other = settle(job_of(recorder, "ready"), Succeeded(), RetryPolicy(), SYSTEM.random)
    stale = replace(other, session_id=held.session_id)
    assert VERBS.apply(recorder, [held, stale], NOW) == [Applied.APPLIED, Applied.STALE]
    take_back = recorder.of("DELETE FROM holdfast_ended")
    require(take_back, ENDED_BY_ID, r"SEARCH job USING PRIMARY KEY \(id=\?\)")


def test_settle_one_by_one(recorder: Recorder) -> None:
    """A move whose guard has more to it."""
    move = settle(job_of(recorder), Released(), RetryPolicy(), SYSTEM.random, cancel_asked=True)
    assert VERBS.apply(recorder, [move], NOW) == [Applied.APPLIED]
    require(recorder.of("SELECT id, state, reason", "holdfast_live"), LIVE_BY_ID)
    require(recorder.of("INSERT INTO holdfast_ended"), LIVE_BY_ID)
    require(recorder.of("DELETE FROM holdfast_live"), LIVE_BY_ID)


@pytest.mark.parametrize("count", [1, 100, 1000])
def test_standings(recorder: Recorder, count: int) -> None:
    rows = recorder._connection.execute(
        "SELECT id FROM holdfast_live UNION ALL SELECT id FROM holdfast_ended LIMIT ?", (count,)
    ).fetchall()
    found = VERBS._settlements._standings(recorder, [*(row[0] for row in rows[:-1]), "missing"])
    assert len(found) == count - 1
    require(recorder.of("SELECT id, state, reason", "holdfast_live"), LIVE_BY_ID)
    require(recorder.of("SELECT id, state, reason", "holdfast_ended"), ENDED_BY_ID)


def test_held_and_beat(recorder: Recorder) -> None:
    assert len(VERBS.queries.held(recorder, "s0")) == 200
    assert VERBS.beat(recorder, "s0", NOW).held == 200
    for sql, plan in recorder.plans:
        require(plan, *([HELD] if "FROM holdfast_live" in sql else []))


@pytest.mark.parametrize("cursor", [None, "s1"])
def test_a_page_of_sessions_comes_without_sorting(recorder: Recorder, cursor: str | None) -> None:
    VERBS.queries.sessions(recorder, cursor, 10)
    [(_, plan)] = recorder.plans
    assert plan == ["SEARCH holdfast_sessions USING PRIMARY KEY (id>?)"]


def test_lost(recorder: Recorder) -> None:
    assert len(VERBS.queries.lost(recorder, 1000, None)) == 200
    assert len(VERBS.queries.lost(recorder, 1000, "dead")) == 200
    for _, plan in recorder.plans:
        require(plan, r"(SCAN|SEARCH) holdfast_live USING (COVERING )?INDEX holdfast_held")


def test_prune(recorder: Recorder) -> None:
    assert VERBS.prune(recorder, LATER, 100) == 100
    require(
        recorder.of("SELECT id FROM holdfast_ended"),
        r"SEARCH holdfast_ended USING (COVERING )?INDEX holdfast_expiring \(expires_at>\? AND expires_at<\?\)",
    )
    require(recorder.of("DELETE FROM holdfast_ended"), ENDED_BY_ID)
    for _, plan in recorder.plans:
        require(plan)


@pytest.mark.parametrize("cursor", [None, "ffff"])
def test_find_failed(recorder: Recorder, cursor: str | None) -> None:
    page = VERBS.queries.find(recorder, JobQuery(states=(State.FAILED,), limit=20, cursor=cursor))
    assert len(page.jobs) == 20
    [(_, plan)] = recorder.plans
    assert any("USING INDEX holdfast_dead" in line for line in plan), plan
    assert not any("TEMP B-TREE" in line for line in plan), plan


def test_newest_jobs_come_without_sorting(recorder: Recorder) -> None:
    VERBS.queries.find(recorder, JobQuery(limit=20))
    plans = [plan for _, plan in recorder.plans]
    assert plans[0] == ["SCAN holdfast_arrived", "USE TEMP B-TREE FOR ORDER BY"]  # as many as may have arrived
    for plan in plans[1:]:
        assert not any("TEMP B-TREE" in line for line in plan), plan


def test_single_jobs(recorder: Recorder) -> None:
    job = job_of(recorder, "ready")
    assert VERBS.queries.get(recorder, job.id) is not None
    VERBS.insert(recorder, [new_job()], NOW, {})
    VERBS.insert(recorder, new_jobs(3), NOW, {"default": DepthLimit(max_depth=100_000)})
    VERBS.note(recorder, job_of(recorder).lease, b"1")
    VERBS.request_cancel(recorder, [job.id], NOW)
    VERBS.forget(recorder, [job.id])
    for sql, plan in recorder.plans:
        if "count(*)" in sql:
            assert any("INDEX holdfast_lanes (queue=?)" in line for line in plan), plan
        require(plan)


ARRIVED = "SCAN holdfast_arrived"
"""A table without an index, in which there are never more than a few rows."""


def test_a_job_alone_is_looked_for_by_its_id(recorder: Recorder) -> None:
    for payload in (b"{}", b'{"a":"%s"}' % (b"x" * 9000)):
        for fresh in (True, False):
            recorder.plans.clear()
            recorder.execute(*VERBS.insert_plain(new_job(payload=payload), NOW, fresh=fresh))
            [(_, plan)] = recorder.plans
            require(plan, *([] if fresh else [LIVE_BY_ID, ENDED_BY_ID, ARRIVED]))
            assert (plan == []) is fresh


def test_reading_looks_among_the_arrivals_besides(recorder: Recorder) -> None:
    VERBS.queries.get(recorder, "missing")
    [(_, plan)] = recorder.plans
    require(plan, LIVE_BY_ID, ENDED_BY_ID, ARRIVED)


def test_the_view_of_what_waits_is_searched_by_lane(recorder: Recorder) -> None:
    """For people and their plain SQL."""
    recorder.execute("SELECT id FROM holdfast_ready WHERE queue = 'mail' AND priority = 5 AND share = 'a' LIMIT 9")
    [(_, plan)] = recorder.plans
    lanes = r"SEARCH holdfast_live USING (COVERING )?INDEX holdfast_lanes \(queue=\? AND priority=\? AND share=\?\)"
    require(plan, lanes, ARRIVED)


def test_taking_in_costs_the_same_whatever_is_there(tmp_path: Path) -> None:
    """Measured, not explained: a plan does not show what triggers do."""

    def fill(db: sqlite3.Connection) -> None:
        VERBS.insert(db, new_jobs(1000), NOW - 1000, {})
        jobs = VERBS.claim(db, ClaimRequest(session_id="s", queues=("default",), limit=500), NOW).claimed().jobs
        VERBS.apply(db, [settle(job, Succeeded(), RetryPolicy(), SYSTEM.random) for job in jobs], NOW)

    def steps(rows: int) -> tuple[int, int]:
        store = SqliteStore(tmp_path / f"{rows}.db", durability="relaxed")
        writer = store._open().writer
        writer.run(lambda db: VERBS.open_session(db, Session(id="s"), NOW))
        for _ in range(rows // 1000):
            writer.run(fill)
        nothing = count_steps(writer)
        for job in new_jobs(50):
            store.insert_blocking([job], fresh=True)
        fifty = count_steps(writer)
        store.close()
        return nothing, fifty

    def count_steps(writer: Writer) -> int:
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return 0

        writer._connection.set_progress_handler(tick, 1)
        writer.run(lambda _: None)
        writer._connection.set_progress_handler(None, 0)
        return count

    few, many = steps(2_000), steps(20_000)
    print(f"steps of taking in nothing, and fifty: {few} beside 2,000 jobs, {many} beside 20,000")
    assert few[0] == many[0] < 50
    assert 50 < many[1] <= few[1] * 1.1


def test_a_claim_is_not_misled_by_old_statistics(stale: Recorder) -> None:
    VERBS.claim(stale, ClaimRequest(session_id="s0", queues=("mail",), limit=100), NOW)
    VERBS.apply(stale, [settle(job_of(stale), Succeeded(), RetryPolicy(), SYSTEM.random)], NOW)
    for _, plan in stale.plans:
        require(plan)


@pytest.mark.parametrize(
    "verb",
    [
        lambda db: VERBS.queries.held(db, "s0"),
        lambda db: VERBS.beat(db, "s0", NOW),
        lambda db: VERBS.queries.lost(db, 100, None),
        lambda db: VERBS.prune(db, LATER, 100),
        lambda db: VERBS.insert(db, new_jobs(2), NOW, {"default": DepthLimit(max_depth=100_000)}),
    ],
    ids=["held", "beat", "lost", "prune", "depth"],
)
def test_no_verb_is_misled_by_old_statistics(stale: Recorder, verb: Callable[[Recorder], object]) -> None:
    verb(stale)
    for sql, plan in stale.plans:
        require(plan, *(["INDEX holdfast_lanes"] if "count(*)" in sql else []))


def test_the_guard_of_these_tests_works(recorder: Recorder) -> None:
    """Without its index a claim is found out, or refused by SQLite where the statement names the index."""
    recorder._connection.execute("DROP INDEX holdfast_lanes")

    def claim() -> None:
        VERBS.claim(recorder, ClaimRequest(session_id="s0", queues=("default",), limit=10), NOW)
        require(recorder.of("UPDATE holdfast_live SET state = 'in_flight'"))

    with pytest.raises((AssertionError, sqlite3.OperationalError)):
        claim()
