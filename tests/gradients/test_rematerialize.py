"""Saved tensors that are made again from others: sessions that learn, prove and use recipes."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ssdtrain
from children import forked_python
from recipe_graphs import derivatives, made_always, through
from ssdtrain.planning.rematerialize import PROOF_COUNT
from ssdtrain.rematerialize.operations import OPERATIONS
from support import IN_PLACE, Patient, Rig, assert_equal_bits, gradients

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS = 96, 64
STEPS = PROOF_COUNT + 4


class Block(nn.Module):
    """Norms, attention of two heads, and a gated product, on a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.LayerNorm(width, eps=1e-6)
        self.heads = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        query, key, value = self.heads(self.first(x)).view(1, rows, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, width))
        y = self.second(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(WIDTH) for _ in range(3)]).to(dtype)


def step(module: nn.Module) -> dict[str, Tensor]:
    module.zero_grad()
    torch.manual_seed(1)
    dtype = next(module.parameters()).dtype
    loss = module(torch.randn(ROWS, WIDTH, dtype=dtype)).float().square().mean()
    loss.backward()
    return {"loss": loss.detach(), **gradients(module)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_session_proves_recipes_and_then_uses_them(dtype: torch.dtype, tmp_path: Path) -> None:
    module = model(dtype)
    expected = step(module)
    rig = Rig(tmp_path, rematerialize="auto", policy=Patient())
    for number in range(STEPS):
        with rig.context():
            assert_equal_bits(step(module), expected)
        # The first round of a kind is only learned from.
        if number <= PROOF_COUNT:
            assert rig.stats.bytes_rematerialized == 0, "a recipe was used unproved"
    assert rig.stats.bytes_rematerialized > 0
    assert rig.stats.rematerialize_s > 0
    assert "made again" in str(rig.stats)
    rig.assert_empty()


def test_never_makes_nothing_again(tmp_path: Path) -> None:
    module = model()
    expected = step(module)
    rig = Rig(tmp_path, rematerialize="never", policy=Patient())
    for _ in range(STEPS):
        with rig.context():
            assert_equal_bits(step(module), expected)
    assert rig.stats.bytes_rematerialized == 0
    assert "made again" not in str(rig.stats)
    rig.assert_empty()


def test_always_makes_again_from_the_first_step(tmp_path: Path) -> None:
    module = model()
    expected = step(module)
    with ssdtrain.offload(tmp_path, min_bytes=1, rematerialize="always") as session:
        assert_equal_bits(step(module), expected)
        assert session.stats.bytes_rematerialized > 0.5 * session.stats.saved_bytes_peak


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ssdtrain.ConfigError, match="rematerialize"):
        ssdtrain.offload(tmp_path, rematerialize="sometimes")  # type: ignore[arg-type]


def wrong(name: str) -> Any:
    """Return a row of the table with a function that makes slightly other numbers."""
    right = OPERATIONS[name]
    return dataclasses.replace(right, function=lambda *given: right.function(*given) * 1.0000001)


@pytest.mark.defends("proof of a recipe")
def test_a_recipe_that_makes_other_bits_is_barred_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATIONS, "SiluBackward0", wrong("SiluBackward0"))
    module = model()
    expected = step(module)
    rig = Rig(tmp_path, rematerialize="auto")
    for _ in range(STEPS):
        with rig.context():
            assert_equal_bits(step(module), expected)
    assert rig.stats.recipes_differing_count > 0
    assert "made other bits in the proof" in str(rig.stats)
    rig.assert_empty()


def test_a_result_that_changes_where_no_graph_tells_fails_the_proof(tmp_path: Path) -> None:
    """No node saves ``hidden``, so that its version is nowhere."""
    weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def run() -> dict[str, Tensor]:
        weight.grad = None
        hidden = weight * 2
        with torch.no_grad():
            hidden.mul_(0.5)
        loss = hidden.softmax(-1).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return {"loss": loss.detach(), "weight": weight.grad}

    expected = run()
    rig = Rig(tmp_path, rematerialize="auto", policy=Patient())
    for _ in range(STEPS):
        with rig.context():
            assert_equal_bits(run(), expected)
    assert rig.stats.recipes_differing_count > 0
    rig.assert_empty()


