"""A step that fails in its middle leaves model and optimizer of the last step whole."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import support
from ssdtrain import ConfigError, StorageError, offload_optimizer
from stores import ChosenStore, SlowStore
from trained import WIDTH, everything, model, plain_step, prove, train


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters())


class Rounding(torch.optim.SGD):
    """Draws random numbers in its update, as optimizers do that round at random."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(torch.rand_like(param), alpha=1e-3)
        return super().step(closure)


class Pair:
    """A plain optimizer and an offloaded one, which take the same steps."""

    def __init__(self, make: Callable[[nn.Module], Optimizer], store: Any, **options: Any) -> None:
        options = {"buffer_bytes": "1MiB", "undo": True, **options}
        self.plain_module, self.module = model(), model()
        self.plain = make(self.plain_module)
        self.optimizer: Any = offload_optimizer(make(self.module), store, **options)
        self._generator = torch.Generator().manual_seed(1)

    def gradients(self) -> None:
        x = torch.randn(8, WIDTH, generator=self._generator)
        for module in (self.plain_module, self.module):
            module.zero_grad()
            module(x).square().mean().backward()

    def both_step(self) -> None:
        torch.manual_seed(7)
        self.plain.step()
        torch.manual_seed(7)
        self.optimizer.step()
        self.optimizer._disk.flush()

    def assert_equal(self) -> None:
        support.assert_equal_bits(self.now(), everything(self.plain_module, self.plain))

    def now(self) -> dict[str, Tensor]:
        return everything(self.module, self.optimizer)


@pytest.mark.parametrize("kind", [adamw, "sgd", "groups"])
def test_equal_bits(kind: Any, tmp_path: Path) -> None:
    def groups(module: nn.Module) -> Optimizer:
        params = list(module.parameters())
        return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:], "lr": 0.1}])

    def sgd(module: nn.Module) -> Optimizer:
        return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)

    prove({"sgd": sgd, "groups": groups}.get(kind, kind), tmp_path, undo=True)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_failed_read_anywhere_undoes_the_step(steps_before: int, tmp_path: Path) -> None:
    failed_count = 0
    with ChosenStore(tmp_path) as store:
        pair = Pair(adamw, store)
        for _ in range(steps_before):
            pair.gradients()
            pair.both_step()
        pair.gradients()
        before = pair.now()
        for reads_count in range(100):
            store.fail_after(reads_count)
            try:
                pair.optimizer.step()
            except StorageError as error:
                said = str(error)
            else:
                break
            assert "the step was undone" in said
            assert "the test failed this read" in said
            failed_count += 1
            store.fail_after(0, 0)
            support.assert_equal_bits(pair.now(), before)
            assert not pair.optimizer.lost_parameters
        store.fail_after(0, 0)
        pair.plain.step()
        pair.assert_equal()
        pair.gradients()
        pair.both_step()
        pair.assert_equal()
    # What was read before a failure, or is on its way, is not read again in the next try.
    assert failed_count >= (3 if steps_before else 0)


@pytest.mark.parametrize("make", [adamw, lambda module: Rounding(module.parameters(), 1e-2, 0.9)])
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_interrupt_in_the_middle_undoes_the_step(
    make: Any, part: int, steps_before: int, tmp_path: Path
) -> None:
    pair = Pair(make, tmp_path, buffer_bytes="400KiB")
    for _ in range(steps_before):
        pair.gradients()
        pair.both_step()
    pair.gradients()
    if isinstance(pair.plain, Rounding):
        # It changes its gradients, which nobody undoes: the step is made again from the same.
        grads = [param.grad.clone() for param in pair.module.parameters()]  # type: ignore[union-attr]
    before = pair.now()
    own, calls = pair.optimizer._own_kind, []

    class Interrupted(own):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            own.step.__wrapped__(self, closure) if hasattr(own.step, "__wrapped__") else own.step(
                self, closure
            )
            calls.append(closure)
            if len(calls) == part + 1:
                raise KeyboardInterrupt

    pair.optimizer._own_kind = Interrupted
    torch.manual_seed(7)
    with pytest.raises(KeyboardInterrupt) as raised:
        pair.optimizer.step()
    assert "the step was undone" in raised.value.__notes__[0]
    support.assert_equal_bits(pair.now(), before)
    if not steps_before:
        assert not pair.optimizer.state, "what had no state has none"
    pair.optimizer._own_kind = own
    if isinstance(pair.plain, Rounding):
        for param, grad in zip(pair.module.parameters(), grads, strict=True):
            param.grad = grad
    state = torch.get_rng_state()
    assert torch.equal(state, torch.manual_seed(7).get_state()), "random numbers are undone too"
    pair.both_step()
    pair.assert_equal()


