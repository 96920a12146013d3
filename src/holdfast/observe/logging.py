"""Structured logs: one line for each event, as JSON for machines or as text for people, by structlog.

    logs = configure(level="info")
    app = Holdfast("sqlite:///jobs.db", on_event=logs.listener)
    logs.log.info("ready", queue="mail")
    logs.close()

A line has the keys `level`, `ts` and `msg`, and those of `Keys` that are known. Any other key is refused with
`UnknownLogKey` wherever it is bound or logged, whatever the level: what is not on the list cannot leak. The global
configuration of structlog and of the standard library's logging is neither read nor changed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Literal, Self, TextIO, Unpack, get_args

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from holdfast.errors import InvalidOption, shown
from holdfast.events import Event, QueueDeep
from holdfast.job import check_name
from holdfast.observe.lines import Keys, Level, line, printable
from holdfast.observe.writer import Outlet, Writer
from holdfast.ports import SYSTEM, Clock, Ports

Format = Literal["auto", "json", "console"]

MADE_HERE = ("level", "ts", "msg")
CANONICAL_KEYS = (*MADE_HERE, *Keys.__annotations__)
"""Every key that a line can have, in the order in which they are written."""

_LEVELS = get_args(Level)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_MESSAGE = 2_000
_LONGEST_VALUE = 300
_SHORT_WORKER_ID = 8
_DEEP_AGAIN_AFTER = 60.0
_MOST_MENTIONED = 1_000


class UnknownLogKey(InvalidOption):
    """A key that a log line cannot have."""


class Log(structlog.BoundLoggerBase):
    """A logger for the program's own lines. `bind` gives one whose lines all carry some keys."""

    def bind(self, **keys: Unpack[Keys]) -> Self:  # type: ignore[override]
        """The same log with these keys on every line. `UnknownLogKey` for one that is not on the list."""
        return super().bind(**_checked(keys))

    def debug(self, msg: str, /, **keys: Unpack[Keys]) -> None:
        """What only somebody who looks for an error wants to know."""
        self._say("debug", msg, keys)

    def info(self, msg: str, /, **keys: Unpack[Keys]) -> None:
        """What an operator may want to know."""
        self._say("info", msg, keys)

    def warning(self, msg: str, /, **keys: Unpack[Keys]) -> None:
        """What may need somebody's attention; the message says what to do."""
        self._say("warning", msg, keys)

    def error(self, msg: str, /, **keys: Unpack[Keys]) -> None:
        """What was not done, for good."""
        self._say("error", msg, keys)

    def _say(self, level: Level, msg: str, keys: Keys) -> None:
        checked = _checked(keys)  # before the level is looked at: a mistake shows even where its line would not
        with contextlib.suppress(structlog.DropEvent):
            [text], _ = self._process_event(level, msg, checked)
            self._logger.write(text)


class LogEvents:
    """A listener that writes one line for each event of at least that level.

    A queue that stays deep is mentioned once a minute. That a job starts, or succeeds, is only said at `debug`:
    above that, such events are not even made (`routine`).
    """

    def __init__(self, log: Log, *, level: Level, clock: Clock) -> None:
        self._log = log
        self._wanted = _from(level)
        self.routine = level == "debug"
        self._clock = clock
        self._mentioned: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Write the line of the event."""
        if isinstance(event, QueueDeep) and not self._worth_mentioning(event.queue):
            return
        said = line(event)
        if said.level in self._wanted:  # most are not, and are spared the way through structlog
            self._log._say(said.level, said.msg, said.keys)

    def _worth_mentioning(self, queue: str) -> bool:
        """Every single enqueue on a deep queue tells that it is deep."""
        now = self._clock.monotonic()
        if now - self._mentioned.get(queue, -_DEEP_AGAIN_AFTER) < _DEEP_AGAIN_AFTER:
            return False
        if len(self._mentioned) >= _MOST_MENTIONED:
            self._mentioned.clear()
        self._mentioned[queue] = now
        return True


class Logs:
    """What `configure` returns: `listener` for events, `log` for the program's own lines."""

    def __init__(self, log: Log, listener: LogEvents, writer: Writer) -> None:
        self.log = log
        self.listener = listener
        self._writer = writer
        # The last lines before an unexpected end are the ones that are needed most.
        atexit.register(self.close)

    @property
    def dropped(self) -> int:
        """How many lines are missing, because the stream was too slow or failed."""
        return self._writer.dropped

    def close(self) -> None:
        """Write what is left, for two seconds at most. Later lines are dropped. The stream itself stays open."""
        atexit.unregister(self.close)
        self._writer.close()


