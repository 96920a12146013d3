"""What the trials showed, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.mutation.survivors import Known
from tests.mutation.trials import Trial, Verdict


class Report(NamedTuple):
    """The trials of each module, the reasons that are known, and the score that each module must have."""

    trials: Mapping[str, Sequence[Trial]]
    reasons: Mapping[Known, str]
    least_score: float

    def complaints(self) -> list[str]:
        """Why this is not good enough."""
        found = [
            f"{module}: a score of {score(trials):.1f} % is below {self.least_score:g} %"
            for module, trials in self.trials.items()
            if score(trials) < self.least_score
        ]
        found += [
            f"{place(trial)}: survived, and survivors.toml has no reason for it"
            for trial in self.survivors()
            if not self.reasons.get(Known.of(trial.change))
        ]
        existing = {Known.of(trial.change) for trials in self.trials.values() for trial in trials}
        found += [
            f"{known.module} {known.function}: survivors.toml has a reason for what does not exist: {known.after}"
            for known in self.reasons
            if known.module in self.trials and known not in existing
        ]
        return found

    def survivors(self) -> list[Trial]:
        """The trials that no test noticed."""
        return [trial for trials in self.trials.values() for trial in trials if trial.verdict is Verdict.SURVIVED]


def count(trials: Sequence[Trial], verdict: Verdict) -> int:
    """How many ended like that."""
    return sum(trial.verdict is verdict for trial in trials)


def score(trials: Sequence[Trial]) -> float:
    """Percent that were noticed, one way or the other."""
    return 100 * (1 - count(trials, Verdict.SURVIVED) / len(trials)) if trials else 100.0


def place(trial: Trial) -> str:
    """Where the change is."""
    return f"{trial.change.module}:{trial.change.line} {trial.change.function or '(on import)'}"


def as_text(report: Report) -> str:
    """Survivors with their diffs, a table, and what is to be done."""
    lines = []
    for trial in report.survivors():
        reason = report.reasons.get(Known.of(trial.change)) or "NO REASON KNOWN"
        lines += [place(trial), f"  - {trial.change.before}", f"  + {trial.change.after}", f"  {reason}", ""]
    head = f"{'module':<26} {'mutants':>7} {'killed':>7} {'timed out':>9} {'survived':>8} {'score':>7}"
    lines += [head, "-" * len(head)]
    everything = [trial for trials in report.trials.values() for trial in trials]
    for name, trials in [*report.trials.items(), ("together", everything)]:
        counts = [count(trials, verdict) for verdict in (Verdict.KILLED, Verdict.TIMED_OUT, Verdict.SURVIVED)]
        lines.append(
            f"{name:<26} {len(trials):>7} {counts[0]:>7} {counts[1]:>9} {counts[2]:>8} {score(trials):>5.1f} %"
        )
    return "\n".join([*lines, "", *(report.complaints() or ["every survivor has a reason"])])


def as_json(report: Report) -> dict[str, Any]:
    """The same for programs, with every trial."""
    return {
        "modules": {
            module: {
                "mutants": len(trials),
                **{verdict.value.replace(" ", "_"): count(trials, verdict) for verdict in Verdict},
                "score": round(score(trials), 1),
                "trials": [
                    {**trial.change._asdict(), "verdict": trial.verdict.value, "test": trial.test}
                    | ({"reason": reason} if (reason := report.reasons.get(Known.of(trial.change))) else {})
                    for trial in trials
                ],
            }
            for module, trials in report.trials.items()
        },
        "complaints": report.complaints(),
    }
