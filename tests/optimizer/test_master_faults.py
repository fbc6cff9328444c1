"""Disks that fail under masters, interrupts, and checkpoints: weights and masters stay whole."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import support
from children import forked_python
from mastered import InMemory, build, master_of, started, train
from ssdtrain import ConfigError, StorageError, TensorStore, load, offload_optimizer, save
from ssdtrain.optimizer import masters
from stores import SlowStore
from test_optimizer_faults import FORK, on_failing_disks
from test_undo import ChosenStore
from trained import WIDTH, everything, plain_step


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params)


class Pair:
    """The loop in memory and an offloaded optimizer, which take the same steps."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.plain_module, plain = started(adamw, None)
        self.plain: InMemory = plain
        self.module, self.optimizer = started(adamw, store, **options)
        self._generator = torch.Generator().manual_seed(1)

    def gradients(self) -> None:
        x = torch.randn(8, WIDTH, generator=self._generator).bfloat16()
        for module in (self.plain_module, self.module):
            module.zero_grad()
            module(x).square().mean().backward()

    def both_step(self) -> None:
        self.plain.step()
        self.optimizer.step()
        self.optimizer._disk.flush()

    def now(self) -> dict[str, Tensor]:
        return everything(self.module, self.optimizer)

    def assert_equal(self) -> None:
        support.assert_equal_bits(self.now(), everything(self.plain_module, self.plain))  # type: ignore[arg-type]


@on_failing_disks
@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_failed_write_keeps_its_master(
    overlap: str, faults: dict[str, Any], tmp_path: Path
) -> None:
    expected, _ = train(adamw, None, steps=8)
    with SlowStore(tmp_path, **faults) as store:
        actual, optimizer = train(adamw, store, steps=8, overlap=overlap)
        for one, other in zip(actual, expected, strict=True):
            support.assert_equal_bits(one, other)
        if "short_rate" not in faults:
            assert optimizer.offload_stats.write_failed_count > 0


def test_a_bound_on_the_disk(tmp_path: Path) -> None:
    expected, _ = train(adamw, None, steps=6)
    for overlap in ("step", "backward"):
        actual, optimizer = train(
            adamw, tmp_path, steps=6, overlap=overlap, max_disk_bytes="500KiB"
        )
        for one, other in zip(actual, expected, strict=True):
            support.assert_equal_bits(one, other)
        assert optimizer.offload_stats.on_disk_bytes <= 500 << 10
        assert optimizer.offload_stats.resident_bytes > 100 << 10


@pytest.mark.parametrize(
    # In backward what could not be read is read once more.
    ("options", "fails_count"),
    [({"undo": True}, 1), ({"overlap": "backward"}, 1000)],
)
def test_a_failed_read_anywhere_leaves_the_last_step(
    options: dict[str, Any], fails_count: int, tmp_path: Path
) -> None:
    failed_count = 0
    with ChosenStore(tmp_path) as store:
        pair = Pair(store, **options)
        for _ in range(2):
            pair.gradients()
            pair.both_step()
        before = pair.now()
        for reads_count in range(100):
            store.fail_after(reads_count, fails_count)
            pair._generator.manual_seed(2)
            try:
                pair.gradients()
                pair.optimizer.step()
            except StorageError:
                failed_count += 1
            else:
                break
            store.fail_after(0, 0)
            pair.optimizer.zero_grad()
            support.assert_equal_bits(pair.now(), before)
            assert not pair.optimizer.lost_parameters
        store.fail_after(0, 0)
        pair.plain.step()
        pair.assert_equal()
        pair.gradients()
        pair.both_step()
        pair.assert_equal()
    assert failed_count >= 3


