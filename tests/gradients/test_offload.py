"""``ssdtrain.offload`` gives the gradients of plain autograd bit for bit, or raises as it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import (
    IN_PLACE,
    MODES,
    Flush,
    Result,
    Rig,
    Step,
    assert_equal_bits,
    bits,
    gradients,
    nothing,
    prove,
    prove_refused,
    wait_until,
)

DTYPES = sorted(
    {
        one
        for one in vars(torch).values()
        # Without those that have no bytes of their own, or no copy.
        if isinstance(one, torch.dtype)
        and not re.fullmatch(r"torch\.(q.*|bits.*|u?int[1-7]|float4.*)", str(one))
    },
    key=str,
)


class Witness(torch.autograd.Function):
    """Saves tensors, and tells in backward what it was given back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, seen: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.seen.extend(ctx.saved_tensors)
        return (grad, None, *(None for _ in ctx.saved_tensors))


def geometry(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
        type(tensor),
        tensor.requires_grad,
    )


def witnessed(make: Callable[[], list[Tensor]], flush: Flush) -> list[Tensor]:
    """Save what ``make`` makes, drop it, and return what backward sees."""
    torch.manual_seed(0)
    seen: list[Tensor] = []
    anchor = torch.ones(3, requires_grad=True)
    loss = Witness.apply(anchor, seen, *make()).sum()
    flush()
    loss.backward()
    assert anchor.grad is not None
    return seen


def assert_geometry_kept(make: Callable[[], list[Tensor]], directory: Path) -> None:
    expected = witnessed(make, nothing)
    for mode in MODES:
        rig = Rig.in_mode(directory, mode)
        with rig.context():
            actual = witnessed(make, rig.flush if mode == "disk" else nothing)
        assert [geometry(one) for one in actual] == [geometry(one) for one in expected], mode
        assert [bits(one) for one in actual] == [bits(one) for one in expected], mode
        del actual
        rig.assert_empty()


# Geometry

GEOMETRIES: dict[str, Callable[[], list[Tensor]]] = {
    "slices of a fused projection": lambda: list(torch.randn(2, 7, 96).chunk(3, dim=-1)),
    "narrow with an offset": lambda: [torch.randn(1000).narrow(0, 313, 101)],
    "a small part, then a larger one": lambda: [(x := torch.randn(9999))[7:9], x[5:9000], x[3:8]],
    "steps": lambda: [torch.randn(40, 30)[3::5, 1::7]],
    "expanded": lambda: [torch.randn(5, 1).expand(5, 8), torch.randn(1).expand(64, 64)],
    "overlapping windows": lambda: [torch.randn(100).unfold(0, 10, 3)],
    "transposed": lambda: [torch.randn(17, 5).t(), torch.randn(2, 3, 5).transpose(0, 2)],
    "permuted": lambda: [torch.randn(4, 8, 32, 2).permute(2, 0, 3, 1)],
    "channels last": lambda: [torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)],
    "without dimensions": lambda: [torch.randn(()), torch.randn(8)[3]],
    "without elements": lambda: [torch.empty(0), torch.empty(3, 0, 5), torch.randn(9)[4:4]],
    "odd strides of one element": lambda: [torch.randn(64).as_strided((1, 1, 1), (7, 5, 3), 11)],
    "lazy conjugate": lambda: [torch.randn(64, dtype=torch.complex64).conj()],
    "lazy negative": lambda: [torch.randn(64, dtype=torch.complex64).conj().imag],
    "real part of a complex": lambda: [torch.randn(64, dtype=torch.complex64).real],
    "another type of the same bytes": lambda: [
        torch.randn(100).view(torch.int16)[31:77],
        torch.randn(64).view(torch.uint8)[4:].view(torch.float32),
    ],
    "sparse": lambda: [torch.randn(8, 8).relu().to_sparse()],
    "zero tensor": lambda: [torch._efficientzerotensor((1000,))],
    "view of a zero tensor": lambda: [torch._efficientzerotensor((10, 100))[3]],
}


@pytest.mark.defends("storage offset", "strides", "what a plain tensor is")
@pytest.mark.parametrize("name", GEOMETRIES)
def test_backward_sees_the_geometry_that_was_saved(name: str, tmp_path: Path) -> None:
    assert_geometry_kept(GEOMETRIES[name], tmp_path)


