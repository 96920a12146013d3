"""The results of a run, read back from its JSON lines: medians, spreads, and who failed."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import ENOUGH


@dataclass
class Entrant:
    """One contestant on one engine: what it is, what it showed in each round, and where it failed."""

    engine: str
    name: str
    kind: str
    info: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    """With what each figure was measured: if that failed in a later round, none of its figures is one."""
    short: dict[str, float] = field(default_factory=dict)
    """Figures of which a round was too short, with the seconds it lasted."""

    @property
    def title(self) -> str:
        """Its name as people write it; peers of one library that run in different ways keep their own names apart."""
        lib = str(self.info.get("lib", ""))
        return lib if self.kind != "peer" or _plain(lib) == _plain(self.name) else self.name

    @property
    def marked(self) -> str:
        """Its title, with a star if its handler is called per batch."""
        return f"{self.title}*" if self.batch else self.title

    @property
    def batch(self) -> str:
        """How it differs from one handler call and one settlement per job; empty if it does not."""
        return str(self.info.get("batch", ""))

    @property
    def searched(self) -> str:
        """In which sizes it runs, if those were searched for here, beyond what its documentation says."""
        return str(self.info.get("searched", ""))

    @property
    def python(self) -> bool:
        return str(self.info.get("language", "")).lower() == "python"

    def value(self, figure: str) -> float | None:
        """The median over the rounds; None if it was not measured, or failed on the way."""
        seen = self.seen.get(figure)
        return statistics.median(seen) if seen else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass
class Results:
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """On what, when and how often each engine was measured: one file may hold runs of single engines."""
    entrants: dict[tuple[str, str], Entrant] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Results":
        return cls.of(path.read_text().splitlines())

    @classmethod
    def of(cls, lines: Iterable[str]) -> "Results":
        results = cls()
        for line in lines:
            results._add(json.loads(line))
        for entrant in results.entrants.values():
            for figure, group in entrant.groups.items():  # a figure that failed in a later round is none
                if group in entrant.errors:
                    entrant.seen.pop(figure, None)
        return results

    def _add(self, record: dict[str, Any]) -> None:
        if record["figure"] == "machine":
            self.machines[record["engine"]] = record["info"]
            return
        place = (record["engine"], record["contestant"])
        entrant = self.entrants.setdefault(place, Entrant(*place, record["kind"]))
        if "error" in record:
            entrant.errors[record["figure"]] = record["error"]
        elif record["figure"] == "info":
            entrant.info = record["info"]
            entrant.errors.pop("info", None)
        else:
            entrant.seen.setdefault(record["figure"], []).append(record["value"])
            entrant.groups[record["figure"]] = record.get("group", record["figure"])
            if record.get("seconds", 0.0) < ENOUGH * record.get("wanted", 0.0):
                entrant.short[record["figure"]] = record["seconds"]

    @property
    def is_try(self) -> bool:
        """Whether it was run at a smaller scale: short measurements flatter who needs no time to get warm."""
        return any(said.get("scale", 1.0) < 1.0 for said in self.machines.values())

    @property
    def engines(self) -> Sequence[str]:
        return list(dict.fromkeys(engine for engine, _ in self.entrants))

    def of_engine(self, engine: str) -> list[Entrant]:
        return [entrant for (where, _), entrant in self.entrants.items() if where == engine]

    def ours(self, engine: str) -> Entrant | None:
        return self.entrants.get((engine, "holdfast"))

    def bare(self, engine: str) -> list[Entrant]:
        return [entrant for entrant in self.of_engine(engine) if entrant.kind == "bare"]

    def peers(self, engine: str) -> list[Entrant]:
        return [entrant for entrant in self.of_engine(engine) if entrant.kind == "peer"]
