"""Bar plots as SVG, written by hand: nothing to install, and a picture that looks the same everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 760
LABEL = 190
VALUE = 110
BAR = 16
GAP = 6
HEAD = 34
SPACE = 18
COLOURS = {"holdfast": "#d9480f", "bare": "#868e96", "peer": "#1c7ed6"}
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #212529 }
.head { font-weight: 600; font-size: 13px }
.unit { fill: #868e96 }
@media (prefers-color-scheme: dark) { text { fill: #dee2e6 } }
"""


@dataclass(frozen=True)
class Bar:
    """One bar: what it is called, its length, the number behind it as text, and whose it is."""

    label: str
    value: float
    shown: str
    kind: str


@dataclass(frozen=True)
class Panel:
    """The bars of one figure, on one scale that begins at zero."""

    title: str
    note: str
    bars: Sequence[Bar]


def svg(title: str, panels: Sequence[Panel]) -> str:
    """The plot: panels below each other."""
    parts: list[str] = []
    top = SPACE
    for panel in panels:
        parts.append(
            f'<text class="head" x="0" y="{top + 14}">{escape(panel.title)} '
            f'<tspan class="unit">{escape(panel.note)}</tspan></text>'
        )
        top += HEAD
        longest = max((bar.value for bar in panel.bars), default=0.0) or 1.0
        for bar in panel.bars:
            length = max(1.0, (WIDTH - LABEL - VALUE) * bar.value / longest)
            middle = top + BAR - 4
            parts += [
                f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>',
                f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="{BAR}" rx="2" fill="{COLOURS[bar.kind]}"/>',
                f'<text x="{LABEL + length + 6:.1f}" y="{middle}">{escape(bar.shown)}</text>',
            ]
            top += BAR + GAP
        top += SPACE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        f'role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )
