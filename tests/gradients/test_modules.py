"""The modules of ``torch.nn``, with each sample that torch ships for it, from the disk.

One run has all recipes, which make saved tensors again.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.utils import _pytree as pytree

from support import Flush, Result, Rig, assert_equal_bits, nothing, sizes

if TYPE_CHECKING:
    from torch.testing._internal.common_modules import ModuleInfo, ModuleInput

# torch's test modules load a profile for hypothesis, which gave all our tests ten examples each.
profile = settings.get_current_profile_name()
module_db = importlib.import_module("torch.testing._internal.common_modules").module_db
settings.load_profile(profile)

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES_MIN = 900
"""Of one dtype; torch 2.11 has 945, torch 2.15 1,837."""


def tensors_in(tree: Any) -> Iterator[Tensor]:
    for one in pytree.tree_leaves(tree):
        if isinstance(one, Tensor) and one.requires_grad:
            yield one


def leaf(one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    return one.detach().clone().requires_grad_(one.requires_grad)


def activation(one: Any) -> Any:
    """A leaf would pass as a weight; of this nobody but the graph has the memory."""
    return one * 1 if isinstance(one, Tensor) and one.requires_grad else one


def step(info: ModuleInfo, sample: ModuleInput, dtype: torch.dtype, flush: Flush) -> Result:
    """Run a module forward and backward; return the loss and all gradients."""
    torch.manual_seed(0)
    made = sample.constructor_input
    module = info.module_cls(*made.args, **made.kwargs).to(dtype)
    given = sample.forward_input
    leaves = pytree.tree_map(leaf, (given.args, given.kwargs))
    args, kwargs = pytree.tree_map(activation, leaves)
    outputs = list(tensors_in(module(*args, **kwargs)))
    del args, kwargs
    real = [torch.view_as_real(one) if one.is_complex() else one for one in outputs]
    loss = torch.stack([one.double().square().sum() for one in real]).sum()
    del outputs, real
    flush()
    loss.backward()
    wanted = [*module.parameters(), *tensors_in(leaves)]
    found = {str(at): one.grad for at, one in enumerate(wanted) if one.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["before backward", "at once", "made again"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("every", sizes(small=23, whole=1))
def test_every_module_trains_with_equal_bits(
    every: int, dtype: torch.dtype, way: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, verify=True, rematerialize="always" if way == "made again" else "never")
    if way == "at once":
        rig.end_writes_at_once()
    samples_count = 0
    for info in module_db:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=True
            )
        for sample in samples:
            samples_count += 1
            if samples_count % every:
                continue
            expected = step(info, sample, dtype, nothing)
            with rig.context():
                actual = step(info, sample, dtype, nothing if way == "at once" else rig.flush)
            try:
                assert_equal_bits(actual, expected)
            except AssertionError as error:
                error.add_note(f"{info.name}: {sample.desc or sample.constructor_input}")
                raise
            del actual
    assert samples_count >= SAMPLES_MIN
    assert rig.stats.bytes_read > 0
    made_again_count = rig.stats.tensors_rematerialized
    sys.stdout.write(f"{samples_count // every} samples, {made_again_count} tensors made again\n")
    assert (made_again_count > 0) == (way == "made again")
    rig.assert_empty()
