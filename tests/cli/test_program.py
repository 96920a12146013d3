"""The program as a whole: exit codes, pipes, terminals, signals, and what it never says."""

from __future__ import annotations

import json
import re
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast import Holdfast
from holdfast.cli.program import program
from holdfast.cli.wording import ago, first_line, masked, moment, span, visible
from holdfast.job import State
from tests.cli.helpers import COLOUR, HOSTILE, SECRET, SESSION, Shop, environment, in_terminal, run, run_alone, started

OPERATOR_COMMANDS = [
    ("jobs", "list"),
    ("jobs", "show", "x"),
    ("jobs", "cancel", "x"),
    ("dead", "list"),
    ("dead", "show", "x"),
    ("dead", "replay", "--all"),
    ("dead", "purge", "--all", "--yes"),
    ("queues", "list"),
    ("queues", "pause", "x"),
    ("queues", "resume", "x"),
    ("workers",),
    ("stats",),
    ("keep",),
    ("migrate",),
    ("doctor",),
    ("bench",),
]


# Exit codes.


@pytest.mark.parametrize("command", OPERATOR_COMMANDS)
def test_without_a_store_it_is_bad_usage(command: tuple[str, ...]) -> None:
    result = run(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Missing option '--store' (env var: 'HOLDFAST_STORE')" in result.stderr or (
        command in (("migrate",), ("doctor",), ("bench",)) and "Missing argument 'URL'" in result.stderr
    )


@pytest.mark.parametrize("command", OPERATOR_COMMANDS)
def test_an_unknown_scheme_is_bad_configuration(command: tuple[str, ...]) -> None:
    result = run(*command, store=f"nosql://user:{SECRET}@host/db")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("holdfast: no engine for the store URL scheme 'nosql'")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", OPERATOR_COMMANDS)
def test_a_store_that_cannot_be_reached_is_a_failure(command: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*command, store=f"sqlite:///{tmp_path}/no/such/folder/jobs.db")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert result.output.count("\n") == (2 if command == ("doctor",) else 1)


@pytest.mark.parametrize("arguments", [("no-such-command",), ("jobs", "lst"), ("jobs", "list", "--no-such-option")])
def test_what_does_not_exist_is_bad_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"holdfast {version('holdfast')}\n")


def test_migrate_makes_the_store_and_may_be_repeated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new.db'}"
    for _ in range(2):
        result = run("migrate", url)
        assert (result.exit_code, result.stdout) == (0, f"{url} is up to date\n")
    assert run("doctor", url).exit_code == 0


# Pipes and terminals.


def test_a_pipe_gets_plain_text(shop: Shop) -> None:
    [job_id] = shop.kill(1, message=HOSTILE)
    forced = environment(FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="40")
    for command in (("jobs", "list"), ("jobs", "show", job_id), ("stats",), ("doctor", shop.url), ("--help",)):
        store = () if command[0] in ("doctor", "--help") else ("--store", shop.url)
        result = run_alone(*command, *store, env=forced)
        assert result.returncode == 0, result.stderr
        assert "\x1b" not in result.stdout + result.stderr
        assert not re.search("[\u2500-\u257f]", result.stdout)
    assert job_id in run_alone("jobs", "list", "--store", shop.url, env=forced).stdout


def test_a_terminal_gets_colour_and_whole_ids_however_narrow_it_is(shop: Shop) -> None:
    [job_id] = shop.kill(1, message="long " * 50)
    code, shown = in_terminal("jobs", "list", "--store", shop.url, columns=40)
    assert code == 0
    assert "\x1b[31mfailed" in shown
    [line] = [line for line in COLOUR.sub("", shown).splitlines() if line.startswith(job_id)]
    assert line.rstrip().endswith("…")


def test_a_wide_terminal_is_used(shop: Shop) -> None:
    shop.kill(1, message="long " * 30)
    _, shown = in_terminal("dead", "list", "--store", shop.url, columns=300)
    assert ("long " * 30).strip() in shown


@pytest.mark.parametrize("command", [("jobs", "list"), ("dead", "list"), ("jobs", "show"), ("dead", "show")])
def test_text_of_jobs_can_do_nothing_to_a_terminal(shop: Shop, command: tuple[str, str]) -> None:
    [job_id] = shop.kill(1, message=HOSTILE, correlation_id="[bold]x[/bold]\x9b\u202e :smile:")
    arguments = [*command, job_id] if command[1] == "show" else [*command]
    code, shown = in_terminal(*arguments, "--store", shop.url, columns=300)
    assert code == 0
    assert "[red]gone[/red]" in shown
    assert "\\x1b[31mred" in shown
    assert {char for char in COLOUR.sub("", shown) if not char.isprintable()} == {"\n"}
    if command == ("jobs", "show"):
        assert "[bold]x[/bold]\\x9b\\u202e :smile:" in shown


def test_no_color_is_respected(shop: Shop) -> None:
    shop.kill()
    env = environment(TERM="xterm-256color", NO_COLOR="1")
    _, shown = in_terminal("jobs", "list", "--store", shop.url, env=env)
    assert "failed" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)


def test_a_dumb_terminal_gets_plain_text(shop: Shop) -> None:
    shop.kill()
    _, shown = in_terminal("jobs", "list", "--store", shop.url, env=environment(TERM="dumb"))
    assert "failed" in shown
    assert "\x1b" not in shown


