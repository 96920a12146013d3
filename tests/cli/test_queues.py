"""`holdfast queues`, `workers` and `stats`: the store as a whole."""

from __future__ import annotations

import json
import signal
import sqlite3

import pytest

from holdfast.cli.workers import SILENT_AFTER
from holdfast.ports import SYSTEM
from holdfast.store import Session
from tests.cli.helpers import SESSION, Shop, in_terminal, records, run, started

COUNTED = ["ready", "scheduled", "in_flight", "succeeded", "failed", "cancelled"]


@pytest.fixture
def busy(shop: Shop) -> Shop:
    """Two queues: a dead letter and a running job in one, two waiting jobs and a delayed one in the other."""
    shop.kill(1, queue="mail")
    shop.add(1, queue="mail")
    shop.claim(queue="mail")
    shop.add(2)
    shop.add(1, delay=3_600_000_000)
    return shop


def silence(shop: Shop, microseconds: int) -> None:
    """Let the open session have been silent for so long."""
    connection = sqlite3.connect(shop.path)
    with connection:
        connection.execute("UPDATE holdfast_sessions SET beat_at = ?", (SYSTEM.clock.now() - microseconds,))
    connection.close()


# Queues.


def test_every_queue_has_a_line(busy: Shop) -> None:
    header, *lines = run("queues", "list", store=busy.url).stdout.splitlines()
    assert header.split("  ")[0] == "QUEUE"
    assert [line.split() for line in lines] == [
        ["default", "2", "1", "0", "0", "0", "0"],
        ["mail", "0", "0", "1", "0", "1", "0"],
    ]


def test_queues_as_json(busy: Shop) -> None:
    default, mail = records(run("queues", "list", "--json", store=busy.url))
    assert list(mail) == ["queue", *COUNTED, "paused"]
    assert (mail["queue"], mail["in_flight"], mail["failed"], mail["paused"]) == ("mail", 1, 1, False)
    assert (default["ready"], default["scheduled"]) == (2, 1)


def test_no_queues(shop: Shop) -> None:
    result = run("queues", "list", store=shop.url)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("no queues")


def test_pause_and_resume(busy: Shop) -> None:
    result = run("queues", "pause", "default", store=busy.url)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "default is paused\n", "")
    assert busy.claim() == []
    assert [record["paused"] for record in records(run("queues", "list", "--json", store=busy.url))] == [True, False]
    assert run("queues", "list", store=busy.url).stdout.splitlines()[1].endswith("yes")
    result = run("queues", "resume", "default", store=busy.url)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "default is open\n", "")
    assert len(busy.claim()) == 1


def test_a_queue_that_nobody_knows_is_paused_with_a_doubt(shop: Shop) -> None:
    result = run("queues", "pause", "mial", store=shop.url)
    assert (result.exit_code, result.stdout) == (0, "mial is paused\n")
    assert result.stderr == "queue 'mial' has no jobs; is the name right?\n"


def test_a_queue_that_cannot_be(shop: Shop) -> None:
    assert run("queues", "pause", "a b", store=shop.url).exit_code == 2


# Workers.


def test_workers(busy: Shop) -> None:
    header, line = run("workers", store=busy.url).stdout.splitlines()
    assert header.split() == ["SESSION", "STATE", "HOST", "PID", "JOBS", "UP", "LAST", "BEAT", "QUEUES"]
    assert line.split()[:5] == [SESSION, "open", "web-1", "4242", "1"]
    assert line.endswith("mail")


def test_workers_as_json(busy: Shop) -> None:
    busy.use(lambda store: store.open_session(Session(id="gone", queues=("mail", "default"))))
    busy.use(lambda store: store.close_session("gone"))
    opened, closed = records(run("workers", "--json", store=busy.url))
    assert list(opened) == ["id", "open", "host", "pid", "queues", "held", "beat", "opened_at", "beat_at"]
    assert (opened["id"], opened["open"], opened["held"]) == (SESSION, True, 1)
    assert (closed["id"], closed["open"], closed["held"]) == ("gone", False, 0)
    assert closed["queues"] == ["mail", "default"]


def test_a_worker_that_was_not_heard_of_for_long_is_silent(busy: Shop) -> None:
    silence(busy, SILENT_AFTER + 1_000_000)
    assert run("workers", store=busy.url).stdout.splitlines()[1].split()[1] == "silent"
    [stats] = records(run("stats", "--json", store=busy.url))
    assert stats["workers"] == {"open": 1, "silent": 1}
    assert run("stats", store=busy.url).stdout.endswith("workers: 1 open, 1 of them silent\n")


def test_no_workers(shop: Shop) -> None:
    result = run("workers", store=shop.url)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no workers\n")


# Stats.


def test_stats_have_a_line_for_each_queue_and_one_for_all(busy: Shop) -> None:
    lines = run("stats", store=busy.url).stdout.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["default", "2", "1", "0", "0", "0", "0"],
        ["mail", "0", "0", "1", "0", "1", "0"],
        ["total", "2", "1", "1", "0", "1", "0"],
        ["workers:", "1", "open"],
    ]


def test_stats_as_json(busy: Shop) -> None:
    [stats] = records(run("stats", "--json", store=busy.url))
    assert list(stats) == ["at", "queues", "total", "workers"]
    assert [queue["queue"] for queue in stats["queues"]] == ["default", "mail"]
    assert list(stats["total"]) == COUNTED
    assert (stats["total"]["ready"], stats["total"]["failed"]) == (2, 1)


def test_stats_again_and_again(busy: Shop) -> None:
    with started("stats", "--watch", "0.1", "--json", "--store", busy.url) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        busy.add(5)
        ready = first["total"]["ready"]
        while ready != first["total"]["ready"] + 5:
            ready = json.loads(process.stdout.readline())["total"]["ready"]
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == ""


def test_stats_in_a_terminal(busy: Shop) -> None:
    code, shown = in_terminal("stats", "--store", busy.url)
    assert code == 0
    assert "\x1b[" in shown
    assert "total" in shown


def test_watching_needs_an_interval(shop: Shop) -> None:
    assert run("stats", "--watch", "0", store=shop.url).exit_code == 2
