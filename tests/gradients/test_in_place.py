"""Bytes that change after they were saved: refused as autograd refuses, never torn, never stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ssdtrain
from children import forked_python
from ssdtrain.errors import CorruptError
from support import (
    IN_PLACE,
    MODES,
    Flush,
    Mode,
    Result,
    Rig,
    assert_equal_bits,
    bits,
    nothing,
    nothing_leaks,
    prove,
    prove_refused,
)

COUNT = 1000
Save = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns a loss and the tensor to change after it was saved."""


# Every way to change


WAYS: dict[str, Callable[[Tensor], object]] = {
    "an operation with out=": lambda a: torch.add(torch.ones(COUNT), 1, out=a),
    "an index": lambda a: a.__setitem__(slice(3, 5), 7.0),
    "a list of indices": lambda a: a.index_put_((torch.tensor([3, 9]),), torch.tensor(1.0)),
    "a copy into it": lambda a: a.copy_(torch.zeros(COUNT)),
    "a copy into a part": lambda a: a[17:29].copy_(torch.zeros(12)),
    "a view of other type": lambda a: a.view(torch.int32).zero_(),
    "random numbers": lambda a: a.uniform_(),
    "an optimizer's list": lambda a: torch._foreach_add_([a, torch.ones(3)], 1),
    "another storage": lambda a: a.set_(torch.zeros(COUNT)),
}


