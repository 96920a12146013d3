"""`holdfast bench`: what it says, and that it leaves everything as it was."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError
from holdfast.job import NewJob, State
from holdfast.lifecycle import Applied, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, JobQuery, Session
from holdfast.stores import open_store
from tests.cli.helpers import SESSION, Shop, run
from tests.servers import RedisServer

FIGURES = {"enqueue_one", "enqueue_bulk", "drain", "latency_p50_ms", "latency_p99_ms"}


def new(queue: str, **options: Any) -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task="holdfast.bench", payload=b'{"n":1,"s":"x"}', queue=queue, **options)


def fill(url: str) -> None:
    """Jobs of somebody else, in every state but failed; also under the name of the benchmark's task."""

    async def filled() -> None:
        async with open_store(url, SYSTEM) as store:
            await store.insert([new("mail") for _ in range(5)] + [new("reports", delay=3_600_000_000)])
            await store.open_session(Session(id=SESSION, queues=("mail",)))
            claimed = await store.claim(ClaimRequest(session_id=SESSION, queues=("mail",), limit=2))
            done = settle(claimed.jobs[0], Succeeded(b"null"), RetryPolicy(), SYSTEM.random)
            assert await store.apply([done]) == [Applied.APPLIED]
            await store.request_cancel([(await store.find(JobQuery(states=(State.READY,)))).jobs[-1].id])

    asyncio.run(filled())


def everything(url: str) -> list[tuple[str, str, State, int]]:
    async def found() -> list[tuple[str, str, State, int]]:
        async with open_store(url, SYSTEM) as store:
            page = await store.find(JobQuery(limit=1_000))
            assert page.next is None
            return sorted((job.id, job.queue, job.state, job.version) for job in page.jobs)

    return asyncio.run(found())


def test_it_measures_and_leaves_every_other_job_alone(shop: Shop) -> None:
    fill(shop.url)
    before = everything(shop.url)
    assert {state for _, _, state, _ in before} == set(State) - {State.FAILED}
    result = run("bench", shop.url, "--jobs", "300", "--json")
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert measured["jobs"] == 300
    assert all(measured[name] > 0 for name in FIGURES)
    assert everything(shop.url) == before


def test_what_did_not_run_is_removed_too(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(shop.url)
    before = everything(shop.url)

    async def broken(*_: object) -> float:
        raise HoldfastError("it went wrong")

    monkeypatch.setattr("holdfast.cli.bench._Bench.drain", broken)
    monkeypatch.setattr("holdfast.cli.bench._CONCURRENCY", 1)
    result = run("bench", shop.url, "--jobs", "2500")
    assert result.exit_code == 1
    assert "it went wrong" in result.stderr
    assert everything(shop.url) == before


def test_for_people_in_a_pipe(shop: Shop) -> None:
    result = run("bench", shop.url, "--jobs", "100")
    assert result.exit_code == 0, result.output
    first, *rest = result.stdout.splitlines()
    assert first == f"{shop.url}, 100 jobs; client and worker in one process"
    assert [text[:20].rstrip() for text in rest] == [
        "enqueue, one by one",
        "enqueue, in bulk",
        "drain",
        "latency, p50",
        "latency, p99",
    ]
    assert "█" not in result.stdout


def test_on_redis(redis_server: RedisServer) -> None:
    url = f"{redis_server.url}?namespace=cli-bench"
    fill(url)
    before = everything(url)
    assert len(before) == 6
    result = run("bench", url, "--jobs", "300", "--json")
    assert result.exit_code == 0, result.output
    assert everything(url) == before


def test_a_store_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = run("bench", f"sqlite:///{tmp_path / 'none.db'}")
    assert missing.exit_code == 1
    assert "there is no database file" in missing.stderr
    assert not (tmp_path / "none.db").exists()
    assert run("bench", "redis://127.0.0.1:1/0").exit_code == 1


def test_too_few_jobs_are_refused(shop: Shop) -> None:
    assert run("bench", shop.url, "--jobs", "5").exit_code == 2