@pytest.mark.parametrize("how", ["interrupted", "unread"])
def test_a_step_that_is_undone_later(how: str, tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        pair = Pair(adamw, store)
        pair.gradients()
        pair.both_step()
        pair.gradients()
        before = pair.now()
        if how == "interrupted":
            store.fail_after(5)
            put_back, calls = pair.optimizer._undo._put_back_state, []

            def interrupted(*arguments: Any) -> None:
                calls.append(arguments)
                if len(calls) == 2:
                    raise KeyboardInterrupt
                put_back(*arguments)

            pair.optimizer._undo._put_back_state = interrupted
            with pytest.raises(KeyboardInterrupt):
                pair.optimizer.step()
        else:
            # With them the reads of the old weights of the parts before.
            store.fail_after(5, fails_count=2)
            with pytest.raises(StorageError, match=r"is not undone yet: .*: params\[0\]"):
                pair.optimizer.step()
        assert not torch.equal(before["0.weight"], pair.module[0].weight) or how == "interrupted"
        with pytest.raises(StorageError, match="has undone the step that failed before"):
            pair.optimizer.step()
        support.assert_equal_bits(pair.now(), before)
        pair.both_step()
        pair.assert_equal()


def test_state_that_somebody_holds_stays_live(tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        pair = Pair(adamw, store)
        pair.gradients()
        pair.both_step()
        held = pair.optimizer.state[pair.module[0].weight]["exp_avg"]
        old = held.clone()
        pair.gradients()
        store.fail_after(3)
        with pytest.raises(StorageError, match="undone"):
            pair.optimizer.step()
        assert torch.equal(held, old)
        pair.both_step()
        assert pair.optimizer.state[pair.module[0].weight]["exp_avg"] is held
        assert torch.equal(held, pair.plain.state[pair.plain_module[0].weight]["exp_avg"])  # type: ignore[index]


def test_without_room_for_the_way_back_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = train(adamw, None)
    # Two thirds of what state and weights take with their way back.
    with caplog.at_level(logging.WARNING):
        actual, optimizer = train(adamw, tmp_path, undo=True, max_disk_bytes="1400KiB")
    for one, other in zip(actual, expected, strict=True):
        support.assert_equal_bits(one, other)
    said = [record for record in caplog.records if "this step cannot be undone" in record.message]
    assert len(said) == 1
    stats = optimizer.offload_stats  # type: ignore[attr-defined]
    assert stats.on_disk_bytes + stats.resident_bytes > 800 << 10


def test_a_disk_that_is_gone_for_good(tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        pair = Pair(adamw, store)
        pair.gradients()
        pair.both_step()
        saved = copy.deepcopy((pair.module.state_dict(), pair.optimizer.state_dict()))
        pair.gradients()
        store.fail_after(5, fails_count=1000)
        for _ in range(2):
            with pytest.raises(StorageError, match="is not undone yet"):
                pair.optimizer.step()
        pair.module.load_state_dict(saved[0])
        pair.optimizer.load_state_dict(saved[1])
        pair.plain.step()
        pair.optimizer.step()
        store.fail_after(0, 0)
        pair.assert_equal()


def test_without_undo_only_what_is_lost_is_not_updated(tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        pair = Pair(adamw, store, undo=False)
        pair.gradients()
        pair.both_step()
        pair.gradients()
        params = list(pair.module.parameters())
        before = [param.detach().clone() for param in params]
        pair.plain.step()
        store.fail_after(4)

        with pytest.raises(StorageError, match="could not be read back in a step") as raised:
            pair.optimizer.step()
        lost = pair.optimizer.lost_parameters
        (number,) = (number for number, param in enumerate(params) if param is lost[0])
        assert len(lost) == 1
        assert f"params[{number}] of group 0, shape (160, 160)" in str(raised.value)
        others = list(pair.plain_module.parameters())
        for param, old, new in zip(params, before, others, strict=True):
            assert torch.equal(param, old if param is lost[0] else new)
        with pytest.raises(StorageError, match="lost_parameters"):
            pair.optimizer.step()
        # Given up, it begins anew, as in a plain optimizer.
        del pair.optimizer.state[lost[0]]
        del pair.plain.state[others[number]]
        with torch.no_grad():
            others[number].copy_(lost[0])
        pair.gradients()
        pair.both_step()
        pair.assert_equal()


def test_the_way_back_takes_disk_space_in_the_step_only(tmp_path: Path) -> None:
    with SlowStore(tmp_path) as store:
        pair = Pair(adamw, store)
        for _ in range(3):
            pair.gradients()
            pair.both_step()
            pair.gradients()
        pair.optimizer._disk.flush()
        state_bytes = pair.optimizer.offload_stats.on_disk_bytes
        assert store.stats()["disk_used_bytes"] <= state_bytes + 6 * 8192
        plain_step(pair.module, pair.optimizer, torch.randn(8, WIDTH))
        assert pair.optimizer._undo._before == {}


def test_undo_is_true_or_false(tmp_path: Path) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="undo must be True or False, not 'yes'"):
        offload_optimizer(
            torch.optim.AdamW(module.parameters()),
            tmp_path,
            undo="yes",  # type: ignore[arg-type]
        )
