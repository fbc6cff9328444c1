"""Runs the operator samples that torch ships under the hooks, and compares them with plain runs.

    operators.py [--part 1/8] [--samples 2] [--checks 1] [--only NAME] [--json FILE] [--made-again]
    operators.py --merge FILE FILE ...

For each operator with a derivative (``op_db``, on the CPU), each dtype, each sample, and the
in-place variant where there is one: outputs, gradients and gradients of gradients, with all that
was saved on the disk, must equal those of a plain run in every bit, and nothing may be left. The
first samples of each operator also pass gradcheck and gradgradcheck under the hooks. Only what
plain PyTorch can do counts: what raises without hooks, or differs from itself, is told as not
applicable. Prints progress and a table; ends with 1 if anything failed, or if nothing was read from
the disk. With ``--made-again`` each saved tensor that has a recipe is made again from others; the
inputs and outputs of a sample are then saved by other nodes too, and what comes back of them must
be equal as well. ``tests/gradients/test_operators.py`` runs a part of both in every test run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.utils import _pytree as pytree

from checkout import SCRATCH
from ssdtrain._core import Kept
from ssdtrain.activations.hooks import Hooks
from support import IN_PLACE, Flush, Rig, bits, nothing

SEED = 7
DTYPES = {"float64": torch.float64, "complex128": torch.complex128}
CHECK_NUMEL_MAX = 100
"""gradcheck evaluates a function again for every input: larger samples are left to the bits."""
LEAD_BYTES = 64
"""What lies before a copied tensor: as torch aligns, so that kernels do as they did."""
TRIES_MAX = 5
"""Plain runs that must agree with each other before a difference is held against the hooks."""
MESSAGE_MAX = 150
DIFFERS = "plain runs differ from each other"
MAKING = "ssdtrain was making a saved tensor"
"""In the note of an error that a recipe raises."""
REFUSES = {
    IN_PLACE: "an input was changed in place from which a recipe makes a tensor",
    "none of the epsilons": "a norm has an epsilon that recipes do not try",
}
"""Errors that only recipes raise, and why. Proofs meet them first where recipes are proved."""

Operator = Any
Results = dict[str, Tensor]
Differentiable = Callable[..., tuple[Tensor, ...]]


ALONE: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Storages of copies: nothing else lies there."""


keep = Hooks.keep


def keep_unless_alone(
    self: Hooks, tensor: Tensor, kind: Any, nbytes: int, storage_bytes: int
) -> Kept | None:
    """Stand in for what keeps tensors in memory, and would keep every copy.

    A copy is a part of its storage without a base, because of the bytes before it.
    """
    if kind in ("apart", "detached") and tensor.untyped_storage() in ALONE:
        return None
    return keep(self, tensor, kind, nbytes, storage_bytes)


def copy(tensor: Tensor, lead_bytes: int = LEAD_BYTES) -> Tensor:
    """Return the same values with the same strides, further on in a storage of their own.

    Strides decide how a kernel sums: a packed copy would be another sample. No sample of torch
    begins behind the start of its storage, so that a lost offset would not be seen.
    """
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    if not is_strided or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return tensor.clone()
    source = tensor.detach().untyped_storage()
    whole = torch.full((lead_bytes + source.nbytes(),), 0x55, dtype=torch.uint8)
    plain = torch.empty(0, dtype=torch.uint8)
    whole[lead_bytes:] = plain.set_(source, 0, (source.nbytes(),), (1,))
    offset = lead_bytes // tensor.itemsize + int(tensor.storage_offset())
    empty = torch.empty(0, dtype=tensor.dtype)
    ALONE.add(whole.untyped_storage())
    empty.set_(whole.untyped_storage(), offset, tensor.size(), tensor.stride())
    return empty.data  # Its version is 0: no recipe begins with a tensor that was changed.


