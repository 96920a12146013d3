"""The plans of the hot statements: an index for each, before and after ANALYZE, and nothing that grows with the tables.

The statements are not copied here: the server tells what it does inside the functions while the verbs run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from holdfast.failures import Failure
from holdfast.job import Job, Key, State
from holdfast.lifecycle import Failed, Move, Succeeded, replay, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, DepthLimit, InsertStatus, JobQuery
from holdfast.stores.postgres.lookback import LookBack
from holdfast.stores.rows import job_from_row
from tests.postgres.helpers import HOUR, Database, new_job, new_jobs
from tests.postgres.plans import KEPT, Plan, Recorder, fill

SESSION = "050"
CLOSED = "005"
HELD = 500
"""What each session holds."""


@pytest.fixture(scope="module", params=["before ANALYZE", "after ANALYZE"])
def filled(namespace_of_module: Database, request: pytest.FixtureRequest) -> Database:
    if request.param == "before ANALYZE":
        fill(namespace_of_module)
    else:
        namespace_of_module.sql("ANALYZE")
    return namespace_of_module


@pytest.fixture
def recorder(filled: Database) -> Iterator[Recorder]:
    recorder = Recorder(filled)
    yield recorder
    recorder.close()


def request(limit: int = 100) -> ClaimRequest:
    return ClaimRequest(session_id=SESSION, queues=("default", "mail"), limit=limit)


def require_ordered(recorder: Recorder, plan: Plan, rows: int) -> None:
    """A claim reads the rows that it takes, in the order of the index of lanes, and no others."""
    kinds = {node["Node Type"] for node in plan.nodes}
    assert not kinds & {"Sort", "Incremental Sort", "Seq Scan", "Bitmap Heap Scan", "Hash Join", "Merge Join"}, plan
    scans = [node for node in plan.scans(f"{recorder.namespace}_waiting") if node["Node Type"] != "ModifyTable"]
    assert [node["Node Type"] for node in scans] == ["Index Scan", "Tid Scan"], plan
    assert scans[0]["Index Name"] == f"{recorder.namespace}_lanes", plan
    assert [node.rows_read for node in scans] == [rows, rows], plan


def test_claim(recorder: Recorder) -> None:
    look = LookBack(SYSTEM.clock)
    for _ in range(3):
        assert len(recorder.run(recorder.verbs.claim(request(), look)).jobs) == 100
        require_ordered(recorder, recorder.of("picked AS MATERIALIZED"), 100)
        recorder.require_frugal(
            6 * 100
        )  # there are six lanes, and each is counted as far as the claim could take from it
        recorder.plans.clear()


def test_claim_of_one_lane(recorder: Recorder) -> None:
    recorder.sql(
        "UPDATE {ns}_waiting SET share = '', priority = 5 WHERE queue = 'mail' AND (share, priority) <> ('', 5)"
    )
    look = LookBack(SYSTEM.clock)
    one_lane = ClaimRequest(session_id=SESSION, queues=("mail",), limit=100)
    assert len(recorder.run(recorder.verbs.claim(one_lane, look)).jobs) == 100
    for _ in range(3):
        recorder.plans.clear()
        assert len(recorder.run(recorder.verbs.claim(one_lane, look)).jobs) == 100
        plan = recorder.of("WITH gone AS", "{ns}_in_flight")
        kinds = {node["Node Type"] for node in plan.nodes}
        assert not kinds & {"Seq Scan", "Bitmap Heap Scan", "Hash Join", "Merge Join", "Incremental Sort"}, plan
        scans = [node for node in plan.scans(f"{recorder.namespace}_waiting") if node["Node Type"] != "ModifyTable"]
        assert [node["Node Type"] for node in scans] == ["Index Scan", "Tid Scan"], plan
        assert scans[0]["Index Name"] == f"{recorder.namespace}_lanes", plan
        assert [node.rows_read for node in scans] == [100, 100], plan
        recorder.require_frugal(100)


def test_a_claim_that_finds_less_than_it_asks_for(recorder: Recorder) -> None:
    recorder.run(recorder.verbs.insert([*new_jobs(3, queue="few"), new_job(queue="few", delay=HOUR)], None, []))
    few = ClaimRequest(session_id=SESSION, queues=("few", "empty"), limit=100)
    claimed = recorder.run(recorder.verbs.claim(few, LookBack(SYSTEM.clock)))
    assert (len(claimed.jobs), claimed.due_in and claimed.due_in > HOUR / 2) == (3, True)
    recorder.require_frugal(10)


@pytest.mark.parametrize("sabotage", ["without its index", "in another order"])
def test_these_tests_notice_a_claim(recorder: Recorder, sabotage: str) -> None:
    """Negative controls."""
    if sabotage == "without its index":
        recorder.sql("DROP INDEX {ns}_lanes")
    else:
        find = "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = '{ns}_claim'"
        [(text,)] = recorder.sql(find)
        changed = text.replace("ORDER BY w.run_at, w.id LIMIT", "ORDER BY w.created_at, w.id LIMIT")
        assert changed != text
        recorder.sql(changed)
    recorder.plans.clear()
    recorder.run(recorder.verbs.claim(request(), LookBack(SYSTEM.clock)))
    with pytest.raises(AssertionError):
        require_ordered(recorder, recorder.of("picked AS MATERIALIZED"), 100)
    with pytest.raises(AssertionError):
        recorder.require_frugal(1_000)


def held(recorder: Recorder, limit: int) -> Sequence[Job]:
    """Some of what the session holds."""
    rows = recorder.sql("SELECT id::text, j.* FROM {ns}_held_jobs j WHERE session_id = %s LIMIT %s", SESSION, limit)
    recorder.plans.clear()
    return [job_from_row((row[0], *row[2:])) for row in rows]


def success(job: Job) -> Move:
    return settle(job, Succeeded(), RetryPolicy(), SYSTEM.random)


def retry(job: Job) -> Move:
    return settle(job, Failed(Failure(0, 1, "Error", "")), RetryPolicy(), SYSTEM.random)


def result(job: Job) -> Move:
    return settle(job, Succeeded(job.id.encode()), RetryPolicy(), SYSTEM.random)


@pytest.mark.parametrize("end", [success, result, retry])
def test_settle(recorder: Recorder, end: Callable[[Job], Move]) -> None:
    jobs = held(recorder, 100)
    moves = [end(job) for job in jobs]
    assert set(recorder.run(recorder.verbs.apply(moves, []))) == {"applied"}
    plan = recorder.of("DELETE FROM {ns}_in_flight")
    scans = [node for node in plan.scans(f"{recorder.namespace}_in_flight") if node["Node Type"] != "ModifyTable"]
    assert {node.get("Index Name") for node in scans} - {None} == {f"{recorder.namespace}_in_flight_pkey"}, plan
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Tid Scan"}, plan
    # The results are found by a hash table: each with each would be 10,000 comparisons.
    assert all(node["Actual Rows"] * node["Actual Loops"] <= 100 for node in plan.nodes), plan
    recorder.require_frugal(100)
    recorder.plans.clear()
    assert set(recorder.run(recorder.verbs.apply(moves, []))) == {"already"}
    recorder.require_frugal(100)


def test_these_tests_notice_a_settlement_without_its_index(recorder: Recorder) -> None:
    jobs = held(recorder, 10)
    recorder.sql("ALTER TABLE {ns}_in_flight DROP CONSTRAINT {ns}_in_flight_pkey")
    recorder.run(recorder.verbs.apply([success(job) for job in jobs], []))
    with pytest.raises(AssertionError):
        recorder.require_frugal(1_000)


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("repeated", [False, True], ids=["new", "repeated"])
def test_insert(recorder: Recorder, checked: bool, repeated: bool) -> None:
    """Also when some are there already: in flight, ended just now, or a year ago with an id of that time."""
    jobs = new_jobs(100)
    limits = {"default": DepthLimit(max_depth=1_000_000, warn_depth=10)} if checked else None
    if checked:
        jobs = [*jobs[:-10], *(new_job(key=Key(f"new{number}", "h", HOUR)) for number in range(10))]
    if repeated:
        old = held(recorder, 10)
        recorder.run(recorder.verbs.apply([success(job) for job in old[5:]], []))
        jobs[:10] = [new_job(id=job.id) for job in old]
        recorder.plans.clear()
    answers = recorder.run(recorder.verbs.insert(jobs, limits, []))
    assert [answer.status for answer in answers].count(InsertStatus.EXISTING) == 10 * repeated
    # The depth is counted up to the limit, from the index alone.
    counting = [plan for plan in recorder.plans if "SELECT count(*) FROM (" in plan.text]
    for plan in counting:
        assert plan.scans(f"{recorder.namespace}_waiting")[0]["Node Type"] == "Index Only Scan", plan
        recorder.plans.remove(plan)
    assert len(counting) == checked
    recorder.require_frugal(200)


@pytest.mark.parametrize("near", [False, True], ids=["everywhere", "near"])
def test_insert_fresh(recorder: Recorder, near: bool) -> None:
    if near:
        recorder.insert_fresh(new_job())
        assert recorder.verbs._since > 0
    looked_at = _slots_of_an_insert(recorder)
    if near and looked_at > 2:  # ten minutes ended between the two: then everything is looked at, once
        looked_at = _slots_of_an_insert(recorder)
    assert looked_at == (2 if near else 8 + 2)
    recorder.require_frugal(2)


def _slots_of_an_insert(recorder: Recorder) -> int:
    recorder.plans.clear()
    answer = recorder.insert_fresh(new_job(), ["default"])
    assert answer.status is InsertStatus.CREATED
    return len(
        {word for plan in recorder.plans for word in plan.text.split() if f"{recorder.namespace}_history_" in word}
    )


def test_plain_sql(recorder: Recorder) -> None:
    recorder.sql("INSERT INTO {ns}_ready (task, payload) VALUES ('t', '{}')")
    recorder.require_frugal(2)
    recorder.plans.clear()
    old = new_job(id="01900000-0000-7000-8000-000000000000")  # made long ago: every slot is looked at
    insert = "INSERT INTO {ns}_ready (id, task, payload) VALUES (%s, 't', '{}')"
    recorder.sql(insert, old.id)
    assert any("history_17" in plan.text for plan in recorder.plans)
    recorder.require_frugal(2)


def test_beat_and_held(recorder: Recorder) -> None:
    assert recorder.run(recorder.verbs.beat(SESSION, 0))[0].held == HELD
    recorder.require_frugal(HELD)
    recorder.plans.clear()
    _, now, _ = recorder.run(recorder.verbs.beat(SESSION, 0))
    recorder.plans.clear()
    assert recorder.run(recorder.verbs.beat(SESSION, now))[0].held == 0
    recorder.require_frugal(1)
    recorder.plans.clear()
    assert len(recorder.run(recorder.verbs.held(SESSION))) == HELD
    recorder.require_frugal(HELD)


@pytest.mark.parametrize("cursor", [None, "1", "ed"])
def test_a_page_of_sessions_reads_no_others(recorder: Recorder, cursor: str | None) -> None:
    recorder.sql(
        "INSERT INTO {ns}_sessions (id, opened_at, beat_at, host, pid, queues) "
        "SELECT md5(n::text), 0, 0, 'host', n, 'default' FROM generate_series(1, 9000) n"
    )
    recorder.sql("ANALYZE {ns}_sessions")
    recorder.plans.clear()
    page = recorder.run(recorder.verbs.sessions(cursor, 100))
    assert (len(page.sessions), page.next) == (100, page.sessions[-1].id)
    [plan] = [plan for plan in recorder.plans if "ORDER BY id" in plan.text]
    assert "Sort" not in {node["Node Type"] for node in plan.nodes}, plan
    assert [node.rows_read for node in plan.scans(f"{recorder.namespace}_sessions")] == [101], plan


def test_lost(recorder: Recorder) -> None:
    assert len(recorder.run(recorder.verbs.lost(100, CLOSED))) == 100
    recorder.require_frugal(HELD)
    recorder.plans.clear()
    jobs = recorder.run(recorder.verbs.lost(1000, None))
    assert len(jobs) == 1000
    recorder.require_frugal(1000)
    recorder.plans.clear()
    # With nothing to rescue, what the open sessions hold is not read.
    recorder.sql("UPDATE {ns}_sessions SET open = true")
    recorder.plans.clear()
    assert recorder.run(recorder.verbs.lost(1000, None)) == []
    recorder.require_frugal(1)


def test_prune(recorder: Recorder) -> None:
    for _ in range(3):
        assert recorder.run(recorder.verbs.prune(100)) == 100
    # The index of each slot is asked for its first row.
    recorder.require_frugal(150)
    recorder.plans.clear()
    recorder.sql("DELETE FROM {ns}_kept")
    recorder.plans.clear()
    assert recorder.run(recorder.verbs.prune(1000)) == 1000
    plan = recorder.of("WITH over AS MATERIALIZED")
    assert {"Merge Append"} <= {node["Node Type"] for node in plan.nodes}, plan
    assert not any("Sort" in node["Node Type"] and node["Actual Rows"] > 1000 for node in plan.nodes), plan
    recorder.require_frugal(1_000)


def test_slots_that_may_be_emptied_are_found_in_their_indexes(recorder: Recorder) -> None:
    recorder.sql("UPDATE {ns}_pruned SET expires_at = {ns}_now() - 1000000")
    recorder.plans.clear()
    slots = recorder.sql("SELECT {ns}_pruned_slots()")
    assert slots == []
    recorder.require_frugal(1)


def test_single_jobs(recorder: Recorder) -> None:
    verbs = recorder.verbs
    one, two, *_ = held(recorder, 3)
    assert recorder.run(verbs.reading.get(one.id)).id == one.id
    assert recorder.run(verbs.reading.get(new_job().id)) is None
    recorder.run(verbs.note(two.lease, b"1"))
    dead = recorder.run(verbs.reading.find(JobQuery(states=(State.FAILED,), limit=1))).jobs[0]
    recorder.plans.clear()
    assert recorder.run(verbs.apply([replay(dead)], [])) == ["applied"]
    assert recorder.run(verbs.request_cancel([one.id, dead.id, new_job().id])) == ["asked", "cancelled", "gone"]
    assert recorder.run(verbs.forget([dead.id, two.id])) == 1
    recorder.require_frugal(5)


def test_dead_letters_are_listed_from_their_index(recorder: Recorder) -> None:
    page = recorder.run(recorder.verbs.reading.find(JobQuery(states=(State.FAILED,), queue="default", limit=20)))
    assert len(page.jobs) == 20
    recorder.run(recorder.verbs.reading.find(JobQuery(states=(State.FAILED,), limit=20, cursor=page.next)))
    recorder.require_frugal(KEPT // 2)
    assert not any("past_jobs" in plan.text for plan in recorder.plans)


def test_the_newest_jobs_are_listed_without_reading_the_others(recorder: Recorder) -> None:
    page = recorder.run(recorder.verbs.reading.find(JobQuery(limit=20)))
    recorder.run(recorder.verbs.reading.find(JobQuery(limit=20, cursor=page.next)))
    recorder.require_frugal(100)
