"""Storages that are saved again after a change that no version counter tells."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support import Flush, Result, Rig, bits, nothing, prove

COUNT = 1000


def through_data(saved: Tensor) -> None:
    saved.data.fill_(7)


def through_numpy(saved: Tensor) -> None:
    saved.numpy()[:] = 7


def saved_again(change: Callable[[Tensor], None], flush: Flush) -> Tensor:
    """Return a gradient through two nodes that save one tensor, which changes between them."""
    x = torch.ones(COUNT, requires_grad=True)
    values = torch.zeros(COUNT)
    first = (x * values).sin().sum()
    flush()
    change(values)
    second = (x * values).cos().sum()
    flush()
    del values
    flush()
    (first + second).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.defends("bytes that are saved again")
@pytest.mark.parametrize("change", [through_data, through_numpy], ids=lambda c: c.__name__)
def test_a_tensor_that_is_saved_again_after_an_unseen_change_gives_plain_bits(
    change: Callable[[Tensor], None], tmp_path: Path
) -> None:
    """The solvers of torchdiffeq fill a tensor part by part, and save it after each part."""

    def step(flush: Flush) -> Result:
        return {"x": saved_again(change, flush)}

    prove(step, tmp_path)


def parts_saved(flush: Flush) -> Tensor:
    """Return a gradient through parts of a storage, and tensors that count its changes apart."""
    x = torch.ones(COUNT, requires_grad=True)
    values = torch.zeros(8 * COUNT)
    first, second, both = values[:COUNT], values[COUNT : 2 * COUNT], values[: 2 * COUNT]
    loss = (x * first).sin().sum() + (x * second).sin().sum()
    loss = loss + (x * second.data).sum() * 0
    flush()
    values.data.fill_(7)
    loss = loss + (torch.cat([x, x]) * both).cos().sum()
    flush()
    del first, second, both, values
    flush()
    loss.backward()
    assert x.grad is not None
    return x.grad


def test_all_parts_of_what_is_saved_again_have_plain_bits(tmp_path: Path) -> None:
    prove(lambda flush: {"x": parts_saved(flush)}, tmp_path)


def test_parts_of_a_storage_that_are_saved_once_are_written_once(tmp_path: Path) -> None:
    """Steps of a sequence, and micro-batches that are parts of a batch."""
    rig = Rig(tmp_path)
    with rig.context():
        weight, batch = torch.ones(COUNT, requires_grad=True), torch.rand(20, COUNT)
        losses = []
        for part in batch:
            losses.append((weight * part).sum())
            rig.flush()
        written_bytes = rig.stats.bytes_written
        del batch, part
        rig.flush()
        assert rig.stats.resident_bytes == 0
        assert rig.stats.bytes_written == written_bytes > 0
        torch.stack(losses).sum().backward()
    del losses
    rig.assert_empty()


@pytest.mark.parametrize("thread", ["this one", "one that has ended"])
def test_several_records_that_are_saved_again_do_not_hold_each_other(
    thread: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path)
    losses = []

    def save() -> None:
        with rig.context() if thread != "this one" else contextlib.nullcontext():
            weight, values = torch.ones(COUNT, requires_grad=True), torch.zeros(COUNT)
            for _ in range(2):
                # Two records: `data` counts its changes apart.
                losses.append((weight * values).sum() + (weight * values.data).sum())
                rig.flush()
            assert rig.stats.resident_bytes == 2 * 4 * COUNT

    with rig.context():
        if thread == "this one":
            save()
        else:
            other = threading.Thread(target=save)
            other.start()
            other.join()
        rig.flush()
        assert rig.stats.resident_bytes == 0
        torch.stack(losses).sum().backward()
    losses.clear()
    rig.assert_empty()


@pytest.mark.defends("bytes that are saved again")
def test_a_tensor_that_is_saved_again_is_written_once_the_program_has_let_go(
    tmp_path: Path,
) -> None:
    expected = saved_again(through_data, nothing)
    rig = Rig(tmp_path, verify=True)
    resident = []

    def flush() -> None:
        rig.flush()
        resident.append(rig.stats.resident_bytes)

    with rig.context():
        gradient = saved_again(through_data, flush)
    assert bits(gradient) == bits(expected)
    assert resident[1:] == [4 * COUNT, 0], "it was not written again"
    rig.assert_empty()


@pytest.mark.parametrize("moment", ["the next save", "backward"])
def test_a_tensor_that_is_saved_again_under_a_bound_counts_once_the_program_has_let_go(
    moment: str, tmp_path: Path
) -> None:
    expected = saved_again(through_data, nothing)
    rig = Rig(tmp_path, max_resident_bytes=1 << 20, verify=True)
    counted = []
    with rig.context():
        x = torch.ones(COUNT, requires_grad=True)
        values = torch.zeros(COUNT)
        product = x * values
        product.register_hook(lambda _: counted.append(rig.stats.resident_bytes))
        loss = product.sin().sum()
        del product
        rig.flush()
        through_data(values)
        loss = loss + (x * values).cos().sum()
        rig.flush()
        assert rig.stats.resident_bytes == 0, "the program has it as well"
        written_bytes = rig.stats.bytes_written
        del values
        if moment == "the next save":
            loss = loss + (x * torch.rand(COUNT)).sum() * 0
            rig.flush()
            assert rig.stats.bytes_written >= written_bytes + 2 * 4 * COUNT, "one was not written"
            assert rig.stats.resident_bytes == 0
        loss.backward()
    assert x.grad is not None
    assert bits(x.grad) == bits(expected)
    assert moment == "the next save" or counted == [4 * COUNT]
    rig.assert_empty()