class Fresh(Function):
    """A copy that nobody but the graph will hold; its backward flushes what backward has saved.

    A leaf would pass as a weight, and what the caller holds is served from memory. In a backward
    with ``create_graph`` this node comes last, so what the others saved goes to the disk. With a
    list ``seen`` it saves its input, and backward adds to the list what the hooks give back. The
    copy then fills its storage, because a result that begins within it may have no recipe.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, flush: Flush, seen: list[Tensor] | None) -> Tensor:
        ctx.flush, ctx.seen = flush, seen
        if seen is not None:
            ctx.save_for_backward(tensor)
        return copy(tensor, LEAD_BYTES if seen is None else 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.flush()
        if ctx.seen is not None:
            ctx.seen.append(ctx.saved_tensors[0].detach().clone())
        return Fresh.apply(gradients[0], ctx.flush, ctx.seen), None, None


def tensors_in(found: object) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for one in found:
            yield from tensors_in(one)
    elif isinstance(found, dict):
        yield from tensors_in(list(found.values()))


class Case:
    """One sample of one variant of an operator: a function of what wants a gradient.

    With ``saves_all`` other nodes save its inputs and outputs, so that recipes have something to
    begin with and something to make.
    """

    def __init__(
        self, operator: Operator, variant: Callable[..., Any], sample: Any, *, saves_all: bool
    ) -> None:
        self.saves_all = saves_all
        self.operator = operator
        self.variant = variant
        self.process = sample.output_process_fn_grad
        whole = (sample.input, tuple(sample.args), dict(sample.kwargs))
        self.flat, self.shape = pytree.tree_flatten(whole)
        self.places = [
            place
            for place, one in enumerate(self.flat)
            if isinstance(one, Tensor) and one.requires_grad
        ]
        self.leaves = [self.flat[place] for place in self.places]

    def forward(
        self, leaves: Sequence[Tensor], flush: Flush, seen: list[Tensor] | None
    ) -> tuple[Results, list[Tensor]]:
        """Run forward on copies that are gone, but for the graph, when this returns.

        Returns the values of the outputs, and what backward begins with.
        """
        torch.manual_seed(SEED)
        fresh = [copy(one) if isinstance(one, Tensor) else one for one in self.flat]
        held = []  # Holds what is saved of the inputs until the outputs are saved.
        for place, leaf in zip(self.places, leaves, strict=True):
            fresh[place] = Fresh.apply(leaf, flush, seen)
            if seen is not None:
                held.append(Fresh.apply(fresh[place], flush, seen))
        first, args, kwargs = pytree.tree_unflatten(fresh, self.shape)
        output = self.operator.gradcheck_wrapper(self.variant, first, *args, **kwargs)
        if self.process is not None:
            output = self.process(output)
        outputs = list(tensors_in(output))
        found = {f"output {at}": one.detach().clone() for at, one in enumerate(outputs)}
        ends = [one for one in outputs if one.requires_grad]
        if seen is not None:
            # A negated view has memory of its own, which can be made again.
            ends = [-one for one in ends if one.layout is torch.strided] + ends
        return found, [Fresh.apply(one, flush, seen) for one in ends]

    def function(self, flush: Flush) -> Differentiable:
        """Return the function for gradcheck; what it saves is on the disk when it returns."""

        def run(*leaves: Tensor) -> tuple[Tensor, ...]:
            _, roots = self.forward(leaves, flush, [] if self.saves_all else None)
            flush()
            return tuple(roots)

        return run

    def results(self, flush: Flush, order: int) -> Results:
        """Return outputs, gradients, and for order 2 the gradients of those, by name."""
        chance = torch.Generator().manual_seed(SEED)

        def random_like(one: Tensor) -> Tensor:
            made = torch.randn(one.shape, dtype=one.dtype, generator=chance)
            return made.requires_grad_(order == 2)

        seen: list[Tensor] = []
        found, roots = self.forward(self.leaves, flush, seen if self.saves_all else None)
        if not roots:
            return found
        weights = [random_like(one) for one in roots]
        flush()
        first = torch.autograd.grad(
            roots, self.leaves, weights, create_graph=order == 2, allow_unused=True
        )
        found |= named("gradient", first)
        again = [
            one
            for one in first
            if one is not None and one.requires_grad and one.layout is torch.strided
        ]
        if order == 2 and again:
            seconds = [random_like(one).detach() for one in again]
            flush()
            second = torch.autograd.grad(
                again, [*self.leaves, *weights], seconds, allow_unused=True
            )
            found |= named("second gradient", second)
        return found | named("saved", seen)


def named(what: str, gradients: Sequence[Tensor | None]) -> Results:
    return {f"{what} {at}": one.detach() for at, one in enumerate(gradients) if one is not None}


def difference(actual: Results, expected: Results) -> str | None:
    """Return what is not equal, strides and bits included; ``None`` if all is."""
    if list(actual) != list(expected):
        return f"results {list(actual)} instead of {list(expected)}"
    for name, one in expected.items():
        other = actual[name]
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return f"{name} is another kind of tensor"
        if one.layout is torch.strided and one.stride() != other.stride():
            return f"{name} has the strides {other.stride()} instead of {one.stride()}"
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()  # noqa: PLW2901
        if bits(one) != bits(other):
            return f"{name} differs in its bits"
    return None


@dataclass
class Tally:
    """What one run of the sweep has found; kept as JSON, and added to others."""

    counts: Counter[str] = field(default_factory=Counter)
    not_applicable: Counter[str] = field(default_factory=Counter)
    """Reasons, and how many samples each took."""
    unread: Counter[str] = field(default_factory=Counter)
    """Operators that saved something and read nothing back, and how much they saved."""
    failures: list[str] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        self.counts.update(other["counts"])
        self.not_applicable.update(other["not_applicable"])
        self.unread.update(other["unread"])
        self.failures += other["failures"]

    def as_json(self) -> str:
        return json.dumps(vars(self), indent=1, sort_keys=True)

    def table(self) -> str:
        counts = self.counts
        rows = [
            ("operators that torch ships, by dtype", "operators"),
            ("  without a derivative for the dtype", "operators without derivative"),
            ("  run", "operators run"),
            ("  of them, save nothing that is ours to write", "operators that save nothing"),
            ("  of them, wrote and read from the disk", "operators that read"),
            ("  of them, saved and read nothing from the disk", "operators that did not read"),
            ("samples, with in-place variants", "samples"),
            ("  passed: outputs and gradients equal in every bit", "passed"),
            ("  of them, with equal gradients of gradients", "passed twice"),
            ("  failed", "failed"),
            ("  not applicable", "not applicable"),
            ("gradcheck under the hooks: passed", "gradcheck passed"),
            ("  failed", "gradcheck failed"),
            ("  not applicable", "gradcheck not applicable"),
            ("gradgradcheck under the hooks: passed", "gradgradcheck passed"),
            ("  failed", "gradgradcheck failed"),
            ("  not applicable", "gradgradcheck not applicable"),
            ("saved storages written and read back", "tensors offloaded"),
            ("saved storages that somebody else still held", "tensors forwarded"),
            ("saved storages made again from others", "tensors made again"),
            ("bytes written", "bytes written"),
            ("bytes read", "bytes read"),
        ]
        lines = [f"{'':52}" + "".join(f"{name:>15}" for name in DTYPES)]
        for title, key in rows:
            figures = "".join(f"{counts[f'{name} {key}']:>15,}" for name in DTYPES)
            lines.append(f"{title:52}{figures}")
        reasons = sorted(self.not_applicable.items())
        lines += ["", "not applicable, and why:"] if reasons else []
        lines += [f"  {count:>6}  {reason}" for reason, count in reasons]
        lines += ["", "read nothing back, and saved storages:"] if self.unread else []
        lines += [f"  {count:>6}  {name}" for name, count in sorted(self.unread.items())]
        lines += ["", "failed:"] if self.failures else []
        return "\n".join([*lines, *(f"  {one}" for one in self.failures)])


class Sweep:
    """Runs operators and tallies what it sees."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory = directory
        self.samples_max: int | None = options.samples
        self.checks: int = options.checks
        self.made_again: bool = options.made_again
        self.tally = Tally()
        self.dtype = ""

    def count(self, what: str, number: int = 1) -> None:
        self.tally.counts[f"{self.dtype} {what}"] += number

    def run(self, operator: Operator, dtype: str) -> None:
        self.dtype = dtype
        self.count("operators")
        wanted = DTYPES[dtype]
        if not operator.supports_autograd or wanted not in operator.supported_backward_dtypes(
            "cpu"
        ):
            self.count("operators without derivative")
            return
        self.count("operators run")
        rig = Rig(
            self.directory, verify=True, rematerialize="always" if self.made_again else "never"
        )
        torch.manual_seed(SEED)
        samples = operator.sample_inputs("cpu", wanted, requires_grad=True)
        checked = 0
        for at, sample in enumerate(samples):
            if self.samples_max is not None and at >= self.samples_max:
                break
            state = torch.get_rng_state()
            for name, variant in variants(operator, sample):
                case = Case(operator, variant, sample, saves_all=self.made_again)
                label = f"{operator.full_name}{name} {dtype} sample {at}"
                passed = self.compare(case, rig, label)
                small = sum(one.numel() for one in case.leaves) <= CHECK_NUMEL_MAX
                if passed and small and checked < self.checks:
                    checked += 1
                    self.check(case, rig, label)
            torch.set_rng_state(state)
        self.end(rig, operator)

    def end(self, rig: Rig, operator: Operator) -> None:
        """Add what a session moved; it must have let everything go."""
        label = f"{operator.full_name} {self.dtype}"
        try:
            rig.assert_empty()
        except AssertionError as error:
            self.fail(f"{label}: {error}")
        stats = rig.stats
        saved = stats.tensors_offloaded + stats.tensors_forwarded + stats.tensors_kept
        self.count("operators that save nothing", not saved)
        self.count("operators that read", stats.bytes_read > 0)
        if saved and not stats.bytes_read:
            self.count("operators that did not read")
            self.tally.unread[f"{operator.full_name} {self.dtype}"] = saved
        self.count("tensors offloaded", stats.tensors_offloaded)
        self.count("tensors forwarded", stats.tensors_forwarded)
        self.count("tensors made again", stats.tensors_rematerialized)
        self.count("bytes written", stats.bytes_written)
        self.count("bytes read", stats.bytes_read)
        if stats.write_failed_count:
            self.fail(f"{label}: {stats.write_failed_count} writes failed")
        rig.session.close()

    def fail(self, what: str, count: str = "failed") -> None:
        self.count(count)
        self.tally.failures.append(what[: 2 * MESSAGE_MAX])

    def pass_over(self, reason: str, count: str = "not applicable") -> None:
        self.count(count)
        self.tally.not_applicable[reason[:MESSAGE_MAX]] += 1

    def compare(self, case: Case, rig: Rig, label: str) -> bool:
        """Whether a sample gives the same bits plainly and from the disk."""
        self.count("samples")
        if not case.leaves:
            self.pass_over("the sample has no input that asks for a gradient")
            return False
        order, expected, why = plainly(case)
        if expected is None:
            self.pass_over(why)
            return False
        if not any(name.startswith("gradient") for name in expected):
            self.pass_over("no output of the sample has a gradient")
            return False
        random_state = torch.get_rng_state()
        try:
            with rig.context():
                actual = case.results(rig.flush, order)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure
            why = refusal(error)
            self.pass_over(why) if why else self.fail(f"{label}: {first_line(error)}")
            return False
        wrong = difference(actual, expected)
        if wrong is None and not torch.equal(torch.get_rng_state(), random_state):
            wrong = "the hooks moved the random state"
        if wrong is None:
            self.count("passed")
            self.count("passed twice", any(name.startswith("second") for name in expected))
            return True
        for _ in range(TRIES_MAX):
            if difference(case.results(nothing, order), expected) is not None:
                self.pass_over(f"{DIFFERS}: {case.operator.full_name}")
                return False
        self.fail(f"{label}: {wrong}")
        return False

    def check(self, case: Case, rig: Rig, label: str) -> None:
        """Run gradcheck and gradgradcheck under the hooks if they pass without."""
        options = {"nondet_tol": case.operator.gradcheck_nondet_tol, "fast_mode": True}
        checks: list[tuple[str, Callable[..., bool]]] = [("gradcheck", gradcheck)]
        if case.operator.supports_gradgrad:
            checks.append(("gradgradcheck", gradgradcheck))
        for name, check in checks:
            try:
                torch.manual_seed(SEED)
                check(case.function(nothing), case.leaves, **options)
            except Exception as error:  # noqa: BLE001 - plain PyTorch cannot: the reason is told
                reason = f"{name} raises without hooks: {case.operator.full_name}: "
                self.pass_over(reason + first_line(error), f"{name} not applicable")
                continue
            try:
                with rig.context():
                    torch.manual_seed(SEED)
                    check(case.function(rig.flush), case.leaves, **options)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure
                self.fail(f"{label}: {name}: {first_line(error)}", f"{name} failed")
            else:
                self.count(f"{name} passed")