def configure(
    *,
    format: Format = "auto",
    level: Level = "info",
    stream: TextIO | None = None,
    namespace: str = "holdfast",
    ports: Ports = SYSTEM,
) -> Logs:
    """Logs of at least that level on a stream (None: standard error).

    `auto` is `console` on a terminal and `json` elsewhere. The console has colours on a terminal, unless the
    environment has a `NO_COLOR` that is not empty.
    """
    if format not in get_args(Format):
        raise InvalidOption(f"format must be one of {', '.join(get_args(Format))}, not {shown(format)}")
    if level not in _LEVELS:
        raise InvalidOption(f"level must be one of {', '.join(_LEVELS)}, not {shown(level)}")
    check_name("namespace", namespace)
    stream = stream or sys.stderr
    terminal = stream.isatty()
    console = format == "console" or (format == "auto" and terminal)
    colours = terminal and not os.environ.get("NO_COLOR")
    rendered = [_canonical(ports.clock), *(_console(colours=colours) if console else _json())]
    outlet = Outlet(stream)

    def confess(missing: int) -> None:
        # Whatever the level: what is missing may have been errors.
        straight = Log(outlet, rendered, {"namespace": namespace})
        straight.warning(f"{missing} log lines are missing here: the stream was too slow, or failed")

    writer = Writer(outlet, confess=confess, spawner=ports.spawner)
    log = Log(writer, [_at_least(level), *rendered], {"namespace": namespace})
    return Logs(log, LogEvents(log, level=level, clock=ports.clock), writer)


def _from(level: Level) -> frozenset[str]:
    return frozenset(_LEVELS[_LEVELS.index(level) :])


def _checked(keys: Keys) -> dict[str, object]:
    for key, value in keys.items():
        if key in MADE_HERE:
            raise UnknownLogKey(f"the log itself sets {key!r}; it cannot be given")
        _require_canonical(key)
        if not isinstance(value, str | None):
            raise InvalidOption(f"the log key {key!r} must be text, not a {type(value).__name__}")
    return dict(keys)


def _require_canonical(key: str) -> None:
    if key not in CANONICAL_KEYS:
        raise UnknownLogKey(
            f"{shown(key)} is not a key that logs may have: use one of {', '.join(Keys.__annotations__)}, "
            f"or say it in the message, but never a payload, an argument or a result"
        )


# Processors: what structlog does with a line, one after another.


def _at_least(level: Level) -> Processor:
    wanted = _from(level)

    def at_least(logger: WrappedLogger, name: str, entry: EventDict) -> EventDict:
        if name not in wanted:
            raise structlog.DropEvent
        return entry

    return at_least


def _canonical(clock: Clock) -> Processor:
    def canonical(logger: WrappedLogger, name: str, entry: EventDict) -> EventDict:
        said: EventDict = {
            "level": name,
            "ts": _timestamp(clock.now()),
            "msg": printable(entry.pop("event"), _LONGEST_MESSAGE),
        }
        for key in Keys.__annotations__:
            if value := entry.pop(key, None):
                said[key] = printable(value, _LONGEST_VALUE)
        for key in entry:
            _require_canonical(key)
        return said

    return canonical


def _timestamp(microseconds: int) -> str:
    moment = _EPOCH + timedelta(microseconds=microseconds)
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _json() -> list[Processor]:
    return [structlog.processors.JSONRenderer()]


def _console(*, colours: bool) -> list[Processor]:
    def short(logger: WrappedLogger, name: str, entry: EventDict) -> EventDict:
        if "worker_id" in entry:
            entry["worker_id"] = entry["worker_id"][:_SHORT_WORKER_ID]
        return entry

    return [
        short,
        structlog.dev.ConsoleRenderer(colors=colours, event_key="msg", timestamp_key="ts", sort_keys=False),
    ]
