"""`holdfast enqueue`, and how the application is found."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.entry.loading import load_app
from holdfast.errors import InvalidOption
from holdfast.job import Job
from tests.cli.helpers import SECRET, Shop, environment, run, run_alone

APP = """
from datetime import datetime

from holdfast import Holdfast, Settings

app = Holdfast("sqlite:///jobs.db", settings=Settings.parse({"queues": {"max_depth": 3}}))
other = 7

@app.task(queue="mail")
def welcome(user_id: int, locale: str = "en", at: datetime | None = None) -> None: ...
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the current folder. Its name: a new one for each, as modules are remembered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    written: list[str] = []

    def write(text: str = APP, name: str = "") -> str:
        name = name or f"shop_{tmp_path.name.replace('-', '_')}_{len(written)}"
        tmp_path.joinpath(*name.split(".")).with_suffix(".py").write_text(textwrap.dedent(text), encoding="utf-8")
        written.append(name)
        return name

    yield write
    for name in list(sys.modules):
        if name.split(".")[0] in {known.split(".")[0] for known in written}:
            del sys.modules[name]


def stored(tmp_path: Path, job_id: str) -> Job:
    job = Shop(tmp_path / "jobs.db").get(job_id.strip())
    assert job is not None
    return job


# Enqueuing.


def test_a_job_is_stored_and_its_id_is_printed(write: Write, tmp_path: Path) -> None:
    result = run("enqueue", f"{write()}:app", "welcome", '{"user_id": 42, "at": "2026-01-02T03:04:05Z"}')
    assert (result.exit_code, result.stderr) == (0, "")
    job = stored(tmp_path, result.stdout)
    assert (job.task, job.queue, job.priority) == ("welcome", "mail", 5)
    assert job.payload == b'{"user_id":42,"at":"2026-01-02T03:04:05Z"}'


def test_every_option_reaches_the_job(write: Write, tmp_path: Path) -> None:
    result = run(
        *("enqueue", f"{write()}:app", "welcome", '{"user_id": 1}', "--queue", "other", "--priority", "high"),
        *("--delay", "3600", "--key", "once", "--correlation-id", "order-7", "--max-retries", "9"),
    )
    job = stored(tmp_path, result.stdout)
    assert (job.queue, job.priority, job.correlation_id, job.max_retries) == ("other", 0, "order-7", 9)
    assert job.key is not None
    assert job.key.text == "once"
    assert job.run_at - job.created_at == 3_600_000_000


def test_a_priority_may_be_a_number(write: Write, tmp_path: Path) -> None:
    result = run("enqueue", f"{write()}:app", "welcome", '{"user_id": 1}', "--priority", "-7")
    assert stored(tmp_path, result.stdout).priority == -7


def test_the_body_may_come_from_standard_input(write: Write, tmp_path: Path) -> None:
    result = run("enqueue", f"{write()}:app", "welcome", "-", text='{"user_id": 1, "locale": "dé"}')
    assert stored(tmp_path, result.stdout).payload == '{"user_id":1,"locale":"dé"}'.encode()


def test_the_same_key_is_the_same_job(write: Write) -> None:
    call = ("enqueue", f"{write()}:app", "welcome", '{"user_id": 1}', "--key", "once")
    first, second = run(*call), run(*call)
    assert first.stdout == second.stdout
    assert (first.stderr, second.stderr) == ("", "it was there already, and is ready\n")
    third = run("enqueue", f"{write()}:app", "welcome", '{"user_id": 2}', "--key", "once")
    assert (third.exit_code, third.stdout) == (1, "")
    assert "belongs to job" in third.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"user_id": "x"}', "$.user_id: Expected `int`, got `str`"),
        ("{}", "missing required field `user_id`"),
        ('{"user_id": 1, "colour": 2}', "unknown field `colour`"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"user_id": 1', "truncated"),
        ("", "truncated"),
    ],
)
def test_a_body_that_does_not_fit_the_task_is_bad_usage(write: Write, body: str, said: str) -> None:
    result = run("enqueue", f"{write()}:app", "welcome", body)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("holdfast: BODY does not fit the task welcome: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", [("--priority", "urgent"), ("--priority", "101"), ("--delay", "-1"), ("--key", ""), ("--queue", "a b")]
)
def test_options_that_cannot_be_are_bad_usage(write: Write, wrong: tuple[str, str]) -> None:
    assert run("enqueue", f"{write()}:app", "welcome", '{"user_id": 1}', *wrong).exit_code == 2


