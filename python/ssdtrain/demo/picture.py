"""The demo's picture: what saved tensors hold in memory over one step, a curve for each mode."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from ssdtrain.demo.options import ModeRun

MIB = 1 << 20
COLOURS = {"keep": "#d55e00", "recompute": "#56b4e9", "offload": "#009e73"}
"""From the palette of Okabe and Ito: told apart also by readers who do not see all colours."""

STYLES = {"keep": "--", "recompute": "-.", "offload": "-"}
"""And told apart in print without colours."""


class PictureUnavailableError(Exception):
    """The picture cannot be drawn; the message says what to install."""


def draw(runs: Sequence[ModeRun], title: str, path: Path) -> None:
    """Draw the curves of the runs that have one, as a PNG or whatever the path ends in."""
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
    for run in runs:
        if run.memory is None or not run.memory.curve:
            continue
        seconds, sizes = zip(*run.memory.curve, strict=True)
        mib = [size / MIB for size in sizes]
        colour = COLOURS[run.mode]
        label = f"{run.mode} (sampled peak {max(mib):,.0f} MiB)"
        axes.plot(seconds, mib, STYLES[run.mode], color=colour, linewidth=2, label=label)
        axes.fill_between(seconds, mib, color=colour, alpha=0.12, linewidth=0)
    axes.set_title(title, loc="left", fontsize=13)
    axes.set_xlabel("seconds since the step began", fontsize=12)
    axes.set_ylabel("saved tensors in memory, MiB", fontsize=12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=11, loc="upper right")
    figure.savefig(path, dpi=150)