@pytest.mark.defends("form of a recipe")
def test_a_graph_of_another_form_does_not_use_what_was_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors have the same sizes, so the same keys, and are made by other operations."""
    monkeypatch.setitem(OPERATIONS, "GeluBackward0", wrong("GeluBackward0"))
    weight = torch.ones(ROWS, WIDTH, requires_grad=True)

    def run(activation: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        weight.grad = None
        hidden = weight * torch.full((ROWS, WIDTH), 1.5)
        loss = (activation(hidden) * torch.full((ROWS, WIDTH), 0.5)).exp().square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return {"loss": loss.detach(), "weight": weight.grad}

    rig = Rig(tmp_path, rematerialize="auto", policy=Patient())
    for activation in [F.silu] * STEPS + [F.gelu, F.softplus] * 3:
        expected = run(activation)
        with rig.context():
            assert_equal_bits(run(activation), expected)
    assert rig.stats.bytes_rematerialized > 0
    rig.assert_empty()


def test_a_weight_without_memory_raises(tmp_path: Path) -> None:
    """As those of FSDP2 between forward and backward, whose shards are not gathered then."""
    rig = Rig(tmp_path, rematerialize="always")
    x = torch.randn(ROWS, WIDTH)
    layer = nn.Linear(WIDTH, WIDTH)
    with rig.context():
        loss = torch.tanh(layer(x)).square().sum()
        layer.weight.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="has no memory now"):
            loss.backward()
    del loss
    rig.assert_empty()


def test_a_source_that_was_changed_in_place_raises(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rematerialize="always")
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with rig.context():
        gate = x * 2
        product = F.silu(gate) * gate
        loss = product.square().sum()
        del product
        with torch.no_grad():
            gate.add_(1)
        with pytest.raises(RuntimeError, match=IN_PLACE) as raised:
            loss.backward()  # type: ignore[no-untyped-call]
    assert any("rematerialize='never'" in note for note in raised.value.__notes__)
    del gate, loss, raised
    rig.assert_empty()


@pytest.mark.defends("weights before an update")
@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_that_an_optimizer_changes_before_backward_keeps_its_bytes_for_recipes(
    fused: bool, tmp_path: Path
) -> None:
    """Plain autograd needs no bias, and the first layer no weight, so it goes backward."""

    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
        loss = torch.tanh(layer(torch.randn(ROWS, WIDTH))).square().sum()
        for weight in layer.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        return {"loss": loss.detach(), **gradients(layer)}

    expected = run()
    rig = Rig(tmp_path, rematerialize="always")
    with rig.context():
        assert_equal_bits(run(), expected)
    assert rig.stats.bytes_rematerialized > 0
    rig.assert_empty()


def test_nothing_is_left_of_a_graph_that_is_dropped(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rematerialize="always")
    module = model()
    with rig.context():
        loss = module(torch.randn(ROWS, WIDTH)).sum()
    reference = weakref.ref(loss)
    gc.disable()
    try:
        del loss
        assert reference() is None, "a cycle keeps the graph"
        assert not rig.records.alive(), "a cycle keeps the packed objects"
    finally:
        gc.enable()
    rig.assert_empty()


def test_the_end_of_a_recipe_calls_no_function_of_python(tmp_path: Path) -> None:
    """Ctrl-C in a callback of a weak reference would be printed and lost."""
    rig = Rig(tmp_path, rematerialize="always")
    loss = None
    called = []
    with rig.context():
        loss = model()(torch.randn(ROWS, WIDTH)).sum()
    profiled = sys.getprofile()
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code))
    try:
        loss = None
    finally:
        sys.setprofile(profiled)
    assert loss is None
    assert not called
    rig.assert_empty()


def test_an_optimizer_steps_while_another_thread_saves_tensors(tmp_path: Path) -> None:
    """Neither waits for the other, and each session hears of each optimizer."""
    rig = Rig(tmp_path, rematerialize="always")
    module = model()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    interval = sys.getswitchinterval()
    done = threading.Event()

    def forward() -> None:
        with rig.context():
            held = [module(torch.randn(ROWS, WIDTH)) for _ in range(16)]
            for _ in range(48):
                held.append(module(torch.randn(ROWS, WIDTH)))
                del held[0]
        done.set()

    thread = threading.Thread(target=forward)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while not done.is_set():
            optimizer.step()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    rig.assert_empty()


def test_a_tensor_is_made_once_for_all_nodes_that_saved_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rematerialize="always")
    made = []
    rematerialize = rig.rematerializer.rematerialize

    def counted(*arguments: Any) -> Tensor:
        made.append(arguments)
        return rematerialize(*arguments)

    rig.rematerializer.rematerialize = counted  # type: ignore[method-assign]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]
    with rig.context():
        y = F.silu(x * 2)
        loss = torch.stack([(y @ weight).sum() for weight in weights]).sum()
        del y
        loss.backward()  # type: ignore[no-untyped-call]
    del loss
    # `x * 2` is kept, because it is made from a leaf that is no weight.
    assert len(made) == 1
    made.clear()
    rig.assert_empty()


def test_a_forked_child_makes_its_tensors_again(tmp_path: Path) -> None:
    """Another thread of the parent holds the lock of the session meanwhile."""
    program = """
