"""A run: every figure of an engine, the contestants in turns, one JSON line per measurement.

What ran into a file before stays there, except what is measured anew: so a run may be made engine by engine.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.contestants import OURS, Contestant, ContestantFailedError, Program
from benchmarks.figures import ENOUGH, MEASURED
from benchmarks.growth import growth
from benchmarks.marks import VARIABLE, Marks, memory_folder
from benchmarks.measuring import Bench, Figures
from benchmarks.servers import BACKENDS, Backend
from benchmarks.snapshot import held_snapshot

DRAIN_SECONDS = 2.5
ENQUEUE_SECONDS = 2.0
BULK_SECONDS = 2.0
TRIAL = 1_000
TRIALS = 6
STEP = 50.0
MOST = 1_000_000
LATENCIES = 150
IDLE_SECONDS = 60.0
"""An idle worker sends about one command a second, and a pass of retention brings half a dozen at once: within 20 s the
same worker shows 42 to 72 a minute (Redis, 54 on the average)."""
BACKLOG = 1_000_000
HELD_SECONDS = 120.0

EXPECTED: Mapping[str, float] = {
    "enqueue": 4.5,
    "enqueue_bulk": 3.0,
    "drain": 5.5,
    "drain2": 5.5,
    "sync_drain": 4.0,
    "latency": 5.0,
}
"""Seconds that a contestant takes for a round of these, with filling, starting and stopping."""
SIZING = 1.5
"""The first round takes so many times as long: it finds out how many jobs fill its time."""
ALONE: Mapping[str, float] = {"growth": 60.0, "snapshot": HELD_SECONDS + 30.0}

OF_DRAIN = ("cpu", "rss", "rss_process", "wal_bytes", "commits", "dead_rows")


@dataclass
class Plan:
    """What is asked for."""

    engine: str
    peers: Sequence[Contestant] = ()
    missing: Sequence[tuple[str, str]] = ()
    runs: int = 3
    scale: float = 1.0
    groups: Sequence[str] = MEASURED

    @property
    def contestants(self) -> Sequence[Contestant]:
        return (*OURS.get(self.engine, ()), *self.peers)

    def expected(self) -> float:
        """About how many seconds it takes."""
        seconds = 10.0
        for group in self.groups:
            if self.engine == "memory" and group in ("drain2", "latency"):
                continue
            if group in EXPECTED:
                count = sum(_may_take_part(one, group) for one in self.contestants)
                rounds = (_rounds(self.runs, count) + SIZING - 1) * max(self.scale, 0.25)  # to start takes its time
                seconds += EXPECTED[group] * rounds * count
            elif self.measures_alone(group):
                seconds += ALONE[group] * self.scale
            if group == "latency":
                seconds += IDLE_SECONDS * self.scale
        return seconds

    def measures_alone(self, group: str) -> bool:
        """Whether this engine has that figure of ours alone."""
        return self.engine == "postgres" if group == "snapshot" else self.engine not in ("memory", "rabbitmq")


@dataclass
class _Sizes:
    """How many jobs each measurement of a contestant takes, so that it lasts as long as it should."""

    scale: float
    counts: dict[str, int] = field(default_factory=dict)

    def measured(self, name: str, wanted: float, measure: Callable[[int], Figures], like: str = "") -> Figures:
        """The first measurement that lasts long enough. Shorter ones only tell how many jobs that takes.

        `like`: another measurement of this contestant that took about as many, if it was made before.

        A rate from few jobs says little about one from many: a runtime that compiles what runs often does twice as much
        when it is warm. So no measurement is sized by the rate of a much shorter one and then believed, whatever it
        lasts.
        """
        wanted *= self.scale
        count = self.counts.get(name) or self.counts.get(like, TRIAL)
        seen = measure(count)
        for _ in range(TRIALS):
            if seen["seconds"] >= ENOUGH * wanted or count >= MOST:
                break
            count = min(MOST, int(count * min(STEP, 1.2 * wanted / max(seen["seconds"], 0.001))))
            seen = measure(count)
        self.counts[name] = count
        return {**seen, "wanted": wanted}


class Run:
    """One engine."""

    def __init__(self, plan: Plan, out: TextIO, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._out = out
        self._tell = tell
        self._sizes: dict[str, _Sizes] = defaultdict(lambda: _Sizes(plan.scale))

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as text, self._marks() as marks:
            folder = Path(text)
            with BACKENDS[self._plan.engine](folder) as backend:
                said = {**machine(), "server": backend.version(), "runs": self._plan.runs, "scale": self._plan.scale}
                self._write(figure="machine", info=said)
                benches = list(self._benches(backend, marks, folder))
                for group in self._plan.groups:
                    self._group(group, backend, benches)

    def _benches(self, backend: Backend, marks: Marks, logs: Path) -> Iterator[Bench]:
        for name, reason in self._plan.missing:
            self._write(contestant=name, kind="peer", figure="info", error=reason)
        environment = {**backend.environment(), VARIABLE: str(marks.path)}
        for contestant in self._plan.contestants:
            try:
                program = Program(contestant, environment, logs)
            except ContestantFailedError as error:
                self._write(contestant=contestant.name, kind=contestant.kind, figure="info", error=str(error))
                continue
            info = {name: value for name, value in program.info.items() if name not in ("pending", "verbs")}
            self._write(contestant=contestant.name, kind=contestant.kind, figure="info", info=info)
            yield Bench(backend, program, marks)

    def _group(self, group: str, backend: Backend, benches: Sequence[Bench]) -> None:
        match group:
            case "growth":
                if self._plan.measures_alone(group):
                    self._ours(group, lambda: growth(self._growing(backend), self._backlog()))
            case "snapshot":
                if self._plan.measures_alone(group):
                    backend.clean()
                    self._ours(group, lambda: held_snapshot(backend.url, HELD_SECONDS * self._plan.scale))
            case _:
                measure = getattr(self, f"_{group}")
                self._in_turns(group, [bench for bench in benches if _takes_part(bench, group)], measure)

    def _growing(self, backend: Backend) -> str:
        backend.clean()
        return backend.url

    def _backlog(self) -> int:
        return max(2_000, int(BACKLOG * self._plan.scale))

    def _ours(self, group: str, measure: Callable[[], Figures]) -> None:
        """A figure of ours alone, which compares within itself: once."""
        self._tell(f"{self._plan.engine}: {group}")
        who = {"contestant": "holdfast", "kind": "holdfast", "group": group}
        try:
            for figure, value in measure().items():
                self._write(**who, figure=figure, run=0, value=value)
        except Exception as error:
            self._write(**who, figure=group, error=repr(error))

    def _in_turns(
        self, group: str, benches: list[Bench], measure: Callable[[Bench, _Sizes, int], dict[str, Figures]]
    ) -> None:
        """Every contestant in every round; each round begins with the next of them. Who fails is out of this group."""
        rounds = _rounds(self._plan.runs, len(benches))
        for number in range(rounds):
            names = ", ".join(bench.program.contestant.name for bench in benches)
            self._tell(f"{self._plan.engine}: {group}, round {number + 1} of {rounds}: {names or 'nobody'}")
            first = number % max(1, len(benches))
            for bench in (*benches[first:], *benches[:first]):
                contestant = bench.program.contestant
                who = {"contestant": contestant.name, "kind": contestant.kind, "group": group}
                try:
                    for figure, seen in measure(bench, self._sizes[contestant.name], number).items():
                        self._write(**who, figure=figure, run=number, **seen)
                except ContestantFailedError as error:
                    self._write(**who, figure=group, error=str(error))
                    benches = [other for other in benches if other is not bench]

    # The groups: what one contestant shows in one round, by figure.

    def _enqueue(self, bench: Bench, sizes: _Sizes, number: int) -> dict[str, Figures]:
        return {
            verb: self._enqueued(bench, sizes, verb, ENQUEUE_SECONDS)
            for verb in ("enqueue_one", "enqueue_one_async")
            if bench.program.can(verb)
        }

    def _enqueue_bulk(self, bench: Bench, sizes: _Sizes, number: int) -> dict[str, Figures]:
        return {"enqueue_bulk": self._enqueued(bench, sizes, "enqueue_bulk", BULK_SECONDS)}

    @staticmethod
    def _enqueued(bench: Bench, sizes: _Sizes, verb: str, seconds: float) -> Figures:
        return _as_value(sizes.measured(verb, seconds, lambda count: bench.enqueue(verb, count)))

    def _drain(self, bench: Bench, sizes: _Sizes, number: int) -> dict[str, Figures]:
        seen = self._drained(bench, sizes, "drain")
        return {"drain": _as_value(seen)} | {name: {"value": seen[name]} for name in OF_DRAIN if name in seen}

    def _drain2(self, bench: Bench, sizes: _Sizes, number: int) -> dict[str, Figures]:
        return {"drain2": _as_value(self._drained(bench, sizes, "drain2", workers=2))}

    def _sync_drain(self, bench: Bench, sizes: _Sizes, number: int) -> dict[str, Figures]:
        return {"sync_drain": _as_value(self._drained(bench, sizes, "sync_drain", plain=True))}

    @staticmethod
    def _drained(bench: Bench, sizes: _Sizes, name: str, *, workers: int = 1, plain: bool = False) -> Figures:
        def measure(count: int) -> Figures:
            return bench.drain(count, workers=workers, plain=plain)

        return sizes.measured(name, DRAIN_SECONDS, measure, like="drain")

    def _latency(self, bench: Bench, sizes: _Sizes, number: int) -> dict[str, Figures]:
        """Idle is looked at in the first round only, and of ours only: its targets stand alone."""
        count = max(40, int(LATENCIES * self._plan.scale))
        ours = bench.program.contestant.kind == "holdfast"
        idle = max(5.0, IDLE_SECONDS * self._plan.scale) if number == 0 and ours else 0.0
        return {name: {"value": value} for name, value in bench.latency(count, idle).items()}

    def _write(self, **fields: Any) -> None:
        fields = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in fields.items()}
        self._out.write(json.dumps({"engine": self._plan.engine, **fields}) + "\n")
        self._out.flush()

    @staticmethod
    @contextmanager
    def _marks() -> Iterator[Marks]:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=memory_folder()) as folder:
            yield Marks(Path(folder) / "marks")


def _as_value(seen: Figures) -> Figures:
    return {"value": seen["rate"], **{name: seen[name] for name in ("n", "seconds", "wanted")}}


def _takes_part(bench: Bench, group: str) -> bool:
    """What a contestant can, and does not leave out. Who lives in one process has no server to ask."""
    program = bench.program
    if group in program.info.get("without", ()) or not _may_take_part(program.contestant, group):
        return False
    match group:
        case "enqueue":
            return program.can("enqueue_one") or program.can("enqueue_one_async")
        case "enqueue_bulk":
            return program.can("enqueue_bulk")
        case "drain2" | "latency":
            return not program.info.get("fills_itself")
        case "sync_drain":
            return bool(program.info.get("threads"))
    return True


def _rounds(runs: int, contestants: int) -> int:
    """Who has nobody beside it is measured once."""
    return runs if contestants > 1 else 1


def _may_take_part(contestant: Contestant, group: str) -> bool:
    """A bare loop is one process with coroutines."""
    return contestant.kind != "bare" or group not in ("drain2", "sync_drain", "latency")


def machine() -> dict[str, Any]:
    """On what it ran."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def kept(path: Path, plans: Sequence[Plan]) -> list[str]:
    """The lines of earlier runs into this file, without those of what these plans measure anew."""
    anew = {plan.engine: plan.groups for plan in plans}
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if (record := json.loads(line)).get("group") not in anew.get(record["engine"], ())]


def run(plans: Sequence[Plan], path: Path) -> None:
    """All engines, one after the other. Every line is written when it is known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = kept(path, plans)
    expected = sum(plan.expected() for plan in plans)
    began = time.monotonic()

    def tell(what: str) -> None:
        minutes = (time.monotonic() - began) / 60
        print(f"[{minutes:.1f} of about {expected / 60:.0f} min] {what}", file=sys.stderr, flush=True)

    tell(f"{', '.join(plan.engine for plan in plans)}: about {expected / 60:.0f} minutes")
    with path.open("w") as out:
        out.writelines(f"{line}\n" for line in lines)
        out.flush()
        for plan in plans:
            Run(plan, out, tell).run()
    tell("done")
