"""Makes the demo's results: a dict of all figures for JSON, a table and a picture.

A time of a process is the median of its timed steps; a figure of a mode is the median over the
repeats. A ratio is the median over the repeats of the quotient with plain, or keep, *of the same
repeat*: it ran just before, so a machine that is slow for a while slows both.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from ssdtrain.demo.options import WITHOUT_SSDTRAIN, Mode, Run, TrainingOptions
from ssdtrain.sizes import shown_bytes

MIB = 1 << 20
ADAMW_BYTES = 16
"""Bytes of a parameter with AdamW in float32: weight, gradient and two numbers of state."""
LABEL_WIDTH = 34
COLUMN_WIDTH = 16
ROWS = (
    ("step time, s", "step_s_median", 1, ".2f"),
    ("activation peak, MiB", "activation_bytes_peak", MIB, ",.0f"),
    ("RSS peak above resident, MiB", "rss_bytes_peak", MIB, ",.0f"),
    ("written per step, MiB", "bytes_written_per_step", MIB, ",.0f"),
    ("read per step, MiB", "bytes_read_per_step", MIB, ",.0f"),
    ("exposed stall per step, s", "stall_s", 1, ".3f"),
    ("tokens per second", "tokens_per_s", 1, ",.0f"),
    ("loss of the last step", "last_loss", 1, ".7f"),
)
"""Label, name of the figure, unit, format."""
RATIOS = ("step_s_median", "activation_bytes_peak", "rss_bytes_peak")
"""Figures that are also told over those of plain and of keep."""
STYLES = {
    "plain": ("#d55e00", "--"),
    "keep": ("#cc79a7", ":"),
    "recompute": ("#56b4e9", "-."),
    "offload": ("#009e73", "-"),
    "whole": ("#009e73", "-"),
}
"""Colours of Okabe and Ito, which colour-blind readers can tell apart; lines for print."""


def document(
    options: TrainingOptions,
    modes: Sequence[Mode],
    repeats: int,
    machine: dict[str, Any],
    runs: list[Run],
) -> dict[str, Any]:
    """Return all figures, with the records that they were computed from."""
    is_identical, notes = compare(runs)
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "modes": {mode: summarise(runs, mode, options.tokens_per_step) for mode in modes},
        "bit_identical": is_identical,
        "comparison_notes": notes,
        "machine": machine,
        "arguments": {
            **asdict(options),
            "dropout": options.dropout_probability,
            "repeats": repeats,
            "modes": list(modes),
        },
        "without_ssdtrain": sorted(WITHOUT_SSDTRAIN),
        "runs": [asdict(run) for run in runs],
    }
    taken = found["modes"].get("whole", {}).get("rss_bytes_peak")
    if options.given_bytes is not None and taken is not None:
        count = max(run.parameters_count for run in runs)
        peaks = [mode["activation_bytes_peak"] or 0 for mode in found["modes"].values()]
        all_bytes = ADAMW_BYTES * count + max(peaks)
        found["figures"] = {
            "all_bytes": all_bytes,
            "over_given": all_bytes / options.given_bytes,
            "over_taken": all_bytes / taken,
            "has_sufficed": taken <= options.given_bytes,
        }
    return found


def summarise(runs: Sequence[Run], mode: Mode, tokens_per_step: int) -> dict[str, Any]:
    """Compute the figures of a mode; None where they are unknown."""
    own = [run for run in runs if run.mode == mode]
    figures = {(run.mode, run.repeat): _figures(run) for run in _finished(runs)}
    repeats = [repeat for name, repeat in figures if name == mode]

    def over(other: Mode) -> dict[str, float | None]:
        both = [(figures[mode, at], figures[other, at]) for at in repeats if (other, at) in figures]
        return {
            key: _median([one[key] / (base[key] or math.nan) for one, base in both])
            for key in RATIOS
        }

    keys = next(iter(figures.values()), {})
    medians = {key: _median([figures[mode, at][key] for at in repeats]) for key in keys}
    losses = [float.fromhex(step.loss) for step in own[0].steps] if own else []
    step_s = medians.get("step_s_median")
    return {
        "mode": mode,
        **dict.fromkeys((key for _, key, *_ in ROWS), None),
        **medians,
        "tokens_per_s": None if step_s is None else tokens_per_step / step_s,
        "ratio_to_plain": over("plain"),
        "ratio_to_keep": over("keep"),
        "losses": losses,
        "last_loss": losses[-1] if losses else None,
        "step_s": [[step.seconds for step in run.timed] for run in own],
        "failure": next((run.failure for run in own if run.failure is not None), None),
    }


def _finished(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.failure is None]


def _figures(run: Run) -> dict[str, float]:
    """Return the figures of a run; NaN where they are unknown."""
    return {
        "step_s_median": median(step.seconds for step in run.timed),
        "activation_bytes_peak": run.activation_bytes_peak,
        "rss_bytes_peak": math.nan if run.rss_bytes_peak is None else run.rss_bytes_peak,
        "bytes_written_per_step": median(step.bytes_written for step in run.timed),
        "bytes_read_per_step": median(step.bytes_read for step in run.timed),
        "stall_s": median(step.stall_s for step in run.timed),
    }


def _median(values: Sequence[float]) -> float | None:
    return None if not values or any(map(math.isnan, values)) else median(values)


def compare(runs: Sequence[Run]) -> tuple[bool | None, list[str]]:
    """Compare every finished run with the first of plain.

    Return whether all losses, gradients and weights have its bits (None if there was nothing to
    compare), and the differences.
    """
    done = _finished(runs)
    plain = next((run for run in done if run.mode == "plain"), None)
    if plain is None or all(run.mode == "plain" for run in done):
        lacking = "plain has not" if plain is None else "no other mode has"
        return None, [f"{lacking} finished: there is nothing to compare"]
    differences = [(run, _difference(run, plain)) for run in done]
    notes = [f"{run.mode}, repeat {run.repeat}: {words}" for run, words in differences if words]
    return not notes, notes


def _difference(run: Run, plain: Run) -> str:
    """Return the first difference between two runs; later differences follow from it."""
    for number, (step, other) in enumerate(zip(run.steps, plain.steps, strict=True), start=1):
        if step.loss != other.loss:
            return f"loss of step {number} differs from plain's"
        if step.gradients_digest != other.gradients_digest:
            return f"gradients of step {number} differ from plain's"
    return "" if run.weights_digest == plain.weights_digest else "weights differ from plain's"


def succeeded(found: dict[str, Any]) -> bool:
    """Return whether every mode finished, no bit differed, and the given memory sufficed."""
    has_finished = all(mode["failure"] is None for mode in found["modes"].values())
    has_sufficed: bool = "figures" not in found or found["figures"]["has_sufficed"]
    return has_finished and found["bit_identical"] is not False and has_sufficed


def render(found: dict[str, Any]) -> str:
    """Lay out the heading, the table and the verdict."""
    return "\n\n".join("\n".join(part(found)) for part in (_heading, _table, _verdict))


def _heading(found: dict[str, Any]) -> Iterator[str]:
    options, machine = found["arguments"], found["machine"]
    count = max((run["parameters_count"] for run in found["runs"]), default=0)
    text = options["data"] or "the sources of Python's standard library"
    yield (
        f"{options['model']}, {count / 1e6:.1f}M parameters: {options['layers']} layers, "
        f"hidden {options['hidden']}, sequence {options['sequence']}, batch {options['batch']}, "
        f"{options['dtype']}, dropout {options['dropout']:g}"
    )
    yield f"trained on {text}; timed steps: {options['steps']}, repeats: {options['repeats']}"
    yield (
        f"{machine['cpu']}, {machine['core_count']} cores, {shown_bytes(machine['memory_bytes'])}, "
        f"{machine['kernel']}, torch {machine['torch']}, Python {machine['python']}"
    )
    yield f"{machine['directory']}: {machine['file_system'] or 'unknown'}"


def _table(found: dict[str, Any]) -> Iterator[str]:
    modes = found["modes"].values()
    yield _row("", found["modes"])
    yield "-" * (LABEL_WIDTH + COLUMN_WIDTH * len(modes))
    for label, key, unit, form in ROWS:
        cells = [_number(mode[key], unit, form) for mode in modes]
        if key in RATIOS:
            # A fixed width, so that the numbers stand below each other.
            ratios = [_number(mode["ratio_to_plain"][key], 1, ".3f", "x") for mode in modes]
            cells = [f"{cell} {over:>7}" for cell, over in zip(cells, ratios, strict=True)]
        yield _row(label, cells)
        if key in RATIOS and "keep" in found["modes"]:
            over = [_number(mode["ratio_to_keep"][key], 1, ".3f", "x") for mode in modes]
            yield _row("  over keep", over)


def _verdict(found: dict[str, Any]) -> Iterator[str]:
    answer = {True: "yes", False: "NO", None: "not compared"}[found["bit_identical"]]
    # --whole frees its gradients in backward.
    gradients = ", all gradients" if found["arguments"]["given_bytes"] is None else ""
    yield f"losses{gradients} and last weights bit-identical to plain: {answer}"
    yield from (f"  {note}" for note in found["comparison_notes"])
    modes = found["modes"].values()
    yield from (f"{mode['mode']} FAILED: {mode['failure']}" for mode in modes if mode["failure"])
    if "figures" in found:
        figures, given_bytes = found["figures"], found["arguments"]["given_bytes"]
        yield (
            f"weights, gradients, AdamW's state, activations: {shown_bytes(figures['all_bytes'])}, "
            f"{figures['over_given']:.1f} times the {shown_bytes(given_bytes)} that whole was given"
        )
        if not figures["has_sufficed"]:
            yield "WHOLE TOOK MORE MEMORY THAN IT WAS GIVEN"


def _row(label: str, cells: Iterable[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def _number(value: float | None, unit: int, form: str, suffix: str = "") -> str:
    return "-" if value is None else format(value / unit, form) + suffix


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw bytes in memory over the measured step, a curve for each mode.

    Raises:
        ImportError: matplotlib, an extra, is not installed.

    """
    # By name, as type checkers need not have it. Without pyplot: no window, no display needed.
    backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figure = importlib.import_module("matplotlib.figure").Figure((9, 5), layout="constrained")
    backend.FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run in found["runs"]:
        if run["repeat"] > 1 or not run["curve"]:
            continue
        seconds, sizes = zip(*run["curve"], strict=True)
        mib = [size / MIB for size in sizes]
        colour, line = STYLES[run["mode"]]
        label = f"{run['mode']} (sampled peak {max(mib):,.0f} MiB)"
        axes.plot(seconds, mib, line, color=colour, linewidth=2, label=label)
        axes.fill_between(seconds, mib, color=colour, alpha=0.12, linewidth=0)
    options, kind = found["arguments"], "saved tensors"
    if options["given_bytes"] is not None:
        kind, given = "memory above that of the libraries", options["given_bytes"] / MIB
        axes.axhline(given, color="#333333", linewidth=1.2, label=f"given: {given:,.0f} MiB")
    title = f"{options['model']}, {options['dtype']}: {kind} over a training step"
    axes.set_title(title, loc="left", fontsize=13)
    axes.set(xlabel="seconds since the step began", ylabel=f"{kind}, MiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.legend(frameon=False, fontsize=11)
    figure.savefig(path, dpi=150)
