"""With ``overlap="forward"`` updates go on after ``step()``: whoever looks at a weight waits.

Most tests hold the updates back until somebody asks for something. A look that went past us would
find the old weight, however fast the machine is.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support
from children import forked_python
from ssdtrain import ConfigError, StorageError, UnsupportedError, offload_optimizer
from ssdtrain.optimizer import deferred, pending
from ssdtrain.optimizer.deferred import Deferred, PendingPart
from stores import SlowStore
from trained import WIDTH, everything, model, plain_step

WAIT_MAX_S = 120.0


class Gate:
    """Holds updates back until somebody asks for what they change."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.asked_count = 0
        self.free_count = 0
        """So many parameters are updated before anybody asks."""
        self.order: list[Any] = []

    def ask(self) -> None:
        self.asked_count += 1
        self.opened.set()


gate = Gate()


class Gated(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        if pending.in_update() and len(gate.order) >= gate.free_count:
            assert gate.opened.wait(WAIT_MAX_S), "nobody asked"
        if pending.in_update():
            gate.order.extend(self.param_groups[0]["params"])
        return super().step(closure)


@pytest.fixture(autouse=True)
def _gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a closed gate, and open it at the end."""
    gate.__init__()  # type: ignore[misc]
    for kind, name in ((PendingPart, "look"), (Deferred, "settle")):
        own = getattr(kind, name)

        def asked(*arguments: Any, own: Any = own) -> Any:
            gate.ask()
            return own(*arguments)

        monkeypatch.setattr(kind, name, asked)
    threads = threading.active_count()
    yield
    gate.opened.set()
    for updates in list(deferred.under_way):
        updates.join()
    assert threading.active_count() == threads, "a thread is left"


def adamw(module: nn.Module) -> Optimizer:
    return Gated(module.parameters(), weight_decay=0.1)


def overlapping(module: nn.Module, directory: Any, **options: Any) -> Any:
    options = {"buffer_bytes": "1MiB", "overlap": "forward", **options}
    return offload_optimizer(adamw(module), directory, **options)


def batch(seed: int = 3) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def backward(module: nn.Module, seed: int = 3) -> None:
    module(batch(seed)).square().mean().backward()


def stepped(directory: Path | None, *, zero: bool = False) -> tuple[Any, Any]:
    """Return a model and its optimizer after a step whose updates are held back."""
    module = model()
    optimizer = adamw(module) if directory is None else overlapping(module, directory)
    backward(module)
    optimizer.step()
    if zero:
        optimizer.zero_grad()
    assert directory is None or gate.asked_count == 0, "step() waits for nothing"
    return module, optimizer


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def added_to(weight: Tensor) -> Tensor:
    with torch.no_grad():
        weight += 1
    return weight


def loaded(module: nn.Module) -> Tensor:
    """Return a weight that was changed by `load_state_dict`, which must come after the update."""
    module.load_state_dict({"4.bias": torch.ones(WIDTH)}, strict=False)
    return module[4].bias  # type: ignore[index, no-any-return]


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "data": lambda m, _: m[0].weight.data,
    "detach": lambda m, _: m[0].weight.detach(),
    "numpy": lambda m, _: torch.from_numpy(m[0].weight.detach().numpy().copy()),
    "sum": lambda m, _: m[0].weight.sum(),
    "index": lambda m, _: m[0].weight[1, 2],
    "right operand": lambda m, _: 1 - m[3].weight,
    "equal": lambda m, _: m[3].weight == m[3].weight.mean(),
    "list": lambda m, _: torch.tensor(m[0].bias.tolist()),
    "iterate": lambda m, _: torch.stack(list(m[0].bias)),
    "clone": lambda m, _: m[0].weight.clone(),
    "copy": lambda m, _: copy.copy(m[0].weight),
    "deepcopy": lambda m, _: copy.deepcopy(m[0].weight),
    "deepcopy of the model": lambda m, _: copy.deepcopy(m)[0].weight,
    "a new parameter": lambda m, _: nn.Parameter(m[0].weight),
    "as another class": lambda m, _: m[0].weight.as_subclass(Tensor),
    "pickle": lambda m, _: pickle.loads(pickle.dumps(m[0].weight)),
    "save": lambda m, _: saved(m[0].weight),
    "save of the model": lambda m, _: saved(m)[4].weight,
    "state_dict": lambda m, _: dict(m.state_dict()),
    "vector": lambda m, _: parameters_to_vector(m.parameters()),
    "norm of many": lambda m, _: torch._foreach_norm(list(m.parameters())),
    "stack": lambda m, _: torch.stack([m[0].bias, m[1].bias]),
    "out": lambda m, _: torch.add(m[0].bias.detach(), 1, out=torch.empty(2 * WIDTH)),
    "in a list of rows": lambda m, _: torch.block_diag(m[0].bias, m[4].bias),
    "forward": lambda m, _: m(batch()),
    "one module": lambda m, _: m[4](batch()),
    "eval": lambda m, _: m.eval()(batch()),
    "function": lambda m, _: F.linear(batch(), m[0].weight, m[0].bias),
    "functional call": lambda m, _: functional_call(m, {"4.bias": torch.ones(WIDTH)}, batch()),
    "changed in place": lambda m, _: added_to(m[0].weight),
    "loaded": lambda m, _: loaded(m),
    "share": lambda m, _: m[0].weight.share_memory_(),
    "to another dtype": lambda m, _: m.double()[0].weight,
    "state": lambda m, o: dict(o.state[m[0].weight]),
    "state of the optimizer": lambda _, o: o.state_dict()["state"][0],
    "weight of the optimizer": lambda _, o: o.param_groups[0]["params"][0].data,
    "synchronize": lambda m, o: [getattr(o, "synchronize", list)(), m[0].weight.data][1:],
    "another step": lambda m, o: [o.step(), m[0].weight.data][1:],
    "gradient": lambda m, _: m[0].weight.grad.sum(),
    "clip": lambda m, _: clip_grad_norm_(m.parameters(), 1e-3),
    "gradient in place": lambda m, _: [m[0].weight.grad.zero_(), m[0].weight.data],
    "zero in place": lambda m, o: [o.zero_grad(set_to_none=False), m[0].weight.data][1:],
    "zero in place by module": lambda m, _: [m.zero_grad(set_to_none=False), m[0].weight.data][1:],
}


def flat(value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        value = [value]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {str(name): one.detach().clone() for name, one in items if isinstance(one, Tensor)}


@pytest.mark.parametrize("way", LOOKS)
def test_a_look_waits_for_what_it_sees(way: str, tmp_path: Path) -> None:
    expected = LOOKS[way](*stepped(None))
    module, optimizer = stepped(tmp_path)
    seen = LOOKS[way](module, optimizer)
    assert gate.asked_count > 0
    support.assert_equal_bits(flat(seen), flat(expected))
    optimizer.synchronize()
    assert all(type(param) is nn.Parameter for param in module.parameters())
    assert all("_ssdtrain_holder" not in vars(param) for param in module.parameters())


NO_LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "shape": lambda m, _: [(p.shape, p.dtype, p.device, p.numel()) for p in m.parameters()],
    "trainable": lambda m, _: [p.requires_grad for p in m.parameters()],
    "a parameter": lambda m, _: isinstance(m[0].weight, nn.Parameter),
    "zero_grad": lambda _, o: o.zero_grad(),
    "zero_grad of the module": lambda m, _: m.zero_grad(),
    "none": lambda m, _: [setattr(p, "grad", None) for p in m.parameters()] and None,
    "deleted": lambda m, _: delattr(m[0].weight, "grad"),
    "rates": lambda _, o: [group.update(lr=0.5) for group in o.param_groups],
    "scheduler": lambda _, o: lr_scheduler.StepLR(o, 1).step(),
}


@pytest.mark.parametrize("what", NO_LOOKS)
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")
def test_what_does_not_look_does_not_wait_and_changes_no_update(what: str, tmp_path: Path) -> None:
    expected = NO_LOOKS[what](*(plain := stepped(None)))
    module, optimizer = stepped(tmp_path)
    assert NO_LOOKS[what](module, optimizer) == expected
    assert gate.asked_count == 0
    support.assert_equal_bits(everything(module, optimizer), everything(*plain))
    grads = [None if p.grad is None else p.grad.sum() for p in module.parameters()]
    assert grads == [None if p.grad is None else p.grad.sum() for p in plain[0].parameters()]


def test_gradients_that_are_kept_are_added_to(tmp_path: Path) -> None:
    results = []
    for directory in (None, tmp_path):
        module, optimizer = stepped(directory)
        for number in range(3):
            backward(module, number)
            optimizer.step()
        results.append({**everything(module, optimizer), **support.gradients(module)})
    support.assert_equal_bits(results[1], results[0])


def test_a_graph_from_before_the_step(tmp_path: Path) -> None:
    """Adding to a gradient waits; using a weight that changed meanwhile raises, as plainly."""

    def run(directory: Path | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(500, WIDTH), nn.Linear(WIDTH, WIDTH))
        optimizer = adamw(module) if directory is None else overlapping(module, directory)
        rows = torch.arange(8)
        hidden = module[0](rows)
        (module[1](hidden).square().mean() + hidden.sum()).backward(retain_graph=True)
        weighed = module[1](torch.randn(4, WIDTH, requires_grad=True)).sum()
        optimizer.step()
        hidden.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            weighed.backward()
        return {**everything(module, optimizer), **support.gradients(module)}

    support.assert_equal_bits(run(tmp_path), run(None))


def test_memory_that_others_see_is_updated_in_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = []
    for directory in (None, tmp_path):
        module = model()
        optimizer = adamw(module) if directory is None else overlapping(module, directory)
        held = module.state_dict()
        flat_gradients = torch.zeros(WIDTH)
        module[4].bias.grad = flat_gradients[:]  # type: ignore[union-attr]
        with caplog.at_level("INFO"):
            backward(module)
            gate.opened.set()  # by nobody: the step itself has to make these updates
            optimizer.step()
        results.append({name: value.clone() for name, value in held.items()})
    assert gate.asked_count == 0
    support.assert_equal_bits(results[1], results[0])
    assert "share memory with other tensors" in caplog.text


def test_a_storage_that_somebody_holds(tmp_path: Path) -> None:
    module = model()
    optimizer = overlapping(module, tmp_path)
    backward(module)
    held = module[0].weight.untyped_storage()  # type: ignore[union-attr]
    before = torch.empty(0).set_(held).clone()  # type: ignore[call-overload]
    gate.opened.set()  # by nobody: the step itself has to update this one
    optimizer.step()
    assert not pending.is_pending(module[0].weight)
    seen = torch.empty(0).set_(held).clone()  # type: ignore[call-overload]
    optimizer.synchronize()
    assert not torch.equal(seen, before)
    assert torch.equal(seen, torch.empty(0).set_(held))  # type: ignore[call-overload]


def test_a_gradient_of_two_parameters(tmp_path: Path) -> None:
    """Once the first one is updated nothing would tell that the second one still reads it."""
    results = []
    for directory in (None, tmp_path):
        module, weights = layers(3)
        optimizer = adamw(module) if directory is None else overlapping(module, directory)
        shared = batch().new_ones(WIDTH, WIDTH)
        weights[0].grad = weights[1].grad = shared
        weights[2].grad = shared.clone()
        optimizer.step()
        assert directory is None or [pending.is_pending(one) for one in weights] == [
            False,
            False,
            True,
        ]
        shared.zero_()
        results.append(everything(module, optimizer))
    support.assert_equal_bits(results[1], results[0])


def test_a_number_that_requires_no_gradient(tmp_path: Path) -> None:
    results = []
    for directory in (None, tmp_path):
        module = nn.Module()
        module.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        module.scale.grad = torch.tensor(0.5)
        optimizer = adamw(module) if directory is None else overlapping(module, directory)
        optimizer.step()
        results.append({"filled": torch.full((2,), module.scale)})
    support.assert_equal_bits(results[1], results[0])


def layers(count: int) -> tuple[nn.Sequential, list[Any]]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    return module, [layer.weight for layer in module]


def test_a_module_waits_for_its_own_weights_only(tmp_path: Path) -> None:
    module, weights = layers(2)
    optimizer = overlapping(module, tmp_path, buffer_bytes="256KiB")
    gate.free_count = 1
    backward(module)
    optimizer.step()
    (updates,) = deferred.under_way
    assert updates._pending[0].ended.wait(WAIT_MAX_S)  # type: ignore[attr-defined]
    module[0](batch())
    assert gate.asked_count == 0
    assert pending.is_pending(weights[1])
    module[1](batch())
    assert gate.asked_count > 0


def test_updates_come_in_the_order_of_the_forward(tmp_path: Path) -> None:
    module, weights = layers(4)
    optimizer: Any = offload_optimizer(
        Gated([{"params": weights[2:]}, {"params": weights[:2], "lr": 0.1}]),
        tmp_path,
        overlap="forward",
        buffer_bytes="256KiB",
    )
    gate.opened.set()
    backward(module)
    gate.order.clear()
    optimizer.step()
    optimizer.synchronize()
    assert list(map(id, gate.order)) == list(map(id, weights))


def test_modules_that_read_weights_of_inner_ones(tmp_path: Path) -> None:
    """The fast way of these is chosen by the classes of weights that lie two levels deeper."""
    seen = []
    for directory in (None, tmp_path):
        torch.manual_seed(0)
        module: Any = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, dropout=0.0)
        optimizer = adamw(module) if directory is None else overlapping(module, directory)
        x = torch.randn(2, 5, WIDTH)
        module(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            seen.append(module.eval()(x))
        module.train()
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
        seen.append(module(x).detach())
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_traced_module_reads_its_weights_in_its_own_code(tmp_path: Path) -> None:
    seen = []
    for directory in (None, tmp_path):
        module, _ = layers(2)
        traced: Any = torch.jit.trace(module, batch())
        optimizer = adamw(module) if directory is None else overlapping(module, directory)
        traced(batch(1)).square().mean().backward()
        optimizer.step()
        assert gate.asked_count == 0
        seen.append(traced(batch()).detach())
    assert torch.equal(*seen)


def test_a_session_that_offloads_activations_too(tmp_path: Path) -> None:
    results = []
    gate.opened.set()
    for directory in (None, tmp_path):
        module = model()
        optimizer = adamw(module) if directory is None else overlapping(module, directory)
        session: Any = nullcontext()
        if directory is not None:
            session = ssdtrain.offload(directory, min_bytes=1024)
        with session:
            for number in range(6):
                plain_step(module, optimizer, batch(number))
        results.append(everything(module, optimizer))
    support.assert_equal_bits(results[1], results[0])


def adapted(seed: int = 0) -> nn.Module:
    """Return a frozen base with adapters, tied weights and checkpointed blocks."""
    torch.manual_seed(seed)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.down = nn.Linear(WIDTH, WIDTH)
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(torch.tanh(self.down(x)))  # type: ignore[no-any-return]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.blocks[1].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            # A weight of another module, used without calling it.
            return F.linear(self.head(x), self.blocks[0].down.weight)  # type: ignore[union-attr, arg-type]

    return Whole()


def test_adapters_tied_weights_checkpoints_and_evaluation(tmp_path: Path) -> None:
    results = []
    gate.opened.set()
    for directory in (None, tmp_path):
        module = adapted()
        optimizer = adamw(module) if directory is None else overlapping(module, directory)
        seen = {}
        for number in range(20):
            backward(module, number)
            clip_grad_norm_(module.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            if number % 3 == 0:
                with torch.no_grad():
                    seen[f"evaluation {number}"] = module.eval()(batch())
                module.train()
            if number % 4 == 0:
                seen |= {f"{number} {k}": v for k, v in everything(module, optimizer).items()}
        results.append({**seen, **everything(module, optimizer)})
    support.assert_equal_bits(results[1], results[0])


class Failing(Gated):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if Failing.fails and pending.in_update() and len(gate.order) >= 2:
            raise ValueError("a bug of the optimizer")
        return super().step(closure)


@pytest.mark.parametrize("way", ["forward", "synchronize", "step", "state_dict", "data"])
def test_an_error_of_an_update_is_raised_once(way: str, tmp_path: Path) -> None:
    module = model()
    optimizer: Any = offload_optimizer(
        Failing(module.parameters()), tmp_path, overlap="forward", buffer_bytes="1MiB"
    )
    backward(module)
    Failing.fails = True
    try:
        optimizer.step()
        gate.opened.set()
        for updates in list(deferred.under_way):
            updates.join()
        looks: dict[str, Callable[[], Any]] = {
            "forward": lambda: module(batch()),
            "synchronize": optimizer.synchronize,
            "step": optimizer.step,
            "state_dict": optimizer.state_dict,
            "data": lambda: module[4].weight.data,
        }
        with pytest.raises(ValueError, match="a bug of the optimizer") as raised:
            looks[way]()
        assert "beside the next forward" in raised.value.__notes__[0]
    finally:
        Failing.fails = False
    module(batch())
    optimizer.step()
    optimizer.synchronize()


def test_a_failed_read_is_raised_where_somebody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate.opened.set()
    module = model()
    with SlowStore(tmp_path, gone_after_count=40) as store:
        optimizer = overlapping(module, store)

        def steps() -> None:
            for _ in range(100):
                plain_step(module, optimizer, batch())
                optimizer.synchronize()
                optimizer._disk.flush()

        with pytest.raises(StorageError, match="Load the last checkpoint"):
            steps()
        assert caplog.text.count("an update beside the forward failed") == 1
        before = [param.detach().clone() for param in module.parameters()]
        for _ in range(2):
            with pytest.raises(StorageError, match="Load the last checkpoint"):
                optimizer.step()
        for param, old in zip(module.parameters(), before, strict=True):
            assert torch.equal(param, old), "a refused step changes nothing"
        plain, other = stepped(None)
        module.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        for one, its in ((module, optimizer), (plain, other)):
            one.zero_grad()
            plain_step(one, its, batch())
    for param, same in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, same)


def test_failed_writes_keep_their_tensors(tmp_path: Path) -> None:
    gate.opened.set()
    results = []
    with SlowStore(tmp_path, space_error_rate=0.3) as store:
        for directory in (None, store):
            module = model()
            optimizer: Any = adamw(module)
            if directory is not None:
                optimizer = overlapping(module, directory)
            for number in range(20):
                plain_step(module, optimizer, batch(number))
            results.append(everything(module, optimizer))
        assert optimizer.offload_stats.write_failed_count > 0
    support.assert_equal_bits(results[1], results[0])


@pytest.mark.parametrize("where", ["look", "settle"])
def test_an_interrupt_while_waiting_loses_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = everything(*stepped(None))
    module, optimizer = stepped(tmp_path)
    kind: Any = PendingPart if where == "look" else Deferred
    own = getattr(kind, where)

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(kind, where, own)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(kind, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        module(batch()) if where == "look" else optimizer.synchronize()
    support.assert_equal_bits(everything(module, optimizer), expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_in_the_step_makes_it_whole_or_not_at_all(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = everything(*stepped(None))
    module = model()
    optimizer = overlapping(module, tmp_path)
    backward(module)
    own = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", own)
        if when == "after":
            thread.start()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    # It was not begun, so it can be made again, in whole.
    optimizer.step()
    support.assert_equal_bits(everything(module, optimizer), expected)


def test_an_optimizer_that_is_dropped_ends_its_updates(tmp_path: Path) -> None:
    expected, _ = stepped(None)
    module, optimizer = stepped(tmp_path)
    gone = weakref.ref(optimizer)
    (updates,) = deferred.under_way
    del optimizer
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    updates.join()
    del updates
    gc.collect()
    assert gone() is None
    assert not list(deferred.under_way)
    backward(module)


def test_two_optimizers_of_the_same_weights(tmp_path: Path) -> None:
    results = []
    for directory in (None, tmp_path):
        module = model()
        both = [
            adamw(module) if directory is None else overlapping(module, directory) for _ in "12"
        ]
        for number in range(3):
            backward(module, number)
            for optimizer in both:
                optimizer.step()
            module.zero_grad()
        results.append(everything(module, both[1]))
    support.assert_equal_bits(results[1], results[0])


def test_compiled_code_gets_its_updates_in_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deferred, "compiled_count", lambda: 1)
    with caplog.at_level("INFO"):
        module, _ = stepped(tmp_path)
    assert "torch.compile was used" in caplog.text
    assert all(type(param) is nn.Parameter for param in module.parameters())
    assert gate.asked_count == 0


class Dithered(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.add_(torch.rand_like(param), alpha=1e-3)
        return super().step(closure)


class Counting(torch.optim.SGD):
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


def test_what_cannot_be_exact_is_refused(tmp_path: Path) -> None:
    module = model()
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        offload_optimizer(Dithered(module.parameters()), tmp_path, overlap="forward")
    with pytest.raises(UnsupportedError, match=r"changes its attributes \(count\)"):
        offload_optimizer(Counting(module.parameters()), tmp_path, overlap="forward")
    with pytest.raises(ConfigError, match='overlap is "step", "backward" or "forward"'):
        offload_optimizer(adamw(module), tmp_path, overlap="sideways")  # type: ignore[arg-type]
    plainly: Any = offload_optimizer(Counting(module.parameters()), tmp_path)
    assert plainly.offload_stats.waited_s == 0.0


FORK = """
import os, sys, torch, ssdtrain
torch.set_num_threads(1)  # threads of OpenMP do not survive a fork, and a child waits for them
model, plain = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
plain.load_state_dict(model.state_dict())
optimizer = ssdtrain.offload_optimizer(
    torch.optim.AdamW(model.parameters()), sys.argv[1], overlap="forward"
)
other = torch.optim.AdamW(plain.parameters())
for number in range(4):
    for one, its in ((plain, other), (model, optimizer)):
        its.zero_grad()
        one(torch.ones(2, 300) * number).sum().backward()
        its.step()
    child = os.fork()
    if child == 0:
        assert type(model.weight) is torch.nn.Parameter
        os._exit(0 if torch.equal(model.weight, plain.weight) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
print("parent goes on")
"""


@pytest.mark.long
def test_a_fork_waits_for_the_updates(tmp_path: Path) -> None:
    done = forked_python(FORK, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "parent goes on\n"), done.stderr
