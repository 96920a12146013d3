"""Logs as a whole: which keys, which shape, which level, what hostile text becomes, and that nobody waits for them."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import pytest
import structlog

from holdfast import Holdfast
from holdfast.errors import InvalidOption
from holdfast.events import Event, JobsPruned, KeeperFailed, QueueDeep, tell
from holdfast.job import Reason, State
from holdfast.observe import lines
from holdfast.observe import logging as module
from holdfast.observe.lines import Keys, Level
from holdfast.observe.logging import CANONICAL_KEYS, Format, Logs, UnknownLogKey, configure
from holdfast.observe.writer import MOST_WAITING
from holdfast.ports import Ports
from holdfast.testing import ManualClock
from tests.observe.samples import EVENTS, JOB, WORKER, Failing, Held, Terminal, settled

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "logging.md"
SOON = 10
HOSTILE = 'boom\n{"level": "error", "msg": "forged"}\r\x1b[2J\x1b[31mred\x9b0m\u2028next\u202eback\x00\ud800'


class Scene:
    """Logs on a stream in memory, with a clock that the test moves."""

    def __init__(self, stream: io.StringIO | None = None, *, format: Format = "json", level: Level = "info") -> None:
        self.clock = ManualClock()
        self.stream = stream or io.StringIO()
        self.logs: Logs = configure(format=format, level=level, stream=self.stream, ports=Ports(clock=self.clock))

    def text(self) -> str:
        """Everything that was written. Ends the logs."""
        self.logs.close()
        return self.stream.getvalue()

    def lines(self) -> list[dict[str, Any]]:
        """The same as values."""
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture(autouse=True)
def colours_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)


# The shape.


def test_a_line_of_json() -> None:
    scene = Scene()
    scene.logs.listener(settled(Reason.RETRIED, error="ValueError: boom", retry_in=1.5))
    assert scene.text() == (
        '{"level": "info", "ts": "2023-11-14T22:13:20.000000Z", '
        '"msg": "welcome failed (attempt 2, 0.25 s), runs again in 1.5 s: ValueError: boom", '
        f'"job_id": "{JOB}", "queue": "mail", "worker_id": "{WORKER}", "request_id": "req-1", '
        '"namespace": "holdfast"}\n'
    )


def test_a_line_for_people() -> None:
    scene = Scene(format="console")
    scene.logs.listener(settled(Reason.RETRIED, error="ValueError: boom", retry_in=1.5))
    assert scene.text() == (
        "2023-11-14T22:13:20.000000Z [info     ] "
        "welcome failed (attempt 2, 0.25 s), runs again in 1.5 s: ValueError: boom "
        f"job_id={JOB} queue=mail worker_id={WORKER[:8]} request_id=req-1 namespace=holdfast\n"
    )


def test_every_key_has_its_place() -> None:
    scene = Scene()
    given = {key: f"a {key}" for key in reversed(Keys.__annotations__)}
    scene.logs.log.info("hello", **given)
    [line] = scene.lines()
    assert list(line) == list(CANONICAL_KEYS)
    assert {key: line[key] for key in given} == given


def test_the_keys_are_those_of_the_requirement() -> None:
    assert set(CANONICAL_KEYS) == {
        *("level", "ts", "msg", "trace_id", "span_id", "job_id", "queue", "worker_id", "request_id", "namespace")
    }


def test_the_time_is_that_of_the_line_in_microseconds() -> None:
    scene = Scene()
    scene.clock.advance(0.000_001)
    scene.logs.log.info("one")
    scene.clock.advance(59)
    scene.logs.log.info("two")
    assert [line["ts"] for line in scene.lines()] == ["2023-11-14T22:13:20.000001Z", "2023-11-14T22:14:19.000001Z"]


def test_what_is_not_known_is_left_out() -> None:
    scene = Scene()
    scene.logs.log.info("hello", queue="", job_id=None)
    [line] = scene.lines()
    assert set(line) == {"level", "ts", "msg", "namespace"}


def test_every_event_gives_one_line_of_canonical_keys() -> None:
    scene = Scene(level="debug")
    for event, _ in EVENTS:
        scene.logs.listener(event)
    written = scene.lines()
    assert [line["level"] for line in written] == [level for _, level in EVENTS]
    for line in written:
        assert list(line) == [key for key in CANONICAL_KEYS if key in line]
        assert all(isinstance(value, str) for value in line.values())


# The list of keys.


@pytest.mark.parametrize(
    "key", ["payload", "args", "event", "task", "attempt", "exc_info", "Queue", "level", "ts", "msg"]
)
def test_another_key_is_refused_where_it_is_logged_or_bound(key: str) -> None:
    scene = Scene()
    log: Any = scene.logs.log
    with pytest.raises(UnknownLogKey, match=re.escape(repr(key))):
        log.bind(**{key: "s3cret"})
    for level in get_args(Level):
        with pytest.raises(UnknownLogKey) as refused:  # debug too, though its line would not be written
            getattr(log, level)("hello", **{key: "s3cret"})
        assert "s3cret" not in str(refused.value)
    assert scene.text() == ""


@pytest.mark.parametrize("key", list(Keys.__annotations__))
def test_every_key_on_the_list_is_accepted(key: str) -> None:
    scene = Scene()
    log: Any = scene.logs.log
    log.bind(**{key: "bound"}).info("one")
    log.info("two", **{key: "logged"})
    assert [line[key] for line in scene.lines()] == ["bound", "logged"]


def test_the_refusal_says_what_to_do() -> None:
    log: Any = Scene().logs.log
    with pytest.raises(UnknownLogKey, match=r"'user' is not a key .* use one of trace_id, span_id, job_id, queue, "):
        log.info("hello", user="42")
    assert issubclass(UnknownLogKey, InvalidOption)


@pytest.mark.parametrize("value", [42, b"x", {"a": 1}, ["x"]])
def test_a_value_that_is_no_text_is_refused(value: object) -> None:
    log: Any = Scene().logs.log
    with pytest.raises(InvalidOption, match="'queue' must be text, not a"):
        log.info("hello", queue=value)


def test_a_key_that_came_in_by_the_back_door_is_refused_too() -> None:
    scene = Scene()
    scene.logs.log._context["payload"] = "s3cret"
    with pytest.raises(UnknownLogKey):
        scene.logs.log.info("hello")
    assert scene.text() == ""


def test_what_is_bound_is_on_every_line_of_that_log_only() -> None:
    scene = Scene()
    bound = scene.logs.log.bind(queue="mail").bind(worker_id=WORKER)
    bound.warning("one", queue="other")
    bound.error("two")
    scene.logs.log.info("three")
    assert [(line.get("queue"), line.get("worker_id")) for line in scene.lines()] == [
        ("other", WORKER),
        ("mail", WORKER),
        (None, None),
    ]


# Levels.


@pytest.mark.parametrize(("level", "written"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_lines_below_the_level_are_not_written(level: Level, written: int) -> None:
    by_program, by_events = Scene(level=level), Scene(level=level)
    for each in get_args(Level):
        getattr(by_program.logs.log, each)("hello")
        by_events.logs.listener(next(event for event, its in EVENTS if its == each))
    wanted = list(get_args(Level))[-written:]
    assert [line["level"] for line in by_program.lines()] == wanted
    assert [line["level"] for line in by_events.lines()] == wanted


def test_a_queue_that_stays_deep_is_mentioned_once_a_minute() -> None:
    scene = Scene()
    for _ in range(3):
        for _ in range(1000):
            scene.logs.listener(QueueDeep("mail", 10))
        scene.logs.listener(QueueDeep("other", 10))
        scene.clock.advance(30)
    assert [line["queue"] for line in scene.lines()] == ["mail", "other", "mail", "other"]


# Hostile text.


def shout(scene: Scene) -> None:
    """Hostile text in every place where the text of others gets in."""
    scene.logs.listener(settled(Reason.EXHAUSTED, State.FAILED, error=HOSTILE, task="task\nof\x1b[1mothers"))
    scene.logs.listener(KeeperFailed("rescue", HOSTILE))
    scene.logs.log.info(HOSTILE, request_id=HOSTILE, queue="a\nb")


def test_hostile_text_forges_no_line_of_json() -> None:
    scene = Scene()
    shout(scene)
    text = scene.text()
    assert text.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    written = [json.loads(line) for line in text.splitlines()]
    assert [line["level"] for line in written] == ["error", "warning", "info"]
    assert all(value.isprintable() for line in written for value in line.values())


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_hostile_text_forges_no_line_on_a_console(stream: type[io.StringIO]) -> None:
    scene = Scene(stream(), format="console")
    shout(scene)
    text = re.sub(r"\x1b\[\d+m", "", scene.text()) if stream is Terminal else scene.text()
    assert len(text.splitlines()) == 3
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize("format", ["json", "console"])
def test_without_the_escape_it_would(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (lines, module):
        monkeypatch.setattr(where, "printable", lambda text, longest: text)
    scene = Scene(format=format)
    shout(scene)
    text = scene.text()
    if format == "console":
        assert len(text.splitlines()) > 3
        assert "\x1b[2J" in text
    else:
        assert any("\x1b" in value for line in text.splitlines() for value in json.loads(line).values())


def test_markup_is_text() -> None:
    markup = "[bold red]x[/] <b> {0} %s %(a)s \\n"
    plain, coloured, machine = Scene(format="console"), Scene(Terminal(), format="console"), Scene()
    for scene in (plain, coloured, machine):
        scene.logs.log.info(markup)
    assert markup in plain.text()
    assert markup in coloured.text()
    assert machine.lines()[0]["msg"] == markup


def test_a_line_is_bounded_whatever_it_is_given() -> None:
    scene = Scene()
    scene.logs.listener(settled(Reason.EXHAUSTED, error="\x1b" * 10**6, task="t" * 10**6))
    scene.logs.log.info("m" * 10**6, request_id="r" * 10**6)
    assert all(len(line) < 4096 for line in scene.text().splitlines())


# The stream.


@pytest.mark.parametrize(
    ("stream", "no_color", "coloured"),
    [(Terminal, None, True), (Terminal, "", True), (Terminal, "1", False), (io.StringIO, None, False)],
)
def test_colours_are_for_terminals(
    stream: type[io.StringIO], no_color: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    scene = Scene(stream(), format="console")
    scene.logs.log.info("hello", queue="mail")
    assert ("\x1b[" in scene.text()) == coloured


@pytest.mark.parametrize(
    ("format", "stream", "json_written"),
    [("auto", io.StringIO, True), ("auto", Terminal, False), ("json", Terminal, True), ("console", io.StringIO, False)],
)
def test_the_format_follows_the_stream_unless_it_is_given(
    format: Format, stream: type[io.StringIO], json_written: bool
) -> None:
    scene = Scene(stream(), format=format)
    scene.logs.log.info("hello")
    assert scene.text().startswith("{") == json_written


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    logs = configure(namespace="billing")
    logs.log.info("hello")
    logs.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["namespace"] == "billing"


def test_a_stream_that_blocks_holds_no_job_up() -> None:
    stream = Held()
    scene = Scene(stream, level="error")
    scene.logs.log.error("blocked")
    assert stream.reached.wait(SOON)
    for _ in range(MOST_WAITING + 5):
        scene.logs.log.error("waits")
    assert scene.logs.dropped == 5
    stream.let_go.set()
    written = scene.lines()
    assert len(written) == 1 + MOST_WAITING + 1
    # Said whatever the level is.
    assert (written[-1]["level"], written[-1]["msg"][:25]) == ("warning", "5 log lines are missing h")


def test_a_stream_that_fails_raises_nothing() -> None:
    scene = Scene(Failing(1))
    scene.logs.listener(JobsPruned(1))  # directly: `tell` would hide an error
    scene.logs.listener(JobsPruned(2))
    assert [line["msg"] for line in scene.lines()] == [
        "2 rows removed whose time was over",
        "1 log lines are missing here: the stream was too slow, or failed",
    ]
    assert scene.logs.dropped == 1


def test_an_event_that_nobody_knows_harms_nobody() -> None:
    scene = Scene()
    surprise: Any = object()
    tell(scene.logs.listener, surprise)
    assert scene.text() == ""


def test_events_of_many_threads_keep_their_lines_apart() -> None:
    scene = Scene()
    event: Event = settled(Reason.RETRIED, error="x" * 250)

    def tell_many() -> None:
        for _ in range(50):
            scene.logs.listener(event)

    threads = [threading.Thread(target=tell_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(scene.lines()) == 400


# Around it.


def test_the_global_configurations_stay_as_they_are() -> None:
    root = logging.getLogger()

    def everything() -> tuple[Any, ...]:
        manager = set(logging.Logger.manager.loggerDict)
        return (
            structlog.get_config(),
            structlog.is_configured(),
            root.level,
            root.handlers[:],
            manager,
            logging.raiseExceptions,
        )

    before = everything()
    scene = Scene()
    scene.logs.log.bind(queue="mail").info("hello")
    scene.logs.listener(JobsPruned(1))
    scene.text()
    assert everything() == before


def test_a_global_configuration_does_not_get_in() -> None:
    structlog.configure(processors=[lambda *_: "not ours"])
    try:
        scene = Scene()
        scene.logs.log.bind(queue="mail").info("hello")
        assert scene.lines()[0]["msg"] == "hello"
    finally:
        structlog.reset_defaults()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format": "xml"}, "format must be one of auto, json, console, not 'xml'"),
        ({"level": "loud"}, "level must be one of debug, info, warning, error, not 'loud'"),
        ({"namespace": "a\nb"}, "namespace"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidOption, match=problem):
        configure(**options)


def test_a_program_that_ends_badly_still_writes_its_last_lines() -> None:
    program = (
        "from holdfast.observe.logging import configure\n"
        "logs = configure(format='json')\n"
        "for number in range(1000): logs.log.info(f'line {number}')\n"
        "raise SystemExit(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    assert [json.loads(line)["msg"] for line in ended.stderr.splitlines()] == [f"line {n}" for n in range(1000)]


def test_an_application_logs_its_jobs_and_never_their_arguments() -> None:
    scene = Scene(level="debug")
    app = Holdfast("memory://", on_event=scene.logs.listener)

    @app.task(queue="mail")
    def welcome(password: str) -> None: ...

    job = welcome.options(correlation_id="req-9").enqueue("s3cret")
    app.cancel(job.id)
    app.close()
    text = scene.text()
    assert "s3cret" not in text
    enqueued, cancelled = (json.loads(line) for line in text.splitlines())
    assert (enqueued["msg"].split(".")[-1], enqueued["job_id"], enqueued["queue"]) == (
        "welcome enqueued",
        job.id,
        "mail",
    )
    assert (cancelled["msg"], cancelled["job_id"]) == ("cancel requested: cancelled", job.id)


# The guide.


def test_the_guide_shows_what_is_really_written(tmp_path: Path) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    program, shown = re.findall(r"```(?:python|json)\n(.*?)```", guide, flags=re.DOTALL)[:2]
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )

    def constant(text: str) -> list[dict[str, str]]:
        return [{**json.loads(line), "ts": "", "job_id": ""} for line in text.splitlines()]

    assert constant(ended.stderr) == constant(shown)


def test_the_lines_of_the_guide_are_canonical() -> None:
    shown = [json.loads(line) for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    assert len(shown) == 4
    for line in shown:
        assert list(line) == [key for key in CANONICAL_KEYS if key in line]