def test_an_unknown_task_is_bad_usage_and_the_known_ones_are_told(write: Write) -> None:
    result = run("enqueue", f"{write()}:app", "wellcome", "{}")
    assert result.exit_code == 2
    assert "known are: welcome" in result.stderr


def test_a_full_queue_is_a_failure(write: Write) -> None:
    name = write()
    codes = [run("enqueue", f"{name}:app", "welcome", '{"user_id": 1}').exit_code for _ in range(4)]
    assert codes == [0, 0, 0, 1]


def test_a_job_in_memory_would_be_lost_so_it_is_refused(write: Write) -> None:
    name = write(APP.replace("sqlite:///jobs.db", "memory://"))
    result = run("enqueue", f"{name}:app", "welcome", '{"user_id": 1}')
    assert (result.exit_code, result.stdout) == (2, "")
    assert "in memory" in result.stderr


# Finding the application.


def test_the_current_folder_comes_first(write: Write, tmp_path: Path) -> None:
    write("from holdfast import Holdfast\napp = Holdfast('memory://')\n", "wave")  # there is one in the library
    # As the installed program is started: Python itself then puts another folder first.
    result = run_alone("enqueue", "wave:app", "x", "{}", cwd=tmp_path, env=environment(PYTHONSAFEPATH="1"))
    assert result.returncode == 2
    assert "in memory" in result.stderr


def test_a_module_in_a_package(write: Write, tmp_path: Path) -> None:
    package = f"package_{tmp_path.name.replace('-', '_')}"
    (tmp_path / package).mkdir()
    name = write(APP, f"{package}.jobs")
    assert "welcome" in [spec.name for spec in load_app(f"{name}:app").tasks]


@pytest.mark.parametrize("name", ["", "shop", ":app", "shop:", "shop:a b", "shop:app.tasks", "shop.py:app", "a/b:app"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(InvalidOption, match="module"):
        load_app(name)


def test_a_module_that_is_not_there(write: Write) -> None:
    name = write()
    with pytest.raises(InvalidOption, match=r"there is no module 'nowhere_at_all'"):
        load_app("nowhere_at_all.jobs:app")
    with pytest.raises(InvalidOption, match=rf"there is no module '{name}.jobs'"):
        load_app(f"{name}.jobs:app")


def test_an_attribute_that_is_not_there(write: Write) -> None:
    with pytest.raises(InvalidOption, match=r"has no 'ap'; its applications are: app"):
        load_app(f"{write()}:ap")


def test_something_else_than_an_application(write: Write) -> None:
    with pytest.raises(InvalidOption, match=r"is not a Holdfast application but a int"):
        load_app(f"{write()}:other")


def test_a_module_that_ends_the_program(write: Write) -> None:
    with pytest.raises(InvalidOption, match=r"exit code 3.*__main__"):
        load_app(f"{write('raise SystemExit(3)')}:app")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_fails_shows_its_own_error(write: Write, text: str, said: str) -> None:
    name = write(text)
    result = run("enqueue", f"{name}:app", "welcome", "{}")
    assert result.exit_code == 2
    *trace, last = result.stderr.splitlines()
    assert last.startswith(f"holdfast: module {name} cannot be imported: {said}")
    assert any(f'{name}.py", line 1' in line for line in trace)
    assert not any("loading.py" in line or "importlib" in line for line in trace)


def test_the_traceback_of_a_module_tells_no_password(write: Write) -> None:
    name = write(f'from holdfast import Holdfast; app = Holdfast("nosql://user:{SECRET}@host/db")')
    result = run("enqueue", f"{name}:app", "welcome", "{}")
    assert result.exit_code == 2
    assert "nosql://user:***@host/db" in result.stderr
    assert SECRET not in result.output
