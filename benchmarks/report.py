"""What a run showed: on the terminal, and as the documentation's page, plots and the README's table."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figures import BY_NAME, FIGURES, Figure
from benchmarks.plot import Bar, Panel, svg
from benchmarks.results import Entrant, Results
from benchmarks.targets import TARGETS, Judged, Target, also_told, judge, judged

TITLES = {
    "redis": "Redis",
    "postgres": "PostgreSQL",
    "sqlite": "SQLite",
    "mariadb": "MariaDB",
    "memory": "memory",
    "rabbitmq": "RabbitMQ",
}
PLOTTED = ("drain", "enqueue_bulk", "enqueue_one", "latency_p50", "cpu")
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
BULK = (
    "enqueue_bulk: ours is one call, which reads an iterator; peers are called with a list of a thousand, one call "
    "after the other. Other ways to call either: docs/decisions/0011-how-speed-is-measured.md"
)
_COLOURS = {"met": "green", "missed": "red", "not measured": "yellow"}


def print_report(results: Results) -> bool:
    """Every engine's table and the verdicts. False if a target was missed."""
    console = Console()
    for engine in engines(results):
        console.print(_terminal_table(engine, results))
    verdicts = judged(results)
    table = Table("engine", "figure", "ours", "beside", "ratio", "wanted", "verdict")
    for one in verdicts:
        table.add_row(*_verdict_row(one)[:-1], f"[{_COLOURS[one.verdict]}]{one.verdict}")
    console.print(table)
    for line in (*beside(results), *batches(results), *failures(results), *too_short(results)):
        console.print(line, markup=False, highlight=False)
    if results.is_try:
        console.print("[yellow]a try at a smaller scale: no figure and no verdict above is one", highlight=False)
    return all(one.verdict != "missed" for one in verdicts)


def _terminal_table(engine: str, results: Results) -> Table:
    entrants = ranked(results.of_engine(engine))
    table = Table(title=TITLES[engine])
    table.add_column("figure")
    for entrant in entrants:
        table.add_column(entrant.marked or entrant.name, justify="right")
    for figure in FIGURES:
        values = [entrant.value(figure.name) for entrant in entrants]
        if any(value is not None for value in values):
            table.add_row(f"{figure.name} [dim]{figure.unit}", *(_cell(figure, value) for value in values))
    return table


def _cell(figure: Figure, value: float | None) -> str:
    return "–" if value is None else figure.shown(value)


def engines(results: Results) -> list[str]:
    """Those that took part, in one order whatever ran first."""
    return [engine for engine in TITLES if engine in results.engines]