@pytest.mark.defends("version at unpack")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_change_a_saved_tensor_is_refused(way: str, tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        x = torch.ones(COUNT, requires_grad=True)
        values = torch.rand(COUNT)
        loss = (x * values).sum()
        flush()
        WAYS[way](values)
        loss.backward()
        return {}

    prove_refused(step, tmp_path)


def a_conjugate(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.ones(COUNT, dtype=torch.complex64)
    return (x * values.conj()).abs().sum(), values


def an_index(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.arange(COUNT).flip(0)
    return x.gather(0, values).sum(), values


def a_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.rand(COUNT) > 0.5
    return torch.where(values, x, x.sin()).sum(), values


def an_expanded(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.rand(1)
    return (x * values.expand(COUNT)).sum(), values


def a_half(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.rand(COUNT, dtype=torch.bfloat16)
    return (x.bfloat16() * values).sum(), values


def a_sparse(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.eye(COUNT).to_sparse()
    return torch.sparse.mm(values, x.unsqueeze(1)).sum(), values


@pytest.mark.defends("version at unpack", "version of what is kept")
@pytest.mark.parametrize(
    "save",
    [a_conjugate, an_index, a_mask, an_expanded, a_half, a_sparse],
    ids=lambda save: save.__name__,
)
def test_a_change_of_every_kind_of_tensor_is_refused(save: Save, tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        x = torch.rand(COUNT, requires_grad=True)
        loss, saved = save(x)
        flush()
        saved.zero_()
        loss.backward()
        return {}

    prove_refused(step, tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_names_the_operation_that_needs_the_tensor(mode: Mode, tmp_path: Path) -> None:
    rig = Rig.in_mode(tmp_path, mode)
    x = torch.ones(COUNT, requires_grad=True)
    with rig.context():
        h = x * 2
        y = h.sin()
        if mode == "disk":
            rig.flush()
        with torch.no_grad():
            h.add_(1)
        expected = rf"{IN_PLACE} operation: \[float32 \[1000\]\]"
        with pytest.raises(RuntimeError, match=rf"{expected}, which SinBackward0 needs, is at ver"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match=rf"{expected} is at version 1; expected version 0"):
            y.grad_fn._saved_self  # noqa: B018 - unpacks, and no node runs
    del y, h
    rig.assert_empty()


# Changed while the write is under way


@pytest.mark.defends("version at the end of the write")
@pytest.mark.parametrize("moment", ["before the disk moves", "after the write, before its answer"])
def test_a_tensor_changed_during_its_write_is_not_read_from_the_disk(
    moment: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend="simulated", faults={"paused": True})
    x = torch.ones(COUNT, requires_grad=True)
    values = torch.rand(COUNT)
    with rig.context():
        loss = (x * values).sum()
        rig.begin_writes()
        if moment == "before the disk moves":
            values.add_(1)
        rig.disk.resume()
        rig.end_writes_unseen()
        if moment != "before the disk moves":
            values.add_(1)
        rig.flush()
        assert rig.stats.resident_bytes == values.nbytes, "the memory was given up"
        del values
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()
    assert rig.stats.bytes_written > 0
    assert rig.stats.bytes_read == 0
    assert x.grad is None
    del loss
    rig.assert_empty()


@pytest.mark.defends("version at the end of the write")
def test_a_change_that_another_counter_sees_gives_plain_bits(
    tmp_path: Path,
) -> None:
    """Two saved tensors share memory and not their version: the second is not refused."""

    def gradient(rig: Rig | None) -> Tensor:
        x = torch.ones(COUNT, requires_grad=True)
        values = torch.arange(float(COUNT))
        other = values.data
        with torch.enable_grad() if rig is None else rig.context():
            first = (x * values).sum()
            second = (x * other).sum()
            if rig is not None:
                rig.begin_writes()
                rig.disk.resume()
                rig.end_writes_unseen()
            values.add_(1)
            if rig is not None:
                rig.flush()
            del values, other
            second.backward()
            with pytest.raises(RuntimeError, match=IN_PLACE):
                first.backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(None)
    # Both writes begin together: the second save finds none of the first under way.
    rig = Rig(tmp_path, backend="simulated", faults={"paused": True}, min_bytes=COUNT)
    assert bits(gradient(rig)) == bits(expected)
    assert rig.stats.bytes_written > 0
    rig.assert_empty()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("make", [torch.unsafe_chunk, torch.unsafe_split_with_sizes])
def test_parts_of_a_storage_that_count_their_changes_apart_give_plain_bits(
    make: Callable[..., Sequence[Tensor]], dim: int, tmp_path: Path
) -> None:
    """As torch's LSTM cells do: each part is changed, saved, and so is the next, at one version."""

    def step(flush: Flush) -> Result:
        x = torch.linspace(-2, 2, 64 * 64).reshape(64, 64).requires_grad_()
        size = 2 if make is torch.unsafe_chunk else [32, 32]
        first, second = make(x * 1.5, size, dim)
        first = first.sigmoid_()
        kept = first.sin() * 2
        flush()
        second = second.sigmoid_()
        loss = (kept * second).sum()
        del first, second, kept
        flush()
        loss.backward()
        assert x.grad is not None
        return {"loss": loss, "x": x.grad}

    prove(step, tmp_path)


@pytest.mark.defends("parts that count apart stay")
def test_a_part_that_changes_under_the_write_of_another_is_no_corruption(tmp_path: Path) -> None:
    """Parts lie row by row among each other; a checksum over all of them would blame the disk."""
    rig = Rig(tmp_path, backend="simulated", faults={"paused": True}, verify=True)

    def begin_writes_of_what_was_saved() -> None:
        rig.session.flush(wait=False)

    def step(between: Callable[[], None], flush: Flush) -> Result:
        x = torch.linspace(-2, 2, 64 * 64).reshape(64, 64).requires_grad_()
        first, second = (x * 1.5).unsafe_chunk(2, 1)
        total = first.sigmoid_().sin().sum()
        between()
        # What is saved again would be written again: this is not.
        with torch.no_grad():
            second.sigmoid_()
        del first, second
        flush()
        total.backward()
        assert x.grad is not None
        return {"x": x.grad}

    def resume_and_flush() -> None:
        rig.disk.resume()
        rig.flush()

    expected = step(nothing, nothing)
    with rig.context():
        actual = step(begin_writes_of_what_was_saved, resume_and_flush)
    assert_equal_bits(actual, expected)
    rig.assert_empty()


@pytest.mark.defends("identity with the version counter")
def test_a_change_that_only_data_counts_is_refused(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        x = torch.linspace(-2, 2, COUNT).requires_grad_()
        weight = torch.ones(COUNT, requires_grad=True)
        y = x * 1.5
        never_walked = y * weight
        flush()
        bare = y.data
        loss = (bare * weight).square().sum()
        flush()
        bare.add_(1)
        loss.backward()
        del never_walked
        return {}

    prove_refused(step, tmp_path)


def test_data_that_counts_for_itself_is_not_taken_for_its_tensor(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        x = torch.linspace(-2, 2, COUNT).requires_grad_()
        weight = torch.ones(COUNT, requires_grad=True)
        y = x * 1.5
        y.add_(1)
        never_walked = y * weight
        flush()
        bare = y.data
        bare.mul_(2)
        assert bare._version == y._version
        loss = (bare * weight).square().sum()
        del y, bare
        flush()
        loss.backward()
        del never_walked
        assert weight.grad is not None
        return {"loss": loss, "weight": weight.grad}

    prove(step, tmp_path)


# What autograd cannot see: `.data`, an array on a tensor's memory, and memory that others own


def through_data(saved: Tensor) -> None:
    saved.data.fill_(7)


def through_numpy(saved: Tensor) -> None:
    saved.numpy()[:] = 7


UNSEEN = pytest.mark.parametrize("change", [through_data, through_numpy], ids=lambda c: c.__name__)


class Unseen:
    """A graph, and the means to change what it saved."""

    def __init__(self) -> None:
        self.x = torch.ones(COUNT, requires_grad=True)
        self.saved: Tensor | None = torch.arange(COUNT, dtype=torch.float32)
        self.loss = (self.x * self.saved).sum()

    def change(self, change: Callable[[Tensor], None]) -> None:
        assert self.saved is not None
        change(self.saved)

    def gradient(self, *, drop: bool) -> Tensor:
        if drop:
            self.saved = None
        self.loss.backward()
        assert self.x.grad is not None
        return self.x.grad


@pytest.mark.defends("verify")
@UNSEEN
def test_verify_refuses_bytes_that_changed_unseen_under_their_write(
    change: Callable[[Tensor], None], tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend="simulated", faults={"paused": True}, verify=True)
    with rig.context():
        graph = Unseen()
        rig.begin_writes()
        graph.change(change)
        rig.disk.resume()
        rig.flush()
        graph.saved = None
        assert rig.stats.resident_bytes == 0
        with pytest.raises(CorruptError, match="memory written behind autograd's back"):
            graph.loss.backward()
    assert graph.x.grad is None
    assert rig.store.stats()["read_failed_count"] > 0
    del graph
    rig.assert_empty()


@pytest.mark.defends("memory of others stays")
def test_arrays_that_a_loader_fills_anew_give_plain_bits(tmp_path: Path) -> None:
    """Their memory outlives torch's storage, and changes under it."""

    def step(flush: Flush) -> Result:
        x = torch.ones(COUNT, requires_grad=True)
        array = np.zeros(COUNT, dtype=np.float32)
        losses = []
        for number in range(3):
            array[:] = number
            losses.append((x * torch.from_numpy(array)).exp().sum())
            flush()
        sum(losses, torch.zeros(())).backward()
        assert x.grad is not None
        return {"x": x.grad}

    prove(step, tmp_path)


@UNSEEN
def test_an_unseen_change_after_the_write_gives_the_bytes_that_were_saved(
    change: Callable[[Tensor], None], tmp_path: Path
) -> None:
    rig = Rig(tmp_path, verify=True)
    with rig.context():
        graph = Unseen()
        before = torch.arange(COUNT, dtype=torch.float32)
        rig.flush()
        graph.change(change)
        gradient = graph.gradient(drop=True)
    assert bits(gradient) == bits(before)
    assert rig.stats.bytes_read > 0
    del graph, gradient
    rig.assert_empty()


@pytest.mark.defends("live memory before the disk")
@UNSEEN
def test_an_unseen_change_of_memory_that_is_held_gives_plain_bits(
    change: Callable[[Tensor], None], tmp_path: Path
) -> None:
    def step(flush: Flush) -> Result:
        graph = Unseen()
        flush()
        graph.change(change)
        return {"x": graph.gradient(drop=False)}

    prove(step, tmp_path, reads=False)


def test_a_fused_optimizer_that_no_counter_sees_changes_what_plain_autograd_sees(
    tmp_path: Path,
) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(layers.parameters(), lr=1.0, fused=True)
        x = torch.rand(64, 64, requires_grad=True)
        losses = [layers(x).square().sum() for _ in range(2)]
        versions = [one._version for one in layers.parameters()]
        for loss in losses:
            flush()
            loss.backward()
            optimizer.step()
        assert versions == [one._version for one in layers.parameters()]
        assert x.grad is not None
        return {"x": x.grad, **dict(layers.named_parameters())}

    prove(step, tmp_path)


# What unpack hands out


@pytest.mark.parametrize("mode", ["disk", "flight"])
def test_every_unpack_gives_a_tensor_of_its_own(mode: Mode, tmp_path: Path) -> None:
    """Whoever empties what it got must not empty what the next one gets."""
    rig = Rig.in_mode(tmp_path, mode)
    x = torch.rand(COUNT, requires_grad=True)
    weight = torch.nn.Parameter(torch.rand(COUNT))
    with rig.context():
        # Of these autograd hands out what unpack returned, not a tensor made of it.
        data, constant = torch.rand(COUNT), torch.nn.Parameter(torch.rand(COUNT)).detach()
        h = x * 2
        expected = [bits(one) for one in (h, weight, data, constant)]
        nodes: list[Any] = [one.sin().grad_fn for one in (h, weight)]
        nodes += [(x * one).grad_fn for one in (data, constant)]
        if mode == "disk":
            rig.flush()
        del h, data, constant
        for node, content in zip(nodes, expected, strict=True):
            name = "_saved_other" if hasattr(node, "_saved_other") else "_saved_self"
            first, second = getattr(node, name), getattr(node, name)
            assert first is not second
            first.data = torch.empty(0)
            assert bits(second) == content
            assert bits(getattr(node, name)) == content
    assert (rig.stats.bytes_read > 0) == (mode == "disk")
    del nodes, node, first, second


class TakesItsTensor(torch.autograd.Function):
    """Returns what it saved as the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, data: Tensor) -> Tensor:
        ctx.save_for_backward(data)
        return weight * data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (data,) = ctx.saved_tensors
        return data, None


@pytest.mark.defends("a leaf that is kept cannot be swapped")
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_leaf_is_not_swapped_for_another(mode: Mode, tmp_path: Path) -> None:
    """Plain autograd has it refused; with hooks the content of another would be used."""
    rig = Rig.in_mode(tmp_path, mode)
    weight = torch.nn.Parameter(torch.rand(COUNT))
    data, other = torch.rand(COUNT), torch.rand(COUNT)
    expected = data.clone()
    with rig.context():
        loss = (weight * data).sum()
        if mode == "disk":
            rig.flush()
        with pytest.raises(RuntimeError, match=r"weakref|gradient edge"):
            torch.utils.swap_tensors(data, other)
        loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    torch.utils.swap_tensors(data, other)
    assert torch.equal(other, expected)


@pytest.mark.defends("a leaf that is kept is held itself", "a leaf in memory is handed out itself")
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_tensor_that_becomes_a_gradient_is_not_added_to(mode: Mode, tmp_path: Path) -> None:
    """A gradient that nobody else holds becomes the weight's, and the next is added in place."""
    rig = Rig.in_mode(tmp_path, mode)
    weight = torch.nn.Parameter(torch.rand(COUNT))
    data = torch.rand(COUNT)
    expected = bits(data)
    with rig.context():
        for _ in range(2):
            loss = TakesItsTensor.apply(weight, data).sum()
            if mode == "disk":
                rig.flush()
            loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * data)
    assert bits(data) == expected
    rig.assert_empty()


def test_a_new_storage_in_the_place_of_a_freed_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """Addresses and identities are used again as soon as the memory has been freed."""

    def step(flush: Flush) -> Result:
        x = torch.ones(COUNT, requires_grad=True)
        losses = []
        for number in range(8):
            # Some of the later ones lie where the earlier ones lay, and are called as they were.
            values = [torch.full((COUNT,), number + place / 100) for place in range(50)]
            losses += [(x * one).sum() * (number + 1) for one in values]
            values.clear()
            flush()
        torch.stack(losses).sum().backward()
        assert x.grad is not None
        return {"x": x.grad}

    prove(step, tmp_path)


@pytest.mark.defends("identity with a look at life")
def test_new_storages_of_one_tensor_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Neither the tensor nor its version tells them apart, and a freed one's name is used again."""
    rig = Rig.in_mode(tmp_path, "disk")
    x = torch.ones(COUNT, requires_grad=True)
    with rig.context():
        h = x * 1
        losses = []
        for number in range(8):
            h.data = torch.full((COUNT,), float(number))
            losses.append((h * h).sum())
            rig.flush()
        torch.stack(losses).sum().backward()
    # Plain autograd would use the last one for all: it keeps the tensor, not what it held.
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((COUNT,), 2.0 * sum(range(8))))
    del h, losses
    rig.assert_empty()


# What a refused backward leaves


LEFT = """
import sys
import torch
import ssdtrain
from torch.autograd.graph import saved_tensors_hooks
x = torch.rand(1000, requires_grad=True)
with ssdtrain.offload(sys.argv[1], min_bytes=1, direct_io="optional"):
    x.sin().sum().backward()
def unpack(packed):
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError("refused")
    return tensor.detach()
with saved_tensors_hooks(lambda tensor: (tensor.detach(), tensor._version), unpack):
    h = x * 2
    # Both branches are ready when the later one is refused.
    loss = (x.exp() + h.sin()).sum()
    with torch.no_grad():
        h.add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        print(error)
del h, loss
"""


@pytest.mark.defends("what a refused backward left is dropped")
def test_a_process_that_met_a_refusal_ends_well(tmp_path: Path) -> None:
    """The other branch waits in the engine; dropping it after the interpreter's end crashes."""
    done = forked_python(LEFT, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


@pytest.mark.defends("what a refused backward left is dropped")
def test_the_block_ends_with_what_a_refused_backward_left(tmp_path: Path) -> None:
    x = torch.rand(COUNT, requires_grad=True)
    with nothing_leaks():
        with ssdtrain.offload(tmp_path, min_bytes=1, direct_io="optional"):
            h = x * 2
            loss = (x.exp() + h.sin()).sum()
            with torch.no_grad():
                h.add_(1)
            with pytest.raises(RuntimeError, match=IN_PLACE):
                loss.backward()
            del h, loss
        assert x.grad is None
