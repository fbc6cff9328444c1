"""The demo's pictures: bytes in memory over time, a curve for each run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from ssdtrain.demo.options import ModeRun

MIB = 1 << 20
COLOURS = {"plain": "#d55e00", "keep": "#cc79a7", "recompute": "#56b4e9", "offload": "#009e73"}
"""From the palette of Okabe and Ito: told apart also by readers who do not see all colours."""

STYLES = {"plain": "--", "keep": ":", "recompute": "-.", "offload": "-"}
"""And told apart in print without colours."""


class Curve(NamedTuple):
    """What a run held in memory over time."""

    label: str
    """With a place for the largest sample, in MiB."""
    colour: str
    style: str
    samples: Sequence[tuple[float, int]]
    """(seconds, bytes)."""


class PictureUnavailableError(Exception):
    """The picture cannot be drawn; the message says what to install."""


def draw(runs: Sequence[ModeRun], title: str, path: Path) -> None:
    """Draw the curves of the runs that have one, as a PNG or whatever the path ends in."""
    curves = [
        Curve(
            f"{run.mode} (sampled peak {{:,.0f}} MiB)",
            COLOURS[run.mode],
            STYLES[run.mode],
            run.memory.curve,
        )
        for run in runs
        if run.memory is not None and run.memory.curve
    ]
    draw_curves(
        curves,
        path,
        title=title,
        across="seconds since the step began",
        up="saved tensors in memory, MiB",
    )


def draw_curves(
    curves: Sequence[Curve],
    path: Path,
    *,
    title: str,
    across: str,
    up: str,
    limit: tuple[str, int] | None = None,
) -> None:
    """Draw curves of bytes over seconds, and a line at a limit of bytes, if there is one."""
    try:
        # By name at run time: an extra, which most users of the library do not have.
        backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PictureUnavailableError(
            f"no picture: matplotlib could not be imported ({error}); install it with: "
            "pip install 'ssdtrain[demo]'"
        ) from error
    # Without pyplot: no window, no global state, no display needed.
    figure = figures.Figure(figsize=(9, 5), layout="constrained")
    backend.FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve in curves:
        seconds, sizes = zip(*curve.samples, strict=True)
        mib = [size / MIB for size in sizes]
        label = curve.label.format(max(mib))
        axes.plot(seconds, mib, curve.style, color=curve.colour, linewidth=2, label=label)
        axes.fill_between(seconds, mib, color=curve.colour, alpha=0.12, linewidth=0)
    if limit is not None:
        axes.axhline(limit[1] / MIB, color="#333333", linewidth=1.2, label=limit[0])
    axes.set_title(title, loc="left", fontsize=13)
    axes.set_xlabel(across, fontsize=12)
    axes.set_ylabel(up, fontsize=12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        # A run that takes much fills the place where the curves of one step leave room.
        place = "upper right" if limit is None else "center right"
        axes.legend(frameon=False, fontsize=11, loc=place)
    figure.savefig(path, dpi=150)
