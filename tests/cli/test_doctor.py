"""`holdfast doctor`: every verdict, for a store that deserves it. And that it changes nothing."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from typer.testing import Result

from holdfast.cli.workers import SILENT_AFTER
from holdfast.ports import SYSTEM
from holdfast.store import Session
from holdfast.stores.sqlite import file
from tests.cli.helpers import SESSION, Shop, records, run


def verdicts(result: Result) -> dict[str, str]:
    """The verdict on each thing that was found."""
    return {line[9:].split("  ")[0]: line.split()[0] for line in table(result)}


def table(result: Result) -> list[str]:
    """The lines of the table, without its header and what follows it."""
    return [line for line in result.stdout.splitlines()[1:] if line[7:9] == "  "]


def advice(result: Result) -> list[str]:
    """The lines after the table."""
    return result.stdout.splitlines()[1 + len(table(result)) :]


def change(path: Path, sql: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(sql, values)
    connection.close()


def test_a_store_as_it_should_be(shop: Shop) -> None:
    result = run("doctor", shop.url)
    assert result.exit_code == 0
    assert verdicts(result) == {
        "survives": "ok",
        "journal mode": "ok",
        "synchronous": "ok",
        "file": "ok",
        "permissions": "ok",
        "schema": "ok",
        "oldest ready job": "ok",
        "workers": "ok",
    }
    assert advice(result) == []
    assert "a power cut, if the disk honours flushes" in result.stdout


def test_the_store_may_come_from_the_environment(shop: Shop) -> None:
    assert run("doctor", store=shop.url).exit_code == 0


def test_relaxed_durability_is_weak_and_the_advice_says_what_to_do(shop: Shop) -> None:
    result = run("doctor", f"{shop.url}?durability=relaxed")
    assert result.exit_code == 0
    assert (verdicts(result)["survives"], verdicts(result)["synchronous"]) == ("weak", "weak")
    assert "not a power cut" in result.stdout
    [line] = advice(result)
    assert line.startswith("weak: synchronous: leave durability=relaxed out of the store URL")


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_a_file_that_others_can_read_is_weak(shop: Shop, suffix: str) -> None:
    path = shop.path.with_name(shop.path.name + suffix)
    holding = sqlite3.connect(shop.path)  # while somebody has it open, the log stays
    holding.execute("SELECT * FROM holdfast_sessions").fetchall()
    os.chmod(path, 0o640)
    result = run("doctor", shop.url)
    holding.close()
    assert result.exit_code == 0
    assert verdicts(result)["permissions"] == "weak"
    [line] = advice(result)
    assert line.endswith(f"chmod 600 {path.name}")


def test_a_file_that_is_not_there_is_bad_and_is_not_made(tmp_path: Path) -> None:
    result = run("doctor", f"sqlite:///{tmp_path / 'typo.db'}")
    assert result.exit_code == 1
    assert verdicts(result) == {"store": "bad"}
    assert "there is no file" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_schema_that_is_behind_is_bad_and_is_left_as_it_is(shop: Shop) -> None:
    change(shop.path, "DELETE FROM holdfast_schema")
    before = shop.path.read_bytes()
    result = run("doctor", shop.url)
    assert result.exit_code == 1
    assert "SchemaOutdated" in result.stdout
    assert shop.path.read_bytes() == before


def test_a_schema_of_a_newer_major_version_is_bad(shop: Shop) -> None:
    change(shop.path, "INSERT INTO holdfast_schema VALUES (9001, 'future')")
    result = run("doctor", shop.url)
    assert result.exit_code == 1
    assert "upgrade this process" in result.stdout


def test_a_network_file_system_is_bad(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    kind = file.file_system_of(shop.path.resolve(), mounts)
    monkeypatch.setattr(file, "NETWORK_FILE_SYSTEMS", frozenset({kind}))
    result = run("doctor", shop.url)
    assert result.exit_code == 1
    assert "UnsafeStore" in result.stdout


def test_a_file_that_is_no_database_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_text("hello " * 1000)
    result = run("doctor", f"sqlite:///{path}")
    assert result.exit_code == 1
    assert "is no database" in result.stdout


def test_damage_is_found_by_looking_deeper(shop: Shop) -> None:
    shop.add(300, task="t" * 100)
    assert verdicts(run("doctor", "--deep", shop.url))["integrity"] == "ok"
    page = int.from_bytes(shop.path.read_bytes()[16:18], "big")
    with open(shop.path, "r+b") as damaged:
        damaged.seek(-8 * page, os.SEEK_END)
        damaged.write(b"\xff" * page * 4)
    result = run("doctor", "--deep", shop.url)
    assert result.exit_code == 1
    assert "bad" in verdicts(result).values()


def test_memory_survives_nothing() -> None:
    result = run("doctor", "memory://")
    assert result.exit_code == 0
    assert verdicts(result)["survives"] == "weak"
    assert "nothing beyond this process" in result.stdout
    assert any("sqlite:///jobs.db" in line for line in advice(result))


def test_queues_are_counted_and_a_paused_one_is_weak(shop: Shop) -> None:
    shop.kill(1, queue="mail")
    shop.add(2, queue="mail", delay=3_600_000_000)
    shop.use(lambda store: store.set_paused("mail", True))
    result = run("doctor", shop.url)
    assert "queue mail        paused, 0 ready, 2 scheduled, 0 in flight, 1 dead letter\n" in result.stdout
    assert verdicts(result)["queue mail"] == "weak"
    assert any("holdfast queues resume mail" in line for line in advice(result))


def test_jobs_that_nobody_is_there_to_run_are_weak(shop: Shop) -> None:
    shop.add(2)
    result = run("doctor", shop.url)
    assert verdicts(result)["workers"] == "weak"
    assert advice(result) == ["weak: workers: 2 jobs can be claimed, and nobody is there to do it: start a worker"]
    shop.use(lambda store: store.open_session(Session(id=SESSION)))
    assert verdicts(run("doctor", shop.url))["workers"] == "ok"


def test_the_oldest_ready_job_is_told_by_its_age(shop: Shop) -> None:
    shop.add(1)
    [old] = shop.add(1)
    shop.add(1, delay=3_600_000_000)
    change(shop.path, "UPDATE holdfast_live SET run_at = ? WHERE id = ?", SYSTEM.clock.now() - 7_200_500_000, old)
    assert "due for 2:00:00 (h:mm:ss)" in run("doctor", shop.url).stdout


def test_a_silent_worker_and_its_lost_jobs_are_weak(shop: Shop) -> None:
    shop.add(2)
    shop.claim(2)
    change(shop.path, "UPDATE holdfast_sessions SET beat_at = beat_at - ?", SILENT_AFTER + 1_000_000)
    result = run("doctor", shop.url)
    assert verdicts(result)["workers"] == "weak"
    assert "lost jobs" not in verdicts(result)
    shop.use(lambda store: store.close_session(SESSION))
    result = run("doctor", shop.url)
    assert "1 closed within the last hour" in result.stdout
    assert verdicts(result)["lost jobs"] == "weak"
    assert "2 jobs in flight without a worker" in result.stdout


def test_doctor_as_json(shop: Shop) -> None:
    url = f"{shop.url}?durability=relaxed"
    [record] = records(run("doctor", "--json", url))
    assert list(record) == ["store", "findings"]
    assert record["store"] == url
    assert all(set(finding) == {"name", "value", "verdict", "advice"} for finding in record["findings"])
    weak = [finding for finding in record["findings"] if finding["verdict"] == "weak"]
    assert [finding["name"] for finding in weak] == ["survives", "synchronous"]