def test_output_that_cannot_be_encoded_is_escaped(shop: Shop) -> None:
    [job_id] = shop.kill(1, message="größer")
    result = run_alone("jobs", "show", job_id, "--store", shop.url, env=environment(PYTHONIOENCODING="ascii"))
    assert result.returncode == 0, result.stderr
    assert "gr\\xf6\\xdfer" in result.stdout


def test_a_reader_that_goes_away_is_no_failure(shop: Shop) -> None:
    shop.add(1000)
    with started("jobs", "list", "--json", "--limit", "1000", "--store", shop.url) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.wait() == 0
        assert process.stderr.read() == ""


# Signals.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_keep_runs_until_a_signal(shop: Shop, number: signal.Signals) -> None:
    with started("keep", "--store", shop.url) as process:
        assert process.stderr is not None
        assert "keeping sqlite:///" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait() == 0
        assert "Traceback" not in process.stderr.read()


def test_keep_brings_back_the_jobs_of_a_dead_worker(shop: Shop) -> None:
    ids = shop.add(2)
    shop.claim(2)
    with started("keep", "--lease-ttl", "0.5", "--store", shop.url) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if SESSION in line:
                break
        while shop.states(ids) != [State.READY] * 2:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_keep_refuses_a_ttl_that_cannot_work(shop: Shop) -> None:
    assert run("keep", "--lease-ttl", "0", store=shop.url).exit_code == 2


# Secrets.


@pytest.mark.parametrize(
    "url",
    [
        f"sqlite://user:{SECRET}@host/jobs.db",
        f"sqlite:///jobs.db?password={SECRET}",
        f"nosql://user:{SECRET}@host/db",
        f"sqlite://user:{SECRET}@ho\u2100st/jobs.db",
        f"sqlite://user:{SECRET}@[host/jobs.db",
    ],
)
@pytest.mark.parametrize("command", [("stats", "--store"), ("doctor",), ("migrate",), ("keep", "--store")])
def test_a_password_is_never_said(url: str, command: tuple[str, ...]) -> None:
    result = run(*command, url)
    assert result.exit_code == 2
    assert SECRET not in result.output


@pytest.mark.parametrize("command", [("stats",), ("jobs", "list"), ("queues", "list"), ("workers",), ("keep",)])
def test_a_slip_of_the_pen_in_a_path_is_no_empty_queue(command: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*command, "--store", f"sqlite:///{tmp_path / 'typo.db'}")
    assert result.exit_code == 1
    assert "there is no database file" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_named_without_its_password(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = f"sqlite://user:{SECRET}@host/jobs.db"
    monkeypatch.setattr("holdfast.cli.options.application", lambda url, **_: Holdfast(shop.url))
    monkeypatch.setattr("holdfast.cli.doctor.application", lambda url, **_: Holdfast(shop.url))
    for command in (("migrate", whole), ("doctor", "--json", whole)):
        result = run(*command)
        assert result.exit_code == 0
        assert "sqlite://user:***@host/jobs.db" in result.stdout
        assert SECRET not in result.output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("postgresql://me:p@ss/w:rd@host/db", "postgresql://me:***@host/db"),
        ("cannot reach mysql://me:secret@host, sorry", "cannot reach mysql://me:***@host, sorry"),
        ("redis://host?Password=secret&db=1", "redis://host?Password=***&db=1"),
        ("redis://host?db=1&auth_token=secret", "redis://host?db=1&auth_token=***"),
        ("sqlite:////var/jobs.db?timeout=3", "sqlite:////var/jobs.db?timeout=3"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
    ],
)
def test_masked(text: str, told: str) -> None:
    assert masked(text) == told


# Words.


def test_visible() -> None:
    assert visible("plain – Ünïcode 字") == "plain – Ünïcode 字"
    assert visible("a\tb\nc\x1b[1m\x7f\x9b\u202e\u2028\ud800") == r"a\tb\nc\x1b[1m\x7f\x9b\u202e\u2028\ud800"


def test_times() -> None:
    second = 1_000_000
    assert moment(1_700_000_000_000_001) == "2023-11-14T22:13:20.000001Z"
    assert [span(n * second) for n in (0, 119, 120, 7199, 7200, 172_799, 172_800)] == [
        "0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 d",
    ]  # fmt: skip
    assert (ago(0, 5 * second), ago(5 * second, 0)) == ("5 s ago", "in 5 s")
    assert span(-5) == "0 s"


def test_first_line() -> None:
    assert first_line("\n  one \ntwo") == "one"
    assert first_line("x" * 300) == "x" * 200 + "…"
    assert first_line("") == ""


# The reference.


def test_the_reference_names_every_command_and_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    root = typer.main.get_command(program)
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        path, found = waiting.pop()
        if commands := getattr(found, "commands", None):
            waiting += [((*path, name), command) for name, command in commands.items()]
            continue
        section = re.search(rf"^### `holdfast {' '.join(path)}\b.*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
        assert section, path
        for parameter in found.params:
            for option in parameter.opts:
                if option.startswith("--") and option not in ("--help", "--store"):
                    assert option in section[0], (path, option)