@pytest.mark.filterwarnings("ignore:.*support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_sees_every_dtype_as_it_was_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    def make() -> list[Tensor]:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (4096,), dtype=torch.uint8)
        tensor = raw.view(dtype)
        return [tensor, tensor.view(16, -1).t(), tensor[5:], tensor[3]]

    assert_geometry_kept(make, tmp_path)


def test_the_address_keeps_its_remainder_so_that_kernels_sum_alike(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    torch.manual_seed(0)
    seen: list[Tensor] = []
    anchor = torch.ones(3, requires_grad=True)
    whole = torch.randn(300_001)
    parts = [whole[offset : offset + 1000] for offset in (0, 1, 2, 3, 5, 17, 33, 1024, 4001)]
    remainders = [one.data_ptr() % 64 for one in parts]
    with rig.context():
        loss = Witness.apply(anchor, seen, *parts).sum()
        rig.flush()
        del whole, parts
        loss.backward()
    assert [one.data_ptr() % 64 for one in seen] == remainders
    assert rig.stats.bytes_read > 0


def attention(flush: Flush) -> Result:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    x = torch.randn(3, 10, 32, requires_grad=True)
    y, weights = layer(x * 1.5, x * 0.5, x.sin())
    loss = y.square().sum() + weights.exp().sum()
    flush()
    loss.backward()
    assert x.grad is not None
    return {"loss": loss, "x": x.grad, **gradients(layer)}


def fused_attention(flush: Flush) -> Result:
    torch.manual_seed(0)
    project, out = nn.Linear(32, 96), nn.Linear(32, 32)
    x = torch.randn(2, 16, 32)
    heads = project(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
    loss = out(mixed.transpose(1, 2).reshape(2, 16, 32)).square().mean()
    flush()
    del heads, mixed
    loss.backward()
    return {
        "loss": loss,
        **gradients(project),
        **{f"out {k}": v for k, v in gradients(out).items()},
    }


def convolutions(flush: Flush) -> Result:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.GELU(), nn.Dropout(0.3), nn.Flatten(), nn.LazyLinear(5),
    )  # fmt: skip
    model(torch.zeros(4, 3, 16, 16))
    model.zero_grad()
    losses = []
    for _ in range(2):
        x = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(x), torch.tensor([0, 4, 2, 2]))
        flush()
        loss.backward()
        losses.append(loss.detach())
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    return {"losses": torch.stack(losses), **gradients(model), **buffers}


def named_by_thousands(flush: Flush) -> Result:
    x = torch.linspace(0, 1, 32).requires_grad_()
    y = x
    for _ in range(2000):
        y = y.sin() * 1.01
    loss = y.sum()
    flush()
    loss.backward()
    assert x.grad is not None
    return {"loss": loss, "x": x.grad}


STEPS: tuple[Step, ...] = (
    attention,
    fused_attention,
    convolutions,
    named_by_thousands,
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_gradients_are_equal_in_every_bit(step: Step, tmp_path: Path) -> None:
    prove(step, tmp_path)


def test_a_step_that_saves_nothing_is_left_alone(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        x = torch.ones(1000, requires_grad=True)
        loss = (x + 1).sum() * 2
        flush()
        loss.backward()
        assert x.grad is not None
        return {"loss": loss, "x": x.grad}

    stats = prove(step, tmp_path, writes=False, reads=False)
    assert stats.bytes_written == 0
    assert stats.tensors_kept == 0


@pytest.mark.long
def test_one_huge_tensor_comes_back(tmp_path: Path) -> None:
    nbytes = 600 << 20
    rig = Rig(tmp_path)

    def gradient(flush: Flush) -> Tensor:
        x = torch.linspace(-1, 1, 64).requires_grad_()
        loss = x.repeat(nbytes // 256).exp().sum()
        flush()
        loss.backward()
        assert x.grad is not None
        return x.grad

    def flush() -> None:
        rig.flush()
        assert rig.stats.disk_used_bytes >= nbytes
        assert rig.stats.resident_bytes == 0

    with rig.context():
        actual = gradient(flush)
    assert rig.stats.bytes_read >= nbytes
    rig.assert_empty()
    assert bits(actual) == bits(gradient(nothing))


# An operation that saves a tensor before it fills it


@pytest.mark.defends("the gate")
@pytest.mark.parametrize("follow", ["nothing", "a node", "a node that saves"])
def test_noise_that_is_saved_before_it_is_filled_comes_back_filled(
    follow: str, tmp_path: Path
) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        x = torch.randn(20_000, requires_grad=True)
        y = F.rrelu(x * 2, training=True)
        if follow == "a node":
            y = y + 1
        if follow == "a node that saves":
            y = F.rrelu(y.sin(), training=True).exp()
        loss = y.sum()
        flush()
        del y
        loss.backward()
        assert x.grad is not None
        return {"loss": loss, "x": x.grad}

    prove(step, tmp_path)


def test_hooks_touch_no_mode_and_no_random_state(tmp_path: Path) -> None:
    class Modes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.clone(), x.clone())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            before = modes()
            ctx.saved_tensors  # noqa: B018 - unpacks
            assert modes() == before
            return grad

    def modes() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu"),
            bits(torch.get_rng_state()),
        )

    x = torch.ones(100, requires_grad=True)
    for create_graph in (False, True):
        rig = Rig(tmp_path)
        with rig.context():
            before = modes()
            y = Modes.apply(x).sum()
            rig.flush()
            torch.autograd.grad(y, x, create_graph=create_graph)
            assert modes() == before


# One storage, several nodes and versions


def test_one_storage_saved_by_several_nodes_is_written_once_and_read_for_each(
    tmp_path: Path,
) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        x = torch.randn(1000, requires_grad=True)
        h = x * 2
        a, b, c = h.sin(), h.view(10, 100).cos(), h[::2].square()
        loss = a.sum() + b.sum() + c.sum()
        flush()
        del h, a, b, c
        loss.backward()
        assert x.grad is not None
        return {"loss": loss, "x": x.grad}

    prove(step, tmp_path)
    rig = Rig(tmp_path)
    with rig.context():
        step(rig.flush)
    counts = rig.store.stats()
    assert counts["write_count"] == 1
    assert rig.stats.tensors_offloaded == 1
    assert counts["read_count"] in (1, 2, 3)


@pytest.mark.defends("version at pack")
def test_a_tensor_saved_before_and_after_an_in_place_change_is_two_versions(
    tmp_path: Path,
) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        x = torch.randn(1000, requires_grad=True)
        values = torch.randn(1000)
        before = (x * values).sum()
        flush()
        values.mul_(3)
        after = (x * values).sum()
        flush()
        del values
        after.backward()
        with pytest.raises(RuntimeError, match=IN_PLACE):
            before.backward()
        assert x.grad is not None
        return {"x": x.grad, "after": after}

    stats = prove(step, tmp_path)
    assert stats.bytes_written >= 2 * 4000


def change(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def prove_change_is_refused(
    save: Callable[[Tensor], tuple[Tensor, Tensor]], directory: Path, *, flush_first: bool
) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        x = torch.randn(1000, requires_grad=True)
        loss, saved = save(x)
        if flush_first:
            flush()
        change(saved)
        if not flush_first:
            flush()
        loss.backward()
        return {}

    prove_refused(step, directory)


def an_input(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h.sin().sum(), h


def an_output(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * 2).exp()
    return y.sum(), y


def a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h[10:90].sin().sum(), h[500:]


def data(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.arange(1000.0)
    return (x * values).sum(), values.view(10, 100)


def a_detached(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h.sin().sum(), h.detach()


def a_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    weight = nn.Parameter(torch.randn(1000))
    return (x.detach() * weight * weight).sum(), weight


def a_transposed_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    layer = nn.Linear(1000, 3)
    return layer(x * 2).sum(), layer.weight


@pytest.mark.defends("version at unpack")
@pytest.mark.parametrize("flush_first", [True, False], ids=["on the disk", "on the way"])
@pytest.mark.parametrize(
    "save",
    [an_input, an_output, a_view, data, a_detached, a_weight, a_transposed_weight],
    ids=lambda save: save.__name__,
)
def test_a_change_in_place_after_the_save_is_refused(
    save: Callable[[Tensor], tuple[Tensor, Tensor]], flush_first: bool, tmp_path: Path
) -> None:
    prove_change_is_refused(save, tmp_path, flush_first=flush_first)


def test_a_change_in_place_between_two_backwards_is_refused(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        x = torch.ones(1000, requires_grad=True)
        h = x * 2
        y = h.sin().sum()
        flush()
        y.backward(retain_graph=True)
        change(h)
        y.backward()
        return {}

    prove_refused(step, tmp_path)


@pytest.mark.defends("one counter for all who saved it")
def test_a_change_in_place_before_a_double_backward_is_refused(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        x = torch.ones(1000, requires_grad=True)
        h = x * 2
        y = (h**3).sum()
        flush()
        (grad,) = torch.autograd.grad(y, h, create_graph=True)
        change(h)
        torch.autograd.grad(grad.sum(), x)
        return {}

    prove_refused(step, tmp_path)


class Mutating(torch.autograd.Function):
    """A hostile function: its backward changes what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(x, values)
        return x * values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, values = ctx.saved_tensors
        values.mul_(2)
        x.mul_(2)
        return grad * values, grad * x


@pytest.mark.defends("one counter for all who saved it")
@pytest.mark.parametrize("which", ["an activation", "data"])
def test_a_backward_that_changes_what_another_node_saved_is_refused(
    which: str, tmp_path: Path
) -> None:
    def step(flush: Flush) -> Result:
        x = torch.ones(1000, requires_grad=True)
        h, values = x * 2, torch.arange(1000.0).clone()
        other = h**3 if which == "an activation" else x * values
        loss = other.sum() + Mutating.apply(h.clone() if which == "data" else h, values).sum()
        flush()
        del h, values, other
        loss.backward()
        return {}

    prove_refused(step, tmp_path)


def test_a_backward_that_changes_what_it_saved_is_refused_the_second_time(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        x = torch.ones(1000, requires_grad=True)
        loss = Mutating.apply(x * 2, torch.arange(1000.0).clone()).sum()
        flush()
        loss.backward(retain_graph=True)
        loss.backward()
        return {}

    prove_refused(step, tmp_path)


# What is not an activation


def written_bytes(rig: Rig, forward: Callable[[], Tensor]) -> int:
    """Return how many bytes a forward gives to the disk; the backward must work."""
    with rig.context():
        loss = forward()
        rig.flush()
        loss.backward()
    return rig.stats.bytes_offloaded + rig.stats.bytes_kept + rig.stats.bytes_forwarded


@pytest.mark.defends("provenance: the base of a view")
def test_parameters_and_what_is_made_of_them_are_never_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(64, 64)
    head = nn.Linear(64, 64, bias=False)
    head.weight = table.weight
    layer = nn.Linear(64, 64)
    for one in layer.parameters():
        one.requires_grad_(False)
    adapter = nn.Parameter(torch.randn(64, 64))
    rig = Rig(tmp_path)

    def forward() -> Tensor:
        weight = adapter.t().unsqueeze(0).expand(2, 64, 64)
        return head.weight.mul(adapter).sum() + layer(weight).sum() + (layer.weight * adapter).sum()

    assert written_bytes(rig, forward) == 0
    assert rig.stats.bytes_written == 0
    assert adapter.grad is not None


def test_frozen_layers_with_adapters_write_their_activations_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    frozen = nn.Linear(64, 64).requires_grad_(False)
    down, up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
    x = torch.randn(32, 64)
    rig = Rig(tmp_path)

    def forward() -> Tensor:
        h = frozen(x) + up(down(x))
        return (frozen(h) + up(down(h))).sum()

    batch = x.nbytes
    narrow = 32 * 8 * 4
    assert written_bytes(rig, forward) == 2 * batch + 2 * narrow


@pytest.mark.defends("provenance: the walk to the parameter")
def test_weights_cast_by_autocast_are_never_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(32, 64)
    rig = Rig(tmp_path)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).sum()

    # The cast input, and the first layer's output.
    assert written_bytes(rig, forward) == 2 * 32 * 64 * 2


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_give_plain_gradients(training: bool, tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(64)
        graphs = []
        for _ in range(3):
            norm.train()
            norm(torch.randn(16, 64))
            norm.train(training)
            graphs.append((norm(torch.randn(16, 64)).sin() * norm.weight).sum())
            # What the next forward changes has been written.
            flush()
        torch.stack(graphs).sum().backward()
        return {**gradients(norm), **{k: v.clone() for k, v in norm.named_buffers()}}

    prove(step, tmp_path)


# A disk that does not move


def test_steps_go_on_while_the_disk_stands_still(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 1000).requires_grad_()
    (expected,) = torch.autograd.grad((x * 2).exp().sin().cos().sum(), x)
    rig = Rig.in_mode(tmp_path, "flight")
    with rig.context():
        for _ in range(5):
            loss = (x * 2).exp().sin().cos().sum()
            # Long enough for a rate to be measured: nothing in a second.
            wait_until(lambda: rig.store.stats()["write_busy_ns"] > 1e9, "a second of trying")
            (grad,) = torch.autograd.grad(loss, x)
            assert bits(grad) == bits(expected)
    assert rig.stats.bytes_written == 0
    del loss
    rig.assert_empty()


# Options


@pytest.mark.parametrize(
    ("backend", "direct_io"),
    [
        ("psync", "required"),
        ("psync", "disabled"),
        ("io_uring", "required"),
        ("io_uring", "disabled"),
        ("auto", "optional"),
    ],
)
def test_every_engine_and_way_of_opening_gives_equal_bits(
    backend: str, direct_io: str, tmp_path: Path
) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    for one in dirs:
        one.mkdir()
    expected = convolutions(nothing)
    rig = Rig(dirs[0], others=dirs[1:], backend=backend, direct_io=direct_io, verify=True)
    with rig.context():
        actual = convolutions(rig.flush)
    assert_equal_bits(actual, expected)
    assert rig.stats.bytes_read > 0
    assert [place for place, _ in rig.stats.engines] == [str(one) for one in dirs]
    del actual
    rig.assert_empty()