import os, signal, sys, threading, torch, ssdtrain
import torch.nn.functional as F
with ssdtrain.offload(sys.argv[1], min_bytes=1, rematerialize="always") as session:
    x = torch.randn(64, 64, requires_grad=True)
    y = x * 2
    loss = (F.silu(y) * y).square().sum()
    del y
    held, ended = threading.Event(), threading.Event()

    def hold():
        with session._hooks._lock:
            held.set()
            ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if os.fork() == 0:
        signal.alarm(20)
        loss.backward()
        expected = torch.autograd.grad((F.silu(x * 2) * (x * 2)).square().sum(), x)[0]
        os._exit(0 if torch.equal(x.grad, expected) else 1)
    status = os.waitstatus_to_exitcode(os.wait()[1])
    ended.set()
    thread.join()
    print("child", status)
"""
    done = forked_python(program, str(tmp_path))
    assert done.stdout.strip() == "child 0", done.stderr


@pytest.mark.parametrize("checkpointed", [False, True])
def test_retained_graphs_and_second_derivatives(checkpointed: bool, tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)

        def inner(y: Tensor) -> Tensor:
            return F.silu(y * 3) * torch.sigmoid(y)

        loss = through(inner, x * 2, checkpointed=checkpointed).exp().sum()
        return derivatives(x, loss, checkpointed=checkpointed)

    assert made_always(tmp_path, run)


def test_a_source_on_the_disk_is_read_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rematerialize="always")
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with rig.context():
        gate = x * 2
        loss = F.silu(gate).square().sum()
        del gate
        rig.flush()
        assert rig.stats.disk_used_bytes >= x.nbytes
        loss.backward()  # type: ignore[no-untyped-call]
    del loss
    assert x.nbytes <= rig.stats.bytes_read < 2 * x.nbytes
    rig.assert_empty()


class Scaled(nn.Module):
    """A large weight that is multiplied and added to activations."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.rand(256, 256)) for _ in range(2))
        self.layer = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.layer(x * self.scale + self.shift))


def test_a_recipe_holds_no_weight_of_offload_parameters(tmp_path: Path) -> None:
    def trained(module: nn.Module, look: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        torch.manual_seed(1)
        loss = module(torch.randn(256, 256)).square().mean()
        look()
        loss.backward()
        return gradients(module)

    def look() -> None:
        assert ssdtrain.parameter_stats(module).resident_bytes <= bound

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Scaled() for _ in range(8)])

    expected, module, bound = trained(made()), made(), 4 * 256 * 256 * 4
    ssdtrain.offload_parameters(module, tmp_path, max_resident_bytes=bound)
    with ssdtrain.offload(tmp_path, min_bytes=4096, rematerialize="always") as session:
        assert_equal_bits(trained(module, look), expected)
    assert session.stats.bytes_rematerialized > 0


def test_a_tensor_of_another_session_is_no_source(tmp_path: Path) -> None:
    """Its bytes may be on the disk of that session."""
    first, second = (Rig(tmp_path, rematerialize="always") for _ in range(2))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with first.context():
        gate = x * 2
        made = F.silu(gate)
        del gate
        first.flush()
    with second.context():
        loss = made.square().sum()
        del made
        loss.backward()  # type: ignore[no-untyped-call]
    del loss
    assert second.stats.bytes_rematerialized == 0
    assert x.grad is not None
    expected = torch.autograd.grad(F.silu(x * 2).square().sum(), x)[0]
    assert torch.equal(x.grad, expected)
    first.assert_empty()
    second.assert_empty()