def variants(operator: Operator, sample: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "", operator.op
    in_place = operator.inplace_variant
    if in_place is not None and operator.supports_inplace_autograd and not sample.broadcasts_input:
        yield " in place", in_place


def plainly(case: Case) -> tuple[int, Results | None, str]:
    """Return the highest order of gradients that plain PyTorch has, and its results."""
    why = ""
    for order in (2, 1) if case.operator.supports_gradgrad else (1,):
        try:
            return order, case.results(nothing, order), ""
        except Exception as error:  # noqa: BLE001 - plain PyTorch cannot: the reason is told
            why = f"raises without hooks: {case.operator.full_name}: {first_line(error)}"
    return 0, None, why


def refusal(error: Exception) -> str:
    """Return why a recipe raises an error; nothing if it should not, or if no recipe has raised."""
    is_of_recipe = any(MAKING in note for note in getattr(error, "__notes__", ()))
    known = [why for message, why in REFUSES.items() if is_of_recipe and message in str(error)]
    return "".join(known)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def operators(part: str, only: Sequence[str]) -> list[Operator]:
    """Return the operators of a part such as 2/8, in torch's order."""
    # Importing it changes torch's flags: only this process may see that.
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415

    number, of = map(int, part.split("/"))
    if not 1 <= number <= of:
        raise SystemExit(f"--part {part}: the number before the slash must be 1 to {of}")
    chosen = [one for one in op_db if not only or one.full_name in only or one.name in only]
    if not chosen:
        raise SystemExit(f"torch {torch.__version__} ships no operator of the name {only}")
    return chosen[number - 1 :: of]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Samples warn of what they try out; plain runs and ours alike."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sweep(options: argparse.Namespace) -> Tally:
    Hooks.keep = keep_unless_alone  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory(dir=options.dir or SCRATCH) as folder, quiet():
        run = Sweep(Path(folder), options)
        chosen = operators(options.part, options.only)
        for at, operator in enumerate(chosen):
            for dtype in DTYPES:
                run.run(operator, dtype)
            if at % 25 == 24 or at + 1 == len(chosen):
                done = sum(run.tally.counts[f"{name} samples"] for name in DTYPES)
                sys.stdout.write(f"{at + 1}/{len(chosen)} operators, {done:,} samples, ")
                sys.stdout.write(f"{len(run.tally.failures)} failures\n")
                sys.stdout.flush()
                gc.collect()
        return run.tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Operator samples of torch under the hooks.")
    parser.add_argument("--part", default="1/1", help="2/8: the second of eight parts")
    parser.add_argument("--samples", type=int, help="at most so many per operator and dtype")
    parser.add_argument("--checks", type=int, default=3, help="gradchecks per operator and dtype")
    parser.add_argument("--only", action="append", default=[], help="the name of an operator")
    parser.add_argument("--made-again", action="store_true", help="use each recipe there is")
    parser.add_argument("--dir", type=Path, help="default: a new folder under target/tmp")
    parser.add_argument("--json", type=Path, help="write the tally there")
    parser.add_argument("--merge", type=Path, nargs="+", help="add tallies instead of running")
    options = parser.parse_args()
    if options.merge:
        tally = Tally()
        for path in options.merge:
            tally.add(json.loads(path.read_text()))
    else:
        torch.set_num_threads(1)
        tally = sweep(options)
    if options.json:
        options.json.write_text(tally.as_json() + "\n")
    sys.stdout.write(f"torch {torch.__version__}\n{tally.table()}\n")
    if not any(tally.counts[f"{name} bytes read"] for name in DTYPES):
        sys.stdout.write("nothing was read from the disk: this run proves nothing\n")
        return 1
    if options.made_again and not any(
        tally.counts[f"{name} tensors made again"] for name in DTYPES
    ):
        sys.stdout.write("nothing was made again: this run proves nothing\n")
        return 1
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
