"""The targets, as data, and the verdict on each: met, missed, or not measured. All are ratios within one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.figures import BY_NAME
from benchmarks.results import Entrant, Results

Beside = Literal["peer", "bare", "nothing"]
Verdict = Literal["met", "missed", "not measured"]

BOTH_ENQUEUES = ("enqueue_one", "enqueue_one_async")


def _any(entrant: Entrant) -> bool:
    return True


def _not_searched_for(entrant: Entrant) -> bool:
    return not entrant.searched


def _python(entrant: Entrant) -> bool:
    return entrant.python


def _python_but_huey(entrant: Entrant) -> bool:
    return entrant.python and not entrant.name.startswith("huey")


def _named(name: str) -> Callable[[Entrant], bool]:
    return lambda entrant: entrant.name == name


def _each_by_itself(entrant: Entrant) -> bool:
    return not entrant.batch


def _threads(entrant: Entrant) -> bool:
    return bool(entrant.info.get("threads"))


@dataclass(frozen=True)
class Target:
    """Ours beside theirs: at least so much of it, or at most, if less is better.

    `which`: the peers, or the bare loops, that count; the best of those that were measured is compared. `figures`: what
    may stand for theirs, if not the same figure.
    """

    engine: str
    figure: str
    limit: float
    beside: Beside = "peer"
    which: Callable[[Entrant], bool] = _not_searched_for
    words: str = "the best peer"
    figures: tuple[str, ...] = ()

    @property
    def more(self) -> bool:
        return BY_NAME[self.figure].more

    @property
    def wanted(self) -> str:
        """What is asked for, in words."""
        unit = BY_NAME[self.figure].unit
        limit = f"{'≥' if self.more else '≤'} {self.limit:g}"
        if self.beside == "nothing":
            return limit if unit == "ratio" else f"{limit} {unit}"
        return f"{limit} × {self.words}"


def _per_engine(engines: Sequence[str], figure: str, limit: float, **rest: object) -> list[Target]:
    return [Target(engine, figure, limit, **rest) for engine in engines]  # type: ignore[arg-type]


BARE_LOOP = "the bare loop"
A_THOUSAND = "the best peer, pg-boss in batches of 1,000"
IN_ANY_SIZE = "the best peer, pg-boss also in the fastest sizes that a search found"
EACH_BY_ITSELF = "the best peer that runs and settles each job by itself"
BEST_PYTHON = "the best Python peer"

TARGETS: Sequence[Target] = (
    Target("redis", "drain", 3, which=_named("bullmq"), words="BullMQ"),
    Target("redis", "drain", 15, which=_python, words=BEST_PYTHON),
    Target("redis", "drain", 0.5, "bare", which=_named("bare"), words=BARE_LOOP),
    Target("redis", "enqueue_bulk", 3, which=_named("bullmq"), words="BullMQ"),
    *(
        Target("redis", figure, 0.85, "bare", which=_named(name), words=f"a bare script call by {driver}")
        for name, driver in (("bare", "redis-py"), ("bare-hiredis", "hiredis on a bare socket"))
        for figure in BOTH_ENQUEUES
    ),
    Target(
        "redis", "enqueue_one", 1, which=_python_but_huey, words="every Python peer but Huey", figures=BOTH_ENQUEUES
    ),
    Target(
        "redis",
        "enqueue_one_async",
        1,
        which=_python_but_huey,
        words="every Python peer but Huey",
        figures=BOTH_ENQUEUES,
    ),
    Target("redis", "latency_p50", 1.1),
    Target("postgres", "drain", 2.5, words=A_THOUSAND),
    Target("postgres", "drain", 0.5, "bare", words=BARE_LOOP),
    Target("postgres", "drain2", 2, words=A_THOUSAND),
    Target("postgres", "enqueue_bulk", 2),
    Target("postgres", "enqueue_one", 1, words="every peer", figures=BOTH_ENQUEUES),
    Target("postgres", "enqueue_one_async", 1, words="every peer", figures=BOTH_ENQUEUES),
    Target("postgres", "enqueue_one", 0.7, "bare", words="a bare INSERT"),
    Target("postgres", "enqueue_one_async", 0.7, "bare", words="a bare INSERT"),
    Target("postgres", "latency_p50", 1),
    Target("postgres", "growth", 0.8, "nothing"),
    Target("postgres", "snapshot", 0.8, "nothing"),
    Target("sqlite", "drain", 10, which=_named("huey"), words="Huey"),
    Target("sqlite", "enqueue_one", 1.1, which=_named("huey"), words="Huey"),
    Target("sqlite", "latency_p50", 0.5, which=_named("huey"), words="Huey"),
    Target("mariadb", "drain", 0.5, "bare", words=BARE_LOOP),
    Target("memory", "drain", 0.4, "bare", words="asyncio alone"),
    *_per_engine(("redis", "postgres", "sqlite"), "sync_drain", 2, which=_threads, words="the best thread-based peer"),
    *_per_engine(("redis", "postgres", "sqlite"), "cpu", 0.3, which=_python, words=BEST_PYTHON),
    *_per_engine(("redis", "postgres", "sqlite", "mariadb"), "rss_process", 60, beside="nothing"),
    *_per_engine(("redis", "postgres", "mariadb"), "idle", 60, beside="nothing"),
    Target("sqlite", "idle_cpu", 1, "nothing"),
)

ALSO: Sequence[Target] = (
    Target("postgres", "drain", 2.5, which=_any, words=IN_ANY_SIZE),
    Target("postgres", "drain2", 2, which=_any, words=IN_ANY_SIZE),
    Target("postgres", "drain", 2.5, which=_each_by_itself, words=EACH_BY_ITSELF),
    Target("postgres", "drain2", 2, which=_each_by_itself, words=EACH_BY_ITSELF),
)
"""The same figures beside whoever is fastest, and beside those that do what ours does: told too, and no target."""


@dataclass(frozen=True)
class Judged:
    """A target and what became of it. `ratio` is ours as a part of theirs, or ours itself if it stands alone."""

    target: Target
    verdict: Verdict
    ours: float | None = None
    theirs: float | None = None
    ratio: float | None = None
    rival: str = ""
    reason: str = ""


def judge(target: Target, results: Results) -> Judged:
    """The verdict on one target."""
    ours = results.ours(target.engine)
    value = ours.value(target.figure) if ours else None
    if value is None:
        return Judged(target, "not measured", reason="ours was not measured")
    if target.beside == "nothing":
        return Judged(target, _verdict(target, value), value, ratio=value)
    rivals = _rivals(target, results)
    if not rivals:
        return Judged(target, "not measured", value, reason="nothing to compare with was measured")
    theirs, rival = (max if target.more else min)(rivals)
    ratio = value / theirs
    return Judged(target, _verdict(target, ratio), value, theirs, ratio, rival)


def _rivals(target: Target, results: Results) -> list[tuple[float, str]]:
    entrants = results.bare(target.engine) if target.beside == "bare" else results.peers(target.engine)
    return [
        (value, entrant.marked)
        for entrant in entrants
        if target.which(entrant)
        for figure in target.figures or (target.figure,)
        if (value := entrant.value(figure)) is not None
    ]


def _verdict(target: Target, ratio: float) -> Verdict:
    return "met" if (ratio >= target.limit if target.more else ratio <= target.limit) else "missed"


def judged(results: Results) -> list[Judged]:
    """All targets of the engines that took part."""
    return [judge(target, results) for target in TARGETS if target.engine in results.engines]


def also_told(results: Results) -> list[Judged]:
    """What is no target, but belongs beside one: only where a peer that works by the batch was measured."""
    return [
        judge(target, results)
        for target in ALSO
        if any(peer.batch and peer.value(target.figure) for peer in results.peers(target.engine))
    ]
