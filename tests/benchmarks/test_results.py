"""What is made of a run's lines: medians, verdicts, failures, the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.report import (
    BEGIN,
    BULK,
    END,
    beside,
    engine_plot,
    engine_table,
    failures,
    page,
    print_report,
    readme_section,
    too_short,
    with_section,
    write_docs,
)
from benchmarks.results import Results
from benchmarks.targets import A_THOUSAND, TARGETS, Judged, Target, judge, judged


def kind_of(contestant: str) -> str:
    return "bare" if contestant.startswith("bare") else "holdfast" if contestant == "holdfast" else "peer"


def line(contestant: str, figure: str, *values: float, engine: str = "redis", **more: Any) -> list[str]:
    kind = kind_of(contestant)
    return [
        json.dumps({"engine": engine, "contestant": contestant, "kind": kind, "figure": figure, "value": value, **more})
        for value in values
    ]


def info(contestant: str, *, engine: str = "redis", language: str = "python", **more: Any) -> list[str]:
    kind = kind_of(contestant)
    said = {"lib": contestant, "language": language, "threads": False, **more}
    return [json.dumps({"engine": engine, "contestant": contestant, "kind": kind, "figure": "info", "info": said})]


def failed(contestant: str, figure: str, error: str, engine: str = "redis") -> list[str]:
    record = {"engine": engine, "contestant": contestant, "kind": "peer", "figure": figure, "error": error}
    return [json.dumps(record)]


def machine(scale: float = 1.0, engine: str = "redis", at: str = "2026-01-02 10:00 UTC") -> list[str]:
    said = {"cores": 2, "python": "3.11.7", "at": at, "runs": 3, "scale": scale, "processor": "a fast one"}
    return [json.dumps({"engine": engine, "figure": "machine", "info": said})]


def results(*parts: list[str]) -> Results:
    return Results.of([text for part in parts for text in part])


def verdict(seen: Results, engine: str, figure: str, words: str) -> Judged:
    [target] = [one for one in TARGETS if (one.engine, one.figure, one.words) == (engine, figure, words)]
    return judge(target, seen)


def test_the_median_counts() -> None:
    seen = results(info("holdfast"), line("holdfast", "drain", 10, 1000, 30))
    ours = seen.ours("redis")
    assert ours is not None
    assert ours.value("drain") == 30
    assert ours.value("drain2") is None


@pytest.mark.parametrize(("ours", "expected"), [(300.0, "met"), (299.0, "missed")])
def test_more_is_better_for_a_rate(ours: float, expected: str) -> None:
    seen = results(info("bullmq", language="node"), line("bullmq", "drain", 100), line("holdfast", "drain", ours))
    assert verdict(seen, "redis", "drain", "BullMQ").verdict == expected


@pytest.mark.parametrize(("ours", "expected"), [(1.1, "met"), (1.2, "missed")])
def test_less_is_better_for_a_latency(ours: float, expected: str) -> None:
    seen = results(
        info("huey"), info("rq"), line("huey", "latency_p50", 1.0), line("rq", "latency_p50", 9.0),
        line("holdfast", "latency_p50", ours),
    )  # fmt: skip
    judgement = verdict(seen, "redis", "latency_p50", "the best peer")
    assert (judgement.verdict, judgement.rival) == (expected, "huey")


def test_the_best_peer_is_the_best_of_those_that_count_and_were_measured() -> None:
    seen = results(
        info("bullmq", language="node"), line("bullmq", "drain", 9_000),
        info("taskiq"), line("taskiq", "drain", 100),
        info("huey"), line("huey", "drain", 200), failed("huey", "drain", "a worker ended"),
        info("saq"), line("saq", "drain", 150),
        line("holdfast", "drain", 3_000),
    )  # fmt: skip
    judgement = verdict(seen, "redis", "drain", "the best Python peer")
    assert (judgement.theirs, judgement.rival, judgement.ratio) == (150, "saq", 20)


def test_what_failed_in_a_later_round_is_no_figure() -> None:
    seen = results(
        info("rq"), line("rq", "drain", 100, 110), failed("rq", "drain", "trace\n3 of 9 jobs stayed pending")
    )
    assert seen.peers("redis")[0].value("drain") is None
    assert list(failures(seen)) == ["Redis: rq: drain: 3 of 9 jobs stayed pending"]


def test_a_peer_that_cannot_be_installed_is_named() -> None:
    assert list(failures(results(failed("oban", "info", "needs Python 3.12", engine="postgres")))) == [
        "PostgreSQL: oban: did not start: needs Python 3.12"
    ]


def test_without_anything_to_compare_with_there_is_no_verdict() -> None:
    seen = results(info("holdfast"), line("holdfast", "drain", 100))
    assert verdict(seen, "redis", "drain", "BullMQ").verdict == "not measured"
    assert (
        verdict(results(info("huey"), line("huey", "drain", 1)), "redis", "drain", "BullMQ").verdict == "not measured"
    )


def test_an_enqueue_is_compared_with_whichever_of_their_calls_is_faster() -> None:
    seen = results(
        info("taskiq"), line("taskiq", "enqueue_one", 50), line("taskiq", "enqueue_one_async", 80),
        info("huey"), line("huey", "enqueue_one", 500),
        line("holdfast", "enqueue_one", 70),
    )  # fmt: skip
    judgement = verdict(seen, "redis", "enqueue_one", "every Python peer but Huey")
    assert (judgement.verdict, judgement.theirs) == ("missed", 80)


def test_a_group_that_failed_in_a_later_round_has_no_figures() -> None:
    seen = results(
        info("rq"), line("rq", "latency_p50", 1.0, group="latency"), line("rq", "drain", 5, group="drain"),
        failed("rq", "latency", "a job never ran"),
    )  # fmt: skip
    assert (seen.peers("redis")[0].value("latency_p50"), seen.peers("redis")[0].value("drain")) == (None, 5)


def test_redis_drains_beside_redis_py_and_enqueues_beside_both_drivers() -> None:
    seen = results(
        info("bare", lib="redis-py"), line("bare", "drain", 100), line("bare", "enqueue_one", 10),
        info("bare-hiredis", lib="hiredis"), line("bare-hiredis", "drain", 400),
        line("bare-hiredis", "enqueue_one", 20),
        line("holdfast", "drain", 60), line("holdfast", "enqueue_one", 18),
    )  # fmt: skip
    drain = verdict(seen, "redis", "drain", "the bare loop")
    assert (drain.verdict, drain.rival) == ("met", "redis-py")
    call = verdict(seen, "redis", "enqueue_one", "a bare script call by hiredis on a bare socket")
    assert (call.ratio, call.rival) == (0.9, "hiredis")
    assert verdict(seen, "redis", "enqueue_one", "a bare script call by redis-py").rival == "redis-py"


def test_postgres_is_judged_by_the_faster_driver() -> None:
    seen = results(
        info("bare", engine="postgres", lib="psycopg"), line("bare", "drain", 100, engine="postgres"),
        info("bare-asyncpg", engine="postgres", lib="asyncpg"), line("bare-asyncpg", "drain", 110, engine="postgres"),
        line("holdfast", "drain", 54, engine="postgres"),
    )  # fmt: skip
    judgement = verdict(seen, "postgres", "drain", "the bare loop")
    assert (judgement.verdict, judgement.rival) == ("missed", "asyncpg")


def test_a_peer_that_works_by_the_batch_counts_and_is_marked() -> None:
    """The best peer is the best of all; beside it stands the best of those with our contract, which is no target."""
    seen = results(
        machine(engine="postgres"),
        info("pg-boss", engine="postgres", language="node", batch="one handler call per batch of 9"),
        line("pg-boss", "drain", 100, engine="postgres"),
        info("pgqueuer", engine="postgres"), line("pgqueuer", "drain", 40, engine="postgres"),
        line("holdfast", "drain", 200, engine="postgres"),
    )  # fmt: skip
    judgement = verdict(seen, "postgres", "drain", A_THOUSAND)
    assert (judgement.verdict, judgement.rival) == ("missed", "pg-boss*")
    told = (
        "PostgreSQL: drain: the best peer that runs and settles each job by itself: 40 (pgqueuer); ours 200, ratio 5.00"
    )
    assert told in list(beside(seen))
    assert told in readme_section(seen)
    assert "pg-boss*: one handler call per batch of 9" in page(seen)
    assert len(judged(seen)) == len([target for target in TARGETS if target.engine == "postgres"])


def test_sizes_that_were_searched_for_are_told_and_do_not_judge() -> None:
    """A peer counts in the sizes that the targets were set by; what a search made of it stands beside."""
    seen = results(
        machine(engine="postgres"),
        info("pg-boss", engine="postgres", batch="per batch of 9"),
        line("pg-boss", "drain", 70, engine="postgres"),
        info("pg-boss-99", engine="postgres", batch="per batch of 99", searched="the fastest that was found"),
        line("pg-boss-99", "drain", 100, engine="postgres"),
        line("holdfast", "drain", 200, engine="postgres"),
    )
    judgement = verdict(seen, "postgres", "drain", A_THOUSAND)
    assert (judgement.verdict, judgement.rival) == ("met", "pg-boss*")
    told = (
        "the best peer, pg-boss also in the fastest sizes that a search found: 100 (pg-boss-99*); ours 200, ratio 2.00"
    )
    assert f"PostgreSQL: drain: {told}" in list(beside(seen))
    assert told in readme_section(seen)


def test_how_many_jobs_are_handed_over_is_told_beside_their_rate() -> None:
    seen = results(info("bullmq"), line("bullmq", "enqueue_bulk", 1_000), line("holdfast", "enqueue_bulk", 5_000))
    assert list(beside(seen)) == [BULK]
    assert BULK in readme_section(seen)


def test_rabbitmq_stands_beside_our_drains() -> None:
    seen = results(
        info("celery", engine="rabbitmq"), line("celery", "drain", 1_000, engine="rabbitmq"),
        line("holdfast", "drain", 50_000), line("holdfast", "drain", 20_000, engine="postgres"),
    )  # fmt: skip
    assert list(beside(seen)) == [
        "RabbitMQ: drain: 1,000 (celery); ours 50,000 on Redis (50.0×), 20,000 on PostgreSQL (20.0×)"
    ]


def test_a_peer_that_starts_in_a_later_run_has_not_failed() -> None:
    assert list(failures(results(failed("rq", "info", "no network"), info("rq"), line("rq", "drain", 1)))) == []


def test_one_engine_at_a_smaller_scale_makes_all_of_it_a_try() -> None:
    assert results(machine(), machine(scale=0.1, engine="sqlite")).is_try


def test_a_limit_of_its_own() -> None:
    seen = results(line("holdfast", "rss_process", 59), line("holdfast", "idle", 61))
    found = {one.target.figure: one.verdict for one in judged(seen) if one.target.beside == "nothing"}
    assert found == {"rss_process": "met", "idle": "missed"}


def test_only_engines_that_took_part_are_judged() -> None:
    assert {one.target.engine for one in judged(results(line("holdfast", "drain", 1, engine="memory")))} == {"memory"}


def test_every_target_has_words() -> None:
    for target in TARGETS:
        assert target.wanted.startswith(("≥", "≤"))
    assert Target("redis", "latency_p50", 1.1).wanted == "≤ 1.1 × the best peer"
    assert Target("postgres", "growth", 0.8, "nothing").wanted == "≥ 0.8"


def test_a_round_that_was_too_short_is_told() -> None:
    seen = results(
        info("bullmq"),
        line("bullmq", "enqueue_bulk", 4_700, seconds=0.15, wanted=2.5),
        line("bullmq", "drain", 9_000, seconds=2.6, wanted=3.0),
    )
    assert list(too_short(seen)) == ["Redis: bullmq: enqueue_bulk: a round lasted 0.1 s only"]


def test_a_try_at_a_smaller_scale_is_never_written_as_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = results(machine(scale=0.1), info("holdfast"), line("holdfast", "drain", 100))
    with pytest.raises(SystemExit, match=r"a try at scale 0\.1"):
        write_docs(seen, tmp_path)
    assert list(tmp_path.iterdir()) == []
    print_report(seen)
    assert "a try at a smaller scale" in capsys.readouterr().out


def test_the_documentation_is_written(tmp_path: Path) -> None:
    seen = results(
        machine(),
        info("holdfast", lib="Holdfast"), line("holdfast", "drain", 40_000),
        info("bullmq", language="node", settings="a | b"), line("bullmq", "drain", 20_000),
        failed("oban", "info", "needs Python 3.12"),
    )  # fmt: skip
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    write_docs(seen, tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("\nafter\n") and "stale" not in readme  # noqa: PT018
    assert "| 40,000 | 20,000 (bullmq) | 2.00 | – | ≥ 3 × BullMQ: **missed**<br>" in readme
    text = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "| Redis | drain | 40,000 | 20,000 (bullmq) | 2.00 | ≥ 3 × BullMQ | missed |" in text
    assert "a fast one" in text
    assert "| drain, one worker process, jobs/s | 40,000 | 20,000 |" in text
    assert "a / b" in text
    assert "did not start: needs Python 3.12" in text
    assert (tmp_path / "docs" / "benchmarks" / "redis.svg").exists()
    write_docs(seen, tmp_path)
    assert (tmp_path / "README.md").read_text() == readme


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        with_section("nothing", readme_section(results(machine())))


def test_the_plot_is_a_picture_with_bars_in_proportion() -> None:
    seen = results(
        info("holdfast", lib="Hold<fast>"), line("holdfast", "drain", 400), info("bullmq"), line("bullmq", "drain", 100)
    )
    root = ElementTree.fromstring(engine_plot("redis", seen))
    long, short = [float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert long == pytest.approx(4 * short)
    assert "Hold<fast>" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_ours_comes_first_and_the_fastest_peer_next() -> None:
    seen = results(
        info("rq"), line("rq", "drain", 10), info("huey"), line("huey", "drain", 20), info("bare"),
        line("bare", "drain", 5), info("holdfast"), line("holdfast", "drain", 1),
    )  # fmt: skip
    assert engine_table("redis", seen).splitlines()[0] == "|  | holdfast | bare | huey | rq |"
    assert page(seen).startswith("# Benchmarks\n")
