"""Draws a page with the memory of a step before and after planning, without other packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ssdtrain.sizes import shown_bytes

__all__ = ["Line", "page"]

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 90, 20, 20, 40
POINTS_MAX = 2000
COLORS = ("#8a8f98", "#0b6bcb", "#c4501b", "#2f7d32")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em;max-width:62em}"
    "pre{background:#f4f5f7;padding:1em;overflow-x:auto}text{font:12px system-ui,sans-serif}"
)


@dataclass(frozen=True)
class Line:
    """Bytes from each second on, in order, up to the end of the step."""

    title: str
    points: Sequence[tuple[float, int]]
    end_s: float


def page(title: str, lines: Sequence[Line], limit_bytes: int, report: str) -> str:
    """Return an HTML page with the lines, the memory there is, and the report below."""
    # A step of kernels that take no time must not divide by 0.
    last_s = max(line.end_s for line in lines) or 1.0
    most = max(limit_bytes, *(nbytes for line in lines for _, nbytes in line.points)) * 1.05

    def place(seconds: float, nbytes: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * seconds / last_s
        down = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nbytes / most
        return f"{across:.1f},{down:.1f}"

    drawn = [_axes(most, last_s, place)]
    left, top = place(0, limit_bytes).split(",")
    drawn.append(
        f'<line x1="{left}" y1="{top}" x2="{WIDTH - RIGHT}" y2="{top}" stroke="#b00020" '
        f'stroke-dasharray="6 4"/><text x="{LEFT + 6}" y="{float(top) - 5:.1f}" fill="#b00020">'
        f"memory: {shown_bytes(limit_bytes)}</text>"
    )
    for number, line in enumerate(lines):
        color = COLORS[number % len(COLORS)]
        steps = " ".join(place(*point) for point in _stairs(line))
        drawn.append(
            f'<polyline points="{steps}" fill="none" stroke="{color}" stroke-width="1.6"/>'
            f'<text x="{WIDTH - RIGHT - 6}" y="{TOP + 14 + 16 * number}" text-anchor="end" '
            f'fill="{color}">{escape(line.title)}</text>'
        )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'
        f"<pre>{escape(report)}</pre></body></html>\n"
    )


def _axes(most: float, last_s: float, place: object) -> str:
    assert callable(place)
    parts = []
    for quarter in range(5):
        _, down = place(0, most * quarter / 4).split(",")
        across, _ = place(last_s * quarter / 4, 0).split(",")
        parts.append(
            f'<line x1="{LEFT}" y1="{down}" x2="{WIDTH - RIGHT}" y2="{down}" stroke="#e2e4e8"/>'
            f'<text x="{LEFT - 8}" y="{float(down) + 4:.1f}" text-anchor="end">'
            f"{shown_bytes(most * quarter / 4)}</text>"
            f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{last_s * quarter / 4:.3g} s</text>"
        )
    return "".join(parts)


def _stairs(line: Line) -> list[tuple[float, int]]:
    """Return the corners of a line, with the highest point of each stretch of points."""
    stretch = max(1, -(-len(line.points) // POINTS_MAX))
    kept = [
        (line.points[start][0], max(nbytes for _, nbytes in line.points[start : start + stretch]))
        for start in range(0, len(line.points), stretch)
    ]
    corners: list[tuple[float, int]] = []
    for seconds, nbytes in kept:
        if corners:
            corners.append((seconds, corners[-1][1]))
        corners.append((seconds, nbytes))
    corners.append((line.end_s, corners[-1][1]))
    return corners
