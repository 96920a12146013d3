"""`holdfast worker`: what is wrong with an application or its store is said once, at the start, with the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

APPLICATION = """
from holdfast import Holdfast
app = Holdfast({url!r})
@app.task(queue="mail")
def greet() -> str:
    return "hello"
"""


def write(folder: Path, *, url: str = "sqlite:///jobs.db", more: str = "", tasks: bool = True) -> None:
    text = APPLICATION.format(url=url) if tasks else f"from holdfast import Holdfast\napp = Holdfast({url!r})\n"
    (folder / "shop.py").write_text(text + more, encoding="utf-8")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "worker", "shop:app", "--log-format", "json", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_an_application_without_tasks_is_refused(tmp_path: Path) -> None:
    write(tmp_path, tasks=False)
    result = run(tmp_path)
    assert result.returncode == 2
    assert "the application has no tasks" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_store_that_cannot_be_opened_ends_it(tmp_path: Path) -> None:
    write(tmp_path, url="sqlite:///nowhere/jobs.db")
    result = run(tmp_path)
    assert result.returncode == 1
    assert "Its folder must exist" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("start", ["app.run_worker()", "app.start_worker()"])
def test_a_worker_that_the_module_starts_itself_is_refused(start: str, tmp_path: Path) -> None:
    write(tmp_path, more=start)
    result = run(tmp_path)
    assert result.returncode == 2
    assert 'put it under `if __name__ == "__main__":`' in result.stderr


def test_a_store_in_memory_is_refused(tmp_path: Path) -> None:
    write(tmp_path, url="memory://")
    result = run(tmp_path)
    assert result.returncode == 2
    assert "cannot be shared with worker processes" in result.stderr


@pytest.mark.parametrize("option", [("--concurrency", "0"), ("--lease-ttl", "0"), ("--log-format", "xml")])
def test_what_cannot_work_is_refused(option: tuple[str, str], tmp_path: Path) -> None:
    write(tmp_path)
    assert run(tmp_path, *option).returncode == 2


def test_it_says_what_would_look_like_doing_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    store = f"sqlite:///{tmp_path / 'jobs.db'}"
    for command in (["migrate", store], ["queues", "pause", "mail", "--store", store]):
        subprocess.run([sys.executable, "-m", "holdfast", *command], check=True, capture_output=True, timeout=60)
    command = [sys.executable, "-m", "holdfast", "worker", "shop:app", "--queues", "mail,mial", "--log-format", "json"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        said = ""
        while "worker started" not in said:
            line = worker.stderr.readline()
            assert line, said
            said += line
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    assert str(tmp_path / "jobs.db") in said
    assert "queue mail is paused: nothing is taken from it until `holdfast queues resume mail`" in said
    assert "no task names the queue mial" in said


def test_an_application_with_its_own_log_is_not_logged_twice(tmp_path: Path) -> None:
    more = "from holdfast.observe.logging import configure\napp.listener = configure(format='json').listener\n"
    write(tmp_path, more=more)
    command = [sys.executable, "-m", "holdfast", "worker", "shop:app", "--log-format", "json"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        while "worker started" not in (line := worker.stderr.readline()):
            assert line
        worker.send_signal(signal.SIGTERM)
        rest = worker.stderr.read()
        assert worker.wait(30) == 0
    assert "worker started" not in rest
    assert rest.count("worker stopped") == 1