def ranked(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Ours first, then the bare loop, then the peers, the fastest drain first."""
    order = {"holdfast": 0, "bare": 1, "peer": 2}
    return sorted(entrants, key=lambda one: (order[one.kind], -(one.value("drain") or 0.0)))


def _verdict_row(one: Judged) -> tuple[str, str, str, str, str, str, str]:
    figure = BY_NAME[one.target.figure]
    theirs = f"{figure.shown(one.theirs)} ({one.rival})" if one.theirs is not None else one.reason
    alone = one.target.beside == "nothing"
    return (
        TITLES[one.target.engine],
        one.target.figure,
        _cell(figure, one.ours),
        theirs,
        "–" if one.ratio is None or alone else f"{one.ratio:.2f}",
        one.target.wanted,
        one.verdict,
    )


def beside(results: Results) -> Iterator[str]:
    """What belongs beside a verdict: the same figure beside peers that have the same contract, and RabbitMQ's drain."""
    for one in also_told(results):
        engine, figure, ours, theirs, ratio, _, _ = _verdict_row(one)
        yield f"{engine}: {figure}: {one.target.words}: {theirs}; ours {ours}, ratio {ratio}"
    if any(peer.value("enqueue_bulk") for peer in results.entrants.values() if peer.kind == "peer"):
        yield BULK
    drains = {name: who.value("drain") for name in ("redis", "postgres") if (who := results.ours(name))}
    for peer in results.peers("rabbitmq"):
        if rate := peer.value("drain"):
            shown = [f"{ours:,.0f} on {TITLES[name]} ({ours / rate:.1f}×)" for name, ours in drains.items() if ours]
            yield f"RabbitMQ: drain: {rate:,.0f} ({peer.title}); ours {', '.join(shown) or 'was not measured'}"


def batches(results: Results) -> Iterator[str]:
    """What a star after a name means."""
    for entrant in results.entrants.values():
        if entrant.batch:
            yield f"{TITLES[entrant.engine]}: {entrant.marked}: {entrant.batch}"


def failures(results: Results) -> Iterator[str]:
    """Who could not be measured, and why: its last line is the reason."""
    for entrant in results.entrants.values():
        for figure, error in entrant.errors.items():
            what = "did not start" if figure == "info" else figure
            lines = [line for line in error.splitlines() if line.strip()]
            yield f"{TITLES[entrant.engine]}: {entrant.name}: {what}: {lines[-1].strip() if lines else error}"


def too_short(results: Results) -> Iterator[str]:
    """Which figures come from a measurement that lasted less than it should."""
    for entrant in results.entrants.values():
        for figure, seconds in entrant.short.items():
            yield f"{TITLES[entrant.engine]}: {entrant.name}: {figure}: a round lasted {seconds:.1f} s only"


# The documentation.


def write_docs(results: Results, root: Path) -> None:
    """docs/benchmarks.md, a plot per engine, and the section of the README between its markers. Not of a mere try."""
    if results.is_try:
        scale = min(said.get("scale", 1.0) for said in results.machines.values())
        raise SystemExit(f"this was a try at scale {scale:g}: it is not written as figures")
    folder = root / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for engine in engines(results):
        (folder / f"{engine}.svg").write_text(engine_plot(engine, results))
    (root / "docs" / "benchmarks.md").write_text(page(results))
    readme = root / "README.md"
    readme.write_text(with_section(readme.read_text(), readme_section(results)))


def with_section(text: str, section: str) -> str:
    """The text with the part between the markers replaced."""
    before, found, rest = text.partition(BEGIN)
    _, also, after = rest.partition(END)
    if not found or not also:
        raise ValueError(f"the markers {BEGIN} and {END} are not there")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _ran(results: Results) -> str:
    said = next(iter(results.machines.values()), {})
    days = sorted({str(one.get("at", "an unknown day"))[:10] for one in results.machines.values()})
    rounds = sorted({int(one.get("runs", 0)) for one in results.machines.values()})
    return (
        f"`make bench` on {', '.join(days) or 'an unknown day'}: {said.get('cores', '?')} cores that client, worker "
        f"and server share, Python {said.get('python', '?')}; median of {' or '.join(map(str, rounds)) or '?'} runs, "
        "all contestants in turns."
    )


def _verdict_table(results: Results) -> str:
    return _table(
        ("engine", "figure", "Holdfast", "beside", "ratio", "wanted", "verdict"),
        [_verdict_row(one) for one in judged(results)],
    )


def readme_section(results: Results) -> str:
    """The README's part: a line on how, and a row per figure that has a target."""
    rows = []
    for engine in engines(results):
        figures = dict.fromkeys(target.figure for target in TARGETS if target.engine == engine)
        rows += [_readme_row(engine, BY_NAME[name], results) for name in figures]
    header = ("engine", "figure", "Holdfast", "best peer", "ratio", "of the bare loop", "targets")
    notes = [f"* {line}" for line in (*beside(results), *batches(results))]
    more = "Every figure, the peers' settings and the plots: [docs/benchmarks.md](docs/benchmarks.md)."
    return "\n\n".join([_ran(results), _table(header, rows), *(["\n".join(notes)] if notes else []), more])


def _readme_row(engine: str, figure: Figure, results: Results) -> list[str]:
    targets = [one for one in TARGETS if (one.engine, one.figure) == (engine, figure.name)]
    alike = max((one.figures for one in targets), default=())
    peer = judge(Target(engine, figure.name, 1, figures=alike), results)
    bare = judge(Target(engine, figure.name, 1, "bare"), results)
    verdicts = [judge(one, results) for one in targets]
    of_bare = next((one.ratio for one in verdicts if one.target.beside == "bare"), bare.ratio)
    return [
        TITLES[engine],
        f"{figure.title}, {figure.unit}",
        _cell(figure, peer.ours),
        "–" if peer.theirs is None else f"{figure.shown(peer.theirs)} ({peer.rival})",
        "–" if peer.ratio is None else f"{peer.ratio:.2f}",
        "–" if of_bare is None else f"{of_bare:.2f}",
        "<br>".join(f"{one.target.wanted}: {_loud(one)}" for one in verdicts),
    ]


def _loud(one: Judged) -> str:
    return f"**{one.verdict}**" if one.verdict == "missed" else one.verdict


def engine_table(engine: str, results: Results) -> str:
    """A row per figure, a column per contestant."""
    entrants = ranked([one for one in results.of_engine(engine) if one.seen])
    rows = []
    for figure in FIGURES:
        values = [entrant.value(figure.name) for entrant in entrants]
        if any(value is not None for value in values):
            rows.append([f"{figure.title}, {figure.unit}", *(_cell(figure, value) for value in values)])
    return _table(["", *(entrant.marked for entrant in entrants)], rows)


def engine_plot(engine: str, results: Results) -> str:
    """The figures that matter most, as bars."""
    panels = []
    for name in PLOTTED:
        figure = BY_NAME[name]
        bars = [
            Bar(one.marked, value, figure.shown(value), one.kind)
            for one in results.of_engine(engine)
            if (value := one.value(name)) is not None
        ]
        if bars:
            bars.sort(key=lambda bar: -bar.value if figure.more else bar.value)
            note = f"{figure.unit}, {'more' if figure.more else 'less'} is better"
            panels.append(Panel(figure.title, note, bars))
    return svg(f"Benchmarks on {TITLES[engine]}", panels)


def page(results: Results) -> str:
    """docs/benchmarks.md."""
    parts = [
        "# Benchmarks",
        "*Generated by `python -m benchmarks report --docs` from the JSON lines of its runs; do not edit.*",
        _ran(results),
        "How it is measured, and why so: [decision 11](decisions/0011-how-speed-is-measured.md).",
        _machine_table(results),
        "## Targets",
        _verdict_table(results),
    ]
    if notes := [*beside(results), *batches(results)]:
        parts += ["\n".join(f"* {line}" for line in notes)]
    for engine in engines(results):
        parts += [
            f"## {TITLES[engine]}",
            f"![Benchmarks on {TITLES[engine]}](benchmarks/{engine}.svg)",
            engine_table(engine, results),
            _table(
                ("contestant", "version", "settings", "what a crash does"),
                [
                    [one.marked, *(str(one.info.get(key, "")) for key in ("version", "settings", "durability"))]
                    for one in ranked([one for one in results.of_engine(engine) if one.info])
                ],
            ),
        ]
    if failed := [*failures(results), *too_short(results)]:
        parts += ["## Not measured, or too short", "\n".join(f"* {line}" for line in failed)]
    return "\n\n".join(parts) + "\n"


def _machine_table(results: Results) -> str:
    keys = ("at", "server", "cores", "processor", "memory", "system", "python", "runs")
    rows = [
        [TITLES[engine], *(str(results.machines.get(engine, {}).get(key, "")) for key in keys)]
        for engine in engines(results)
    ]
    return _table(("engine", *keys), rows)
