"""From runs to figures: medians, ratios to plain and to keep, and whether every bit agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ssdtrain.demo.options import Mode, ModeRun, StepRecord

Figure = Callable[[ModeRun], float | None]
"""One number of one run; None where the run does not know it."""


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """A mode's figures as multiples of another's; None where that one did not run."""

    step_s: float | None
    activation_bytes_peak: float | None
    rss_bytes_peak: float | None


@dataclass(frozen=True, kw_only=True)
class ModeSummary:
    """The figures of one mode.

    A figure of a repeat is the median of its timed steps; a figure of the mode is the median over
    the repeats. A ratio is the median over the repeats of the quotient with plain, or keep, *of the
    same repeat*, which ran just before: a machine that slows down for a while slows both.
    """

    mode: Mode
    step_s_median: float | None
    tokens_per_s: float | None
    activation_bytes_peak: float | None
    rss_bytes_peak: float | None
    rss_bytes_high: float | None
    bytes_written_per_step: float | None
    bytes_read_per_step: float | None
    stall_s: float | None
    """Time per step in which the computing thread waited for I/O."""
    foreign_cores: float | None
    """CPU cores that other processes kept busy during the steps: what disturbs the times."""
    ratio_to_plain: Ratios
    """The gain and the price of ssdtrain, or of recomputation, for a user."""
    ratio_to_keep: Ratios
    """What of it is offloading alone, as keep has imported ssdtrain too."""
    losses: list[float]
    """Of every step of the first repeat: warm-up, timed, measured."""
    step_s: list[list[float]]
    """Seconds of every timed step, by repeat."""
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether all losses and all gradients are those of plain (or of keep), bit for bit."""

    reference: Mode
    """What the others are held against: plain, or keep where plain was not asked for."""
    bit_identical: bool | None
    """None when there was nothing to compare."""
    notes: list[str]
    """What differs, or why nothing was compared."""


def summarise(runs: Sequence[ModeRun], mode: Mode, tokens_per_step: int) -> ModeSummary:
    """Compute the figures of one mode."""
    own = [run for run in runs if run.mode == mode]
    done = [run for run in own if run.failure is None]

    def ratios_to(other: Mode) -> Ratios:
        base = {run.repeat: run for run in runs if run.mode == other and run.failure is None}

        def ratio(figure: Figure) -> float | None:
            pairs = [(figure(run), figure(base[run.repeat])) for run in done if run.repeat in base]
            return median_or_none([a / b for a, b in pairs if a is not None and b])

        return Ratios(
            step_s=ratio(_of_steps(lambda step: step.seconds)),
            activation_bytes_peak=ratio(_activation_bytes_peak),
            rss_bytes_peak=ratio(_rss_bytes_peak),
        )

    step_s = _over_repeats(done, _of_steps(lambda step: step.seconds))
    return ModeSummary(
        mode=mode,
        step_s_median=step_s,
        tokens_per_s=None if step_s is None else tokens_per_step / step_s,
        activation_bytes_peak=_over_repeats(done, _activation_bytes_peak),
        rss_bytes_peak=_over_repeats(done, _rss_bytes_peak),
        rss_bytes_high=_over_repeats(done, _rss_bytes_high),
        bytes_written_per_step=_over_repeats(done, _of_steps(lambda step: step.bytes_written)),
        bytes_read_per_step=_over_repeats(done, _of_steps(lambda step: step.bytes_read)),
        stall_s=_over_repeats(done, _of_steps(lambda step: step.stall_s)),
        foreign_cores=_over_repeats(done, _foreign_cores),
        ratio_to_plain=ratios_to("plain"),
        ratio_to_keep=ratios_to("keep"),
        losses=[float.fromhex(step.loss) for step in own[0].steps] if own else [],
        step_s=[[step.seconds for step in run.timed] for run in own],
        failure=next((run.failure for run in own if run.failure is not None), None),
    )


def compare(runs: Sequence[ModeRun]) -> Comparison:
    """Hold every step of every finished run against the first finished run of plain, or of keep."""
    done = [run for run in runs if run.failure is None]
    name: Mode = "plain" if any(run.mode == "plain" for run in runs) else "keep"
    reference = next((run for run in done if run.mode == name), None)
    if reference is None:
        reason = "failed" if any(run.mode == name for run in runs) else "was not run"
        note = f"{name} {reason}: there is nothing to compare with"
        return Comparison(reference=name, bit_identical=None, notes=[note])
    others = [run for run in done if run is not reference]
    if all(run.mode == name for run in others):
        note = "no other mode finished: there is nothing to compare"
        return Comparison(reference=name, bit_identical=None, notes=[note])
    notes = [note for run in others for note in _differences(run, reference)]
    return Comparison(reference=name, bit_identical=not notes, notes=notes)


def median_or_none(values: Sequence[float]) -> float | None:
    """Return the median, or None of nothing."""
    return median(values) if values else None


def _differences(run: ModeRun, reference: ModeRun) -> Iterable[str]:
    """Name the first step at which a run leaves the reference; the later ones follow from it."""
    if len(run.steps) > len(reference.steps):
        yield f"{run.mode}, repeat {run.repeat}: it has more steps than {reference.mode}"
    for number, (step, kept) in enumerate(zip(run.steps, reference.steps, strict=False), start=1):
        what = [
            name
            for name, differs in (
                ("loss", step.loss != kept.loss),
                ("gradients", step.gradients_digest != kept.gradients_digest),
            )
            if differs
        ]
        if what:
            yield (
                f"{run.mode}, repeat {run.repeat}: {' and '.join(what)} differ from "
                f"{reference.mode}'s from step {number} on"
            )
            return


def _over_repeats(runs: Iterable[ModeRun], figure: Figure) -> float | None:
    return median_or_none([value for run in runs if (value := figure(run)) is not None])


def _of_steps(figure: Callable[[StepRecord], float]) -> Figure:
    return lambda run: median_or_none([figure(step) for step in run.timed])


def _foreign_cores(run: ModeRun) -> float | None:
    shares = [
        step.foreign_cpu_s / step.seconds for step in run.timed if step.foreign_cpu_s is not None
    ]
    return median_or_none(shares)


def _activation_bytes_peak(run: ModeRun) -> float | None:
    return None if run.memory is None else run.memory.activation_bytes_peak


def _rss_bytes_peak(run: ModeRun) -> float | None:
    return None if run.memory is None else run.memory.rss_bytes_peak


def _rss_bytes_high(run: ModeRun) -> float | None:
    return None if run.memory is None else run.memory.rss_bytes_high