def test_without_undo_only_what_is_lost_is_not_updated(tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        pair = Pair(store)
        pair.gradients()
        pair.both_step()
        pair.gradients()
        params = list(pair.module.parameters())
        before = [param.detach().clone() for param in params]
        pair.plain.step()
        store.fail_after(4)

        with pytest.raises(StorageError, match="could not be read back in a step"):
            pair.optimizer.step()
        (lost,) = pair.optimizer.lost_parameters
        (number,) = (number for number, param in enumerate(params) if param is lost)
        others = list(pair.plain_module.parameters())
        for param, old, new in zip(params, before, others, strict=True):
            assert torch.equal(param, old if param is lost else new)
        # Given up, it begins anew, its master too.
        del pair.optimizer.state[lost]
        master = pair.plain.masters[number]
        del pair.plain.inner.state[master]
        with torch.no_grad():
            others[number].copy_(lost)
            master.copy_(lost)
        pair.gradients()
        pair.both_step()
        ours, plain = pair.now(), everything(pair.plain_module, pair.plain)  # type: ignore[arg-type]
        support.assert_equal_bits(dict(sorted(ours.items())), dict(sorted(plain.items())))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_interrupt_is_undone(part: int, steps_before: int, tmp_path: Path) -> None:
    pair = Pair(tmp_path, undo=True, buffer_bytes="400KiB")
    for _ in range(steps_before):
        pair.gradients()
        pair.both_step()
    pair.gradients()
    before = pair.now()
    own, calls = pair.optimizer._own_kind, []

    class Interrupted(own):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            own.step.__wrapped__(self, closure)
            calls.append(closure)
            if len(calls) == part + 1:
                raise KeyboardInterrupt

    pair.optimizer._own_kind = Interrupted
    with pytest.raises(KeyboardInterrupt):
        pair.optimizer.step()
    pair.optimizer._own_kind = own
    support.assert_equal_bits(pair.now(), before)
    if not steps_before:
        assert not pair.optimizer.state, "what had no state has none"
    pair.both_step()
    pair.assert_equal()


def test_an_interrupt_without_undo_leaves_weights_that_are_their_masters(tmp_path: Path) -> None:
    pair = Pair(tmp_path, buffer_bytes="400KiB")
    pair.gradients()
    pair.both_step()
    pair.gradients()
    own = pair.optimizer._own_kind

    class Interrupted(own):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            own.step.__wrapped__(self, closure)
            raise KeyboardInterrupt

    pair.optimizer._own_kind = Interrupted
    with pytest.raises(KeyboardInterrupt):
        pair.optimizer.step()
    assert set(pair.optimizer.state) <= set(pair.module.parameters()), "nothing else is left there"
    pair.plain.step()
    updated = []
    plain_params = pair.plain_module.parameters()
    for param, plain, (_, _, master) in zip(
        pair.module.parameters(), plain_params, pair.plain.pairs, strict=True
    ):
        ours = master_of(pair.optimizer, param)
        assert torch.equal(ours.bfloat16(), param)
        updated.append(torch.equal(ours, master))
        assert torch.equal(plain, param) or not updated[-1]
    assert any(updated)
    assert not all(updated)


class AtLine:
    """Interrupts the main thread before a line of ``masters.py``, counted from the first one."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: Any, event: str, _argument: Any) -> Any:
        return self._line if frame.f_code.co_filename == masters.__file__ else None

    def _line(self, frame: Any, event: str, _argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(self._before)
                raise KeyboardInterrupt
        return self._line


class Again:
    """The same parameters and steps again and again, up to the step that is interrupted."""

    def __init__(self, store: TensorStore, steps_before: int) -> None:
        self.params = [torch.nn.Parameter(torch.randn(200, 200).bfloat16()) for _ in range(2)]
        self._firsts = [param.detach().clone() for param in self.params]
        self._store, self._steps_before = store, steps_before
        self.start()

    def start(self) -> None:
        for param, first in zip(self.params, self._firsts, strict=True):
            param.data.copy_(first)
        self.optimizer: Any = adamw(self.params)
        offload_optimizer(self.optimizer, self._store, master_dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        for number in range(self._steps_before + 1):
            for param in self.params:
                param.grad = torch.randn(200, 200, generator=generator).bfloat16()
            if number < self._steps_before:
                self.optimizer.step()

    def now(self) -> list[list[Tensor]]:
        """Return weight, master and all other state of each parameter."""
        found = []
        for param in self.params:
            state = dict(self.optimizer.state.get(param, {}))
            # One that nobody has made yet is the weight.
            master = state.pop("master_weight", param.detach().float())
            found.append([one.clone() for one in (param.detach(), master, *state.values())])
        return found


@pytest.mark.parametrize("every", support.sizes(small=7, whole=1))
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_interrupt_at_any_line_leaves_each_parameter_before_or_after_its_update(
    steps_before: int, every: int, tmp_path: Path
) -> None:
    points_count, is_interrupted = 0, True
    with TensorStore(tmp_path) as store:
        run = Again(store, steps_before)
        before = run.now()
        run.optimizer.step()
        after = run.now()
        while is_interrupted:
            run.start()
            try:
                with AtLine(1 + every * points_count):
                    run.optimizer.step()
                is_interrupted = False
            except KeyboardInterrupt:
                points_count += 1
            assert torch.is_grad_enabled()
            assert set(run.optimizer.state) <= set(run.params), "nothing else is left there"
            for found, old, new in zip(run.now(), before, after, strict=True):
                expected = new if torch.equal(found[0], new[0]) else old
                assert len(found) == len(expected)
                assert all(map(torch.equal, found, expected))
    assert points_count > 200 // every


def test_a_state_dict_has_the_masters(tmp_path: Path) -> None:
    """In whichever order model and optimizer are loaded, and after a file between."""
    pair = Pair(tmp_path)
    for _ in range(3):
        pair.gradients()
        pair.both_step()
    torch.save((pair.module.state_dict(), pair.optimizer.state_dict()), tmp_path / "saved.pt")
    pair.gradients()
    pair.both_step()
    expected = pair.now()
    for order in ("model first", "optimizer first"):
        saved = torch.load(tmp_path / "saved.pt")
        assert saved[1]["state"][0]["master_weight"].dtype is torch.float32
        again = Pair(tmp_path)
        again.gradients()
        again.both_step()
        again.gradients()
        if order == "model first":
            again.module.load_state_dict(saved[0])
        again.optimizer.load_state_dict(saved[1])
        del saved[1]["state"]
        if order == "optimizer first":
            again.module.load_state_dict(saved[0])
        again._generator.manual_seed(1)
        for _ in range(4):
            again.gradients()
        again.optimizer.step()
        support.assert_equal_bits(again.now(), expected)


def test_a_state_of_masters_in_memory_is_taken_over(tmp_path: Path) -> None:
    """Its masters are not in it: they begin as the weights, as they would in a new loop."""
    plain_module, plain = started(adamw, None)
    x = torch.randn(3, 8, WIDTH).bfloat16()
    plain_step(plain_module, plain, x[0])
    module, optimizer = started(adamw, tmp_path)
    module.load_state_dict(plain_module.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.inner.state_dict()))
    second = InMemory(adamw, plain_module.parameters())
    second.inner.load_state_dict(plain.inner.state_dict())
    for one in x[1:]:
        plain_step(module, optimizer, one)
        plain_step(plain_module, second, one)
    support.assert_equal_bits(everything(module, optimizer), everything(plain_module, second))  # type: ignore[arg-type]


def test_a_state_that_torch_has_rounded_is_refused(tmp_path: Path) -> None:
    module, optimizer = started(adamw, tmp_path)
    plain_step(module, optimizer, torch.randn(8, WIDTH).bfloat16())
    other = adamw(build().parameters())
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ConfigError, match=r"a master that was rounded to torch\.bfloat16"):
        offload_optimizer(other, tmp_path, master_dtype=torch.float32)
    assert type(other) is torch.optim.AdamW


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(overlap: str, tmp_path: Path) -> None:
    first = Pair(tmp_path, overlap=overlap)
    for _ in range(3):
        first.gradients()
        first.both_step()
    save(tmp_path / "saved", first.module, first.optimizer)
    first.gradients()
    first.both_step()
    first.assert_equal()
    second = Pair(tmp_path, overlap=overlap)
    second.gradients()
    second.both_step()
    load(tmp_path / "saved", second.module, second.optimizer)
    stats = second.optimizer.offload_stats
    assert stats.on_disk_bytes > 0
    second._generator.manual_seed(1)
    for _ in range(4):
        second.gradients()
    second.optimizer.step()
    support.assert_equal_bits(second.now(), first.now())


def test_a_checkpoint_with_masters_needs_some(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.gradients()
    pair.both_step()
    save(tmp_path / "saved", pair.module, pair.optimizer)
    module = build()
    before = [param.detach().clone() for param in module.parameters()]
    for optimizer in (
        adamw(module.parameters()),
        offload_optimizer(adamw(module.parameters()), tmp_path),
    ):
        with pytest.raises(ConfigError, match="has float32 masters of parameters"):
            load(tmp_path / "saved", module, optimizer)
    assert all(map(torch.equal, module.parameters(), before))


def test_a_checkpoint_of_a_plain_optimizer_is_made_float32(tmp_path: Path) -> None:
    module = build()
    plain = adamw(module.parameters())
    xs = torch.randn(3, 8, WIDTH).bfloat16()
    plain_step(module, plain, xs[0])
    save(tmp_path / "saved", module, plain)
    reference = InMemory(adamw, module.parameters())
    reference.inner.load_state_dict(plain.state_dict())
    other, optimizer = started(adamw, tmp_path)
    load(tmp_path / "saved", other, optimizer)
    for x in xs[1:]:
        plain_step(module, reference, x)
        plain_step(other, optimizer, x)
    support.assert_equal_bits(everything(other, optimizer), everything(module, reference))  # type: ignore[arg-type]


@pytest.mark.long
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    text = FORK.replace("sys.argv[1])", "sys.argv[1], master_dtype=torch.float32)")
    text = text.replace("(300, 300)", "(300, 300).bfloat16()")
    text = text.replace("torch.ones(2, 300)", "torch.ones(2, 300).bfloat16()")
    assert (text.count("bfloat16()"), text.count("master_dtype")) == (2, 1)
    done = forked_python(text, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "parent goes on\n"), done.stderr


def test_verified(tmp_path: Path) -> None:
    expected, _ = train(adamw, None, steps=4)
    for overlap in ("step", "backward"):
        actual, _ = train(adamw, tmp_path, steps=4, overlap=overlap, verify=True)
        for one, other in zip(actual, expected, strict=True):
            support.assert_equal_bits(one, other)


def test_an_undone_step_gives_back_masters_that_are_in_memory(tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        pair = Pair(store, undo=True)
        pair.gradients()
        pair.both_step()
        weight: Any = pair.module[0].weight  # type: ignore[index]
        held = master_of(pair.optimizer, weight)
        old = held.clone()
        pair.gradients()
        store.fail_after(3)
        with pytest.raises(StorageError, match="undone"):
            pair.optimizer.step()
        store.fail_after(0, 0)
        assert torch.equal(held, old)
        pair.both_step()
        assert master_of(pair.optimizer, weight) is held
        pair.assert_equal()
