"""Gradients on the disk between micro-batches, whose updates are made in the last backward."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
import support
from gradients_away import (
    BOUND,
    LAYERS,
    LOOKED,
    ONE,
    STEPS,
    WIDTH,
    adamw,
    an_away_one,
    backward,
    bounded,
    clipped,
    large,
    layers,
    sgd,
)
from moments import AtCall, interrupt
from ssdtrain import StorageError, UnsupportedError
from ssdtrain.away.classes import is_away
from ssdtrain.away.tensor import MIN_BYTES
from ssdtrain.optimizer.buffers import Buffers
from ssdtrain.optimizer.taken import TakenGradient
from stores import ChosenStore, SlowStore
from trained import everything


def in_backward(optimizer: Any, place: Any, **options: Any) -> Any:
    return bounded(optimizer, place, overlap="backward", **options)


def backwards(module: nn.Module, optimizer: Any, count: int, first: int = 0) -> None:
    """Run the backwards of a step; an offloaded optimizer is told which is the last."""
    tell: Callable[[bool], object] = getattr(optimizer, "set_is_last_backward", bool)
    for number in range(count):
        tell(number == count - 1)
        backward(module, first + number)


def steps(module: nn.Module, optimizer: Any, count: int) -> list[dict[str, Tensor]]:
    """Train, and return all there is after each step."""
    seen = []
    for step in range(STEPS):
        backwards(module, optimizer, count, count * step)
        optimizer.step()
        seen.append(everything(module, optimizer))
        # Gradients of zeros are written like all others.
        optimizer.zero_grad(set_to_none=count == 1 or step % 2 == 0)
    return seen


def as_plain(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        support.assert_equal_bits(one, other)


@pytest.mark.parametrize(("count", "bound"), [(1, 2), (2, 2), (3, 3), (3, 6)])
def test_equal_bits(count: int, bound: int, tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    expected = steps(plain, adamw(plain), count)
    optimizer = in_backward(adamw(ours), tmp_path, max_gradient_bytes=bound * ONE)
    as_plain(steps(ours, optimizer, count), expected)
    stats = optimizer.offload_stats
    assert stats.gradient_peak_bytes <= bound * ONE + LOOKED
    assert (stats.gradient_read_bytes > 0) == (count > 1)
    if count == 1:
        assert stats.gradient_written_bytes == 0, "each is freed by its update"


def test_gradients_keep_their_bound_where_updates_find_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations may fill the bound of a session: then `step()` makes all updates."""
    plain, ours = layers(), layers()
    expected = steps(plain, adamw(plain), 1)
    optimizer = in_backward(adamw(ours), tmp_path)
    monkeypatch.setattr(Buffers, "try_to_reserve", lambda *_: None)
    as_plain(steps(ours, optimizer, 1), expected)
    stats = optimizer.offload_stats
    assert stats.gradient_peak_bytes <= BOUND + LOOKED
    assert stats.gradient_written_bytes > 0


def test_weights_keep_their_bound_where_their_gradients_are_taken(tmp_path: Path) -> None:
    module = layers()
    bound = 3 * ONE
    ssdtrain.offload_parameters(module, tmp_path, max_resident_bytes=bound)
    optimizer = in_backward(adamw(module), tmp_path)
    for step in range(STEPS):
        backward(module, step)
        optimizer.step()
        optimizer.zero_grad()
    assert ssdtrain.parameter_stats(module).peak_resident_bytes <= bound


@pytest.mark.parametrize("bound", [2, 3, 5])
def test_the_bound_holds_at_every_moment(bound: int, tmp_path: Path) -> None:
    module = layers()
    optimizer = in_backward(adamw(module), tmp_path, max_gradient_bytes=bound * ONE)
    seen: dict[int, weakref.ref[Tensor]] = {}
    most = 0

    def look(param: Tensor, new_bytes: int) -> None:
        """Count what is in memory, and what autograd is about to make."""
        nonlocal most
        if param.grad is not None and param.nbytes >= MIN_BYTES:
            seen[id(param.grad)] = weakref.ref(param.grad)
        alive = [one for there in list(seen.values()) if (one := there()) is not None]
        most = max(most, new_bytes + sum(one.nbytes for one in alive if not is_away(one)))

    def before(param: Tensor) -> None:
        look(param, param.nbytes if param.grad is None and param.nbytes >= MIN_BYTES else 0)

    for param in module.parameters():
        param.register_hook(lambda _, param=param: before(param))
        param.register_post_accumulate_grad_hook(lambda param: look(param, 0))
    for step in range(4):
        backwards(module, optimizer, 3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert ONE < most <= bound * ONE
    assert optimizer.offload_stats.gradient_peak_bytes <= bound * ONE + LOOKED


def test_the_last_backward_updates_what_it_completes(tmp_path: Path) -> None:
    module = layers()
    optimizer = in_backward(sgd(module), tmp_path)
    backwards(module, optimizer, 3)
    taken = [isinstance(one, TakenGradient) for one in large(module).values()]
    assert taken == [False] + [True] * (LAYERS - 1), "autograd uses the last one until it ends"
    stats = optimizer.offload_stats
    assert stats.gradient_on_disk_bytes == 0
    optimizer.step()
    assert optimizer.offload_stats.gradient_read_bytes == stats.gradient_read_bytes


@pytest.mark.parametrize("between", [lambda _: None, clipped], ids=["plain", "clipped"])
def test_without_a_last_backward_all_is_updated_in_the_step(
    between: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    plain, ours = layers(), layers()
    expected = adamw(plain)
    optimizer = in_backward(adamw(ours), tmp_path)
    optimizer.set_is_last_backward(False)
    for step in range(STEPS):
        for module, one in ((plain, expected), (ours, optimizer)):
            for number in range(3):
                backward(module, 3 * step + number)
            between(module)
            one.step()
        support.assert_equal_bits(everything(ours, optimizer), everything(plain, expected))
        # Only what `step()` itself takes stays where it is.
        support.assert_equal_bits(support.gradients(ours), support.gradients(plain))
        optimizer.zero_grad()
        expected.zero_grad()
    assert optimizer.offload_stats.gradient_peak_bytes <= BOUND + LOOKED


def test_a_clip_and_a_backward_that_come_too_late(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    optimizer = in_backward(sgd(ours), tmp_path)
    backwards(ours, optimizer, 2)
    with pytest.raises(UnsupportedError, match="this gradient is gone"):
        clipped(ours)
    named = r"^params\[\d+\] of group 0, shape \(.*\): a second backward would add to a gradient"
    with pytest.raises(UnsupportedError, match=named):
        backward(ours, 2)
    optimizer.zero_grad()
    as_plain(steps(ours, optimizer, 3), steps(plain, sgd(plain), 3))


def test_masters(tmp_path: Path) -> None:
    def trained(place: Any, **options: Any) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(192, 192) for _ in range(5))).bfloat16()
        optimizer = ssdtrain.offload_optimizer(
            adamw(module), place, master_dtype=torch.float32, buffer_bytes="512KiB", **options
        )
        seen = []
        for step in range(STEPS):
            for number in range(3):
                optimizer.set_is_last_backward(number == 2)
                x = torch.randn(4, 192, generator=torch.Generator().manual_seed(3 * step + number))
                module(x.bfloat16()).float().square().mean().backward()
            optimizer.step()
            seen.append({name: one.detach().clone() for name, one in module.named_parameters()})
            optimizer.zero_grad()
        assert (optimizer.offload_stats.gradient_read_bytes > 0) == bool(options)
        return seen

    bound = 2 * 192 * 192 * 2
    ours = trained(tmp_path, overlap="backward", max_gradient_bytes=bound)
    as_plain(ours, trained(tmp_path))


def test_with_weights_and_activations_on_the_disk(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    expected = steps(plain, adamw(plain), 3)
    with ssdtrain.offload(
        tmp_path, max_resident_bytes="8MiB", min_bytes=1 << 10, direct_io="optional"
    ) as session:
        ssdtrain.offload_parameters(ours, session, max_resident_bytes=BOUND)
        optimizer = in_backward(adamw(ours), session)
        as_plain(steps(ours, optimizer, 3), expected)
        assert session.stats.resident_bytes_peak <= 8 << 20
    assert optimizer.offload_stats.gradient_read_bytes > 0
    assert optimizer.offload_stats.gradient_peak_bytes <= BOUND + LOOKED


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_disk_that_takes_no_gradient(rate: float, tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    expected = steps(plain, sgd(plain), 3)
    with SlowStore(tmp_path, space_error_rate=rate) as store:
        optimizer = in_backward(sgd(ours), store)
        as_plain(steps(ours, optimizer, 3), expected)
        assert optimizer.offload_stats.write_failed_count > 0


def test_a_gradient_that_cannot_be_read(tmp_path: Path) -> None:
    plain = layers()
    expected = steps(plain, sgd(plain), 2)[0]
    failed = {"backward": 0, "step": 0}
    with ChosenStore(tmp_path) as store:
        for reads_count, is_last in itertools.product(range(LAYERS), (True, False)):
            ours = layers()
            before = everything(ours, sgd(ours))
            optimizer = in_backward(sgd(ours), store)
            optimizer.set_is_last_backward(False)
            backward(ours, 0)
            if not is_last:
                backward(ours, 1)
            store.fail_after(reads_count)
            where = "backward" if is_last else "step"
            said = ""
            try:
                if is_last:
                    optimizer.set_is_last_backward(True)
                    backward(ours, 1)
                optimizer.step()
            except StorageError as error:
                said = str(error)
            store.fail_after(0, 0)
            if not said:
                # One that was read ahead and not used, or one after the last.
                continue
            assert "the test failed this read" in said
            failed[where] += 1
            if is_last:
                # That backward added to some of them.
                optimizer.zero_grad()
                support.assert_equal_bits(everything(ours, optimizer), before)
                backwards(ours, optimizer, 2)
            optimizer.step()
            support.assert_equal_bits(everything(ours, optimizer), expected)
    assert min(failed.values()) >= 2


@pytest.mark.usefixtures("_unheard")
@pytest.mark.parametrize("every", support.sizes(small=593, whole=41))
def test_an_interrupt_at_any_moment(every: int, tmp_path: Path) -> None:
    def once(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        optimizer.zero_grad()
        backwards(module, optimizer, 2)
        optimizer.step()
        return everything(module, optimizer)

    plain = layers(5)
    others = sgd(plain)
    states = [everything(plain, others), *(once(plain, others) for _ in range(3))]
    with ssdtrain.TensorStore(tmp_path, verify=True) as store:
        for number in itertools.count(step=every):
            module = layers(5)
            optimizer = in_backward(sgd(module), store, max_gradient_bytes=2 * ONE)
            try:
                with AtCall(number, interrupt) as signalled:
                    once(module, optimizer)
            except KeyboardInterrupt:
                assert signalled.came
            found = everything(module, optimizer)
            is_made = not torch.equal(found["0.0.weight"], states[0]["0.0.weight"])
            support.assert_equal_bits(found, states[is_made])
            for expected in states[is_made + 1 :][:2]:
                support.assert_equal_bits(once(module, optimizer), expected)
            del module, optimizer
            if not signalled.came:
                break
        gc.collect()
        support.wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the disk is empty")
    assert number > 400


def test_gradients_outlive_their_optimizer(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    optimizer = in_backward(sgd(ours), tmp_path)
    optimizer.set_is_last_backward(False)
    backward(plain, 0)
    backward(ours, 0)
    del optimizer
    gc.collect()
    gradient = an_away_one(ours)
    assert is_away(gradient)
    support.assert_equal_bits(support.gradients(ours), support.gradients(plain))
    backward(plain, 1)
    backward(ours, 1)
    support.assert_equal_bits(support.gradients(ours), support.gradients(plain))


def test_a_backward_on_a_thread_of_its_own(tmp_path: Path) -> None:
    def trained(place: Path | None) -> dict[str, Tensor]:
        module = layers(6)
        optimizer = sgd(module)
        if place is not None:
            in_backward(optimizer, place, max_gradient_bytes=2 * ONE)
        for number in range(2):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(number))
            thread = threading.Thread(target=module(x).square().mean().backward)
            thread.start()
            thread.join()
            optimizer.step()
            optimizer.zero_grad()
        return everything(module, optimizer)

    support.assert_equal_bits(trained(tmp_path), trained(None))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_code_is_compiled_while_gradients_are_taken_and_away(tmp_path: Path) -> None:
    def trained(place: Path | None) -> dict[str, Tensor]:
        torch._dynamo.reset()
        module = layers()
        for layer in module:
            layer.compile(backend="aot_eager")
        optimizer = sgd(module)
        if place is not None:
            in_backward(optimizer, place)
        for step in range(2):
            for part in range(3):
                if place is not None:
                    optimizer.set_is_last_backward(part == 2)
                # A new length each time.
                module(torch.ones(3 * step + part + 1, WIDTH)).square().mean().backward()
            module(torch.ones(20 + step, WIDTH))
            optimizer.step()
            optimizer.zero_grad()
        return everything(module, optimizer)

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64):
        support.assert_equal_bits(trained(tmp_path), trained(None))
