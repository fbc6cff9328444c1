"""Gradients on the disk between micro-batches: the sums have the bits of the plain run."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support
from gradients_away import (
    BOUND,
    LAYERS,
    LOOKED,
    MICRO_BATCHES,
    ONE,
    STEPS,
    WIDTH,
    adamw,
    an_away_one,
    backward,
    backwards,
    bounded,
    clipped,
    large,
    layers,
    nothing,
    numbered,
    resident_bytes,
    sgd,
    steps,
)
from moments import AtCall, interrupt
from ssdtrain import ConfigError, StorageError, offload_optimizer
from ssdtrain.away.classes import AwayGradient, is_away
from ssdtrain.away.tensor import MIN_BYTES
from stores import ChosenStore, SlowStore
from trained import everything


def large_names(module: nn.Module) -> list[str]:
    return [name for name, param in module.named_parameters() if param.nbytes >= MIN_BYTES]


def assert_as_plain(
    make: Callable[[nn.Module], Any],
    directory: Path,
    between: Callable[[nn.Module], object] = nothing,
    build: Callable[[], nn.Module] = layers,
) -> Any:
    """Train with and without; return the offloaded optimizer."""
    plain, ours = build(), build()
    expected = steps(plain, make(plain), between)
    optimizer = bounded(make(ours), directory)
    for one, other in zip(steps(ours, optimizer, between), expected, strict=True):
        support.assert_equal_bits(one, other)
    assert optimizer.offload_stats.gradient_read_bytes > 0
    return optimizer


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("between", [nothing, clipped], ids=["plain", "clipped"])
def test_equal_bits(options: Any, between: Any, tmp_path: Path) -> None:
    optimizer = assert_as_plain(
        lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, **options),
        tmp_path,
        between,
    )
    stats = optimizer.offload_stats
    assert stats.gradient_peak_bytes <= BOUND + LOOKED
    # In each step those that exceed the bound come and go for every micro-batch but the first.
    away_bytes = (LAYERS - 3) * ONE
    assert stats.gradient_written_bytes >= STEPS * MICRO_BATCHES * away_bytes
    assert stats.gradient_read_bytes >= STEPS * (MICRO_BATCHES - 1) * away_bytes
    assert stats.gradient_stall_s > 0


@pytest.mark.parametrize("parts", [1, 2, 3, LAYERS - 1])
def test_the_bound_holds_at_every_moment(parts: int, tmp_path: Path) -> None:
    module = layers()
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, resident_bytes(module))

    optimizer = bounded(adamw(module), tmp_path, max_gradient_bytes=parts * ONE)
    for param in module.parameters():
        param.register_hook(look)
        param.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        backwards(module)
        look()
        clip_grad_norm_(module.parameters(), 0.01)
        look()
        optimizer.step()
        look()
        optimizer.zero_grad()
    stats = optimizer.offload_stats
    assert most <= parts * ONE
    assert stats.gradient_peak_bytes <= parts * ONE + LOOKED
    # One that waits for its place, and one more: the last ones that autograd has added to.
    assert most >= min(parts, 2) * ONE


def test_gradients_that_fit_stay(tmp_path: Path) -> None:
    module = layers()
    optimizer = bounded(adamw(module), tmp_path, max_gradient_bytes=LAYERS * ONE)
    backwards(module)
    optimizer.step()
    stats = optimizer.offload_stats
    assert stats.gradient_peak_bytes == LAYERS * ONE
    assert stats.gradient_written_bytes == stats.gradient_read_bytes == 0


def test_a_gradient_is_the_same_object_with_the_same_attributes(tmp_path: Path) -> None:
    module = layers()
    _optimizer = bounded(adamw(module), tmp_path)
    backward(module, 0)
    gradient = an_away_one(module)
    assert type(gradient) is AwayGradient
    gradient.mark = "a mark"
    weight = next(p for p in module.parameters() if p.grad is gradient)
    version = gradient._version
    gradient.sum()
    assert type(gradient) is AwayGradient, "a look lets it leave again"
    assert gradient._version == version
    backward(module, 1)
    assert weight.grad is gradient
    assert gradient.mark == "a mark"


LOOKS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda gradient: gradient.sum(),
    "repr": repr,
    "numpy": lambda gradient: torch.from_numpy(gradient.numpy().copy()),
    "clone": lambda gradient: gradient.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda gradient: pickle.loads(pickle.dumps(gradient)),
    "item": lambda gradient: gradient[3, 4].item(),
    "a view": lambda gradient: gradient.T[2:5],
    "data": lambda gradient: gradient.data,
    "list": lambda gradient: gradient.tolist(),
    "norm": torch.linalg.vector_norm,
    "foreach": lambda gradient: torch._foreach_norm([gradient, gradient])[1],
    "foreach, scaled": lambda gradient: torch._foreach_mul([gradient], 2.0)[0],
    "cat": lambda gradient: torch.cat([gradient, gradient]),
    "vector": lambda gradient: parameters_to_vector([gradient]),
    "bytes": lambda gradient: bytes(gradient.untyped_storage()),  # type: ignore[arg-type]
    "a new tensor of them": lambda gradient: torch.zeros_like(gradient).copy_(gradient),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_brings_the_bytes(look: str, tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    _optimizer = bounded(adamw(ours), tmp_path)
    backwards(plain)
    backwards(ours)
    name = next(name for name, one in large(ours).items() if is_away(one))
    found, expected = LOOKS[look](large(ours)[name]), LOOKS[look](large(plain)[name])
    if isinstance(expected, Tensor):
        support.assert_equal_bits({"": found}, {"": expected})
    else:
        assert found == expected


@torch.no_grad()
def by_foreach(gradient: Any) -> None:
    torch._foreach_mul_([gradient], 0.5)


def by_numpy(gradient: Any) -> None:
    gradient.numpy()[1::3] *= 0.5


def by_data(gradient: Any) -> None:
    gradient.data = gradient * 0.5


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda gradient: gradient.mul_(0.5),
    "by data": lambda gradient: gradient.data.mul_(0.5),
    "by other data": by_data,
    "by numpy": by_numpy,
    "by a view": lambda gradient: gradient.view(-1)[5:99].zero_(),
    "by copying": lambda gradient: gradient.copy_(torch.ones(WIDTH, WIDTH)),
    "by foreach": by_foreach,
}


@pytest.mark.parametrize(
    "change", support.shared_out(CHANGES, quick=["by other data", "by numpy", "by a view"])
)
def test_a_change_between_micro_batches_is_kept(change: str, tmp_path: Path) -> None:
    def between(module: nn.Module) -> None:
        for one in large(module).values():
            CHANGES[change](one)
        backward(module, 77)

    assert_as_plain(adamw, tmp_path, between)


def replaced(module: nn.Module) -> None:
    for number, param in enumerate(module.parameters()):
        if number % 3 == 0:
            param.grad = None
        elif number % 3 == 1:
            param.grad = torch.ones_like(param)
    backward(module, 77)


def by_values(module: nn.Module) -> None:
    clip_grad_value_(module.parameters(), 1e-4)


def asked_for_alone(module: nn.Module) -> None:
    params = list(module.parameters())
    found = torch.autograd.grad(module(numbered(5)).square().mean(), params)
    for param, gradient in zip(params, found, strict=True):
        assert param.grad is not None
        param.grad += gradient


def with_a_graph(module: nn.Module) -> None:
    loss = module(numbered(5)).square().mean()
    loss.backward(create_graph=True)
    sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None).backward()  # type: ignore[union-attr]
    for param in module.parameters():
        assert param.grad is not None
        param.grad = param.grad.detach()


def recomputed(module: nn.Module) -> None:
    x = numbered(5).requires_grad_()
    for layer in module.children():
        x = checkpoint(layer, x, use_reentrant=True)
    x.square().mean().backward()


def of_some(module: nn.Module) -> None:
    params = list(module.parameters())[::3]
    module(numbered(5)).square().mean().backward(inputs=params)


def held(module: nn.Module) -> None:
    """Others have views of gradients for a while, which see what is added to these."""
    views = {name: one.view(-1) for name, one in large(module).items()}
    backward(module, 9)
    for name, one in large(module).items():
        assert not is_away(one)
        assert torch.equal(views[name], one.view(-1))


def in_a_thread(module: nn.Module) -> None:
    thread = threading.Thread(target=backward, args=(module, 5))
    thread.start()
    thread.join()


def moved(module: nn.Module) -> None:
    module.double().float()
    backward(module, 8)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "between",
    [
        *(replaced, by_values, asked_for_alone, with_a_graph, recomputed, of_some, held),
        *(in_a_thread, moved),
    ],
)
def test_what_else_is_done_with_gradients(
    between: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    assert_as_plain(adamw, tmp_path, between)


def test_a_scaler_that_leaves_steps_out(tmp_path: Path) -> None:
    def trained(directory: Path | None) -> list[dict[str, Tensor]]:
        module = layers()
        optimizer = adamw(module)
        if directory is not None:
            bounded(optimizer, directory)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        seen = []
        for step in range(STEPS):
            for number in range(MICRO_BATCHES):
                factor = torch.inf if step == 1 and number == 2 else 1
                loss = module(numbered(number)).square().mean() * factor
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            seen.append(everything(module, optimizer))
            optimizer.zero_grad()
        if directory is not None:
            assert optimizer.offload_stats.gradient_peak_bytes <= BOUND + LOOKED
        return seen

    for one, other in zip(trained(tmp_path), trained(None), strict=True):
        support.assert_equal_bits(one, other)


def tied() -> nn.Module:
    module: Any = layers()
    module[5][0].weight = module[1][0].weight
    module[2].requires_grad_(False)
    return module  # type: ignore[no-any-return]


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(300, WIDTH, sparse=sparse)
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table((x.abs() * 50).long().clamp(max=299)).mean(1)
        return self.layers(found)  # type: ignore[no-any-return]


def with_words(*, sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    return Words(sparse=sparse)


@pytest.mark.parametrize(
    "build", [tied, partial(with_words, sparse=False), partial(with_words, sparse=True)]
)
def test_models(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    def make(module: nn.Module) -> Any:
        params = [param for param in module.parameters() if param.requires_grad]
        return torch.optim.SGD(params, lr=1e-2, momentum=0.9)

    optimizer = assert_as_plain(make, tmp_path, build=build)
    stats = optimizer.offload_stats
    assert stats.gradient_read_bytes > 0
    # The momentum of a sparse gradient is sparse.
    assert stats.resident_bytes > 0


def test_parameters_that_come_later(tmp_path: Path) -> None:
    module = layers(4)
    module[1].requires_grad_(False)
    optimizer = bounded(adamw(module), tmp_path, max_gradient_bytes=ONE)
    later = layers(3)
    optimizer.add_param_group({"params": later.parameters()})
    module[1].requires_grad_(True)
    optimizer.step()
    backwards(nn.Sequential(module, later))
    assert resident_bytes(module) + resident_bytes(later) <= ONE
    assert optimizer.offload_stats.gradient_on_disk_bytes == 6 * ONE


def test_hooks_of_the_user_see_sums(tmp_path: Path) -> None:
    def seen(directory: Path | None) -> list[Tensor]:
        module = layers()
        found: list[Tensor] = []

        def halve(param: Tensor) -> None:
            assert param.grad is not None
            found.append(param.grad.clone())
            param.grad.mul_(0.5)

        optimizer = adamw(module)
        if directory is not None:
            bounded(optimizer, directory)
        for param in module.parameters():
            param.register_hook(lambda gradient: gradient * 2)
            param.register_post_accumulate_grad_hook(halve)
        steps(module, optimizer)
        if directory is not None:
            assert optimizer.offload_stats.gradient_read_bytes > 0
        return found

    for one, other in zip(seen(tmp_path), seen(None), strict=True):
        assert torch.equal(one, other)


def test_with_weights_and_activations_on_the_disk(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    expected = steps(plain, adamw(plain))
    with ssdtrain.offload(
        tmp_path, max_resident_bytes="8MiB", min_bytes=1 << 10, direct_io="optional"
    ) as session:
        ssdtrain.offload_parameters(ours, session, max_resident_bytes=BOUND)
        optimizer = bounded(adamw(ours), session)
        for one, other in zip(steps(ours, optimizer), expected, strict=True):
            support.assert_equal_bits(one, other)
        backward(ours, 0)
        rows = {one.name: one for one in session.stats.classes}
        gradients = rows["gradients"]
        # Less than the bound is in memory while one is to be read for which there is room already.
        assert gradients.resident_bytes <= BOUND
        assert gradients.resident_bytes + gradients.on_disk_bytes == LAYERS * ONE
        assert gradients.bytes_written > 0
        assert "gradients" in str(session)
        assert session.stats.resident_bytes_peak <= 8 << 20


def test_two_optimizers_of_the_same_parameters(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    first, second = sgd(plain), adamw(plain)
    one, other = bounded(sgd(ours), tmp_path), bounded(adamw(ours), tmp_path)
    for _ in range(3):
        for module, optimizers in ((plain, (first, second)), (ours, (one, other))):
            backwards(module)
            for optimizer in optimizers:
                optimizer.step()
            optimizers[0].zero_grad()
        support.assert_equal_bits(everything(ours, other), everything(plain, second))
    peaks = [optimizer.offload_stats.gradient_peak_bytes for optimizer in (one, other)]
    assert sorted(peaks) == [0, BOUND]


def test_masters(tmp_path: Path) -> None:
    def trained(**options: Any) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(192, 192) for _ in range(5))).bfloat16()
        optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-2)
        offload_optimizer(optimizer, tmp_path, master_dtype=torch.float32, **options)
        seen = []
        for number in range(STEPS * MICRO_BATCHES):
            x = torch.randn(4, 192, generator=torch.Generator().manual_seed(number)).bfloat16()
            module(x).float().square().mean().backward()
            if number % MICRO_BATCHES == MICRO_BATCHES - 1:
                optimizer.step()
                seen.append(everything(module, optimizer))
                optimizer.zero_grad()
        assert (optimizer.offload_stats.gradient_read_bytes > 0) == bool(options)
        return seen

    bound = 2 * 192 * 192 * 2
    for one, other in zip(trained(max_gradient_bytes=bound), trained(), strict=True):
        support.assert_equal_bits(one, other)


def test_nothing_is_left_of_gradients_that_are_dropped(tmp_path: Path) -> None:
    with ssdtrain.TensorStore(tmp_path) as store:
        module = layers()
        optimizer = bounded(torch.optim.SGD(module.parameters(), lr=0.1), store)
        backwards(module)
        assert optimizer.offload_stats.gradient_on_disk_bytes > 0
        optimizer.zero_grad()
        assert optimizer.offload_stats.gradient_on_disk_bytes == 0
        support.wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the disk is empty")
        backwards(module)
        del module, optimizer
        gc.collect()
        support.wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the disk is empty")


def test_gradients_outlive_their_optimizer(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    optimizer = bounded(torch.optim.SGD(ours.parameters(), lr=0.1), tmp_path)
    backward(plain, 0)
    backward(ours, 0)
    del optimizer
    gc.collect()
    # Autograd goes on to add to them.
    backward(plain, 1)
    backward(ours, 1)
    support.assert_equal_bits(support.gradients(ours), support.gradients(plain))
    gradient = an_away_one(ours)
    expected = gradient.clone()
    del ours
    gc.collect()
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    "faults",
    [{"space_error_rate": 0.3}, {"space_error_rate": 1.0}, {"capacity_bytes": 300 << 10}],
    ids=["some space", "none", "full"],
)
def test_a_disk_that_takes_no_gradient(faults: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with SlowStore(tmp_path, **faults) as store:
        optimizer = bounded(torch.optim.SGD(ours.parameters(), lr=0.1), store)
        for one, other in zip(steps(ours, optimizer), expected, strict=True):
            support.assert_equal_bits(one, other)
        assert optimizer.offload_stats.write_failed_count > 0


@pytest.mark.parametrize("undo", [False, True])
def test_a_gradient_that_cannot_be_read_in_a_step(undo: bool, tmp_path: Path) -> None:
    plain = layers()
    backwards(plain)
    sums = support.gradients(plain)
    before = everything(plain, sgd(plain))
    sgd(plain).step()
    updated = everything(plain, sgd(plain))
    with ChosenStore(tmp_path) as store:
        failed_count = 0
        for reads_count in range(10):
            ours = layers()
            optimizer = bounded(sgd(ours), store, undo=undo)
            backwards(ours)
            store.fail_after(reads_count)
            try:
                optimizer.step()
            except StorageError as error:
                said = str(error)
            else:
                # One that was read ahead and not used, or one after the last.
                continue
            finally:
                store.fail_after(0, 0)
            failed_count += 1
            assert "the test failed this read" in said
            now = everything(ours, optimizer)
            left = [name for name in now if not torch.equal(now[name], updated[name])]
            support.assert_equal_bits(support.gradients(ours), sums)
            if undo:
                support.assert_equal_bits(now, before)
                optimizer.step()
                support.assert_equal_bits(everything(ours, optimizer), updated)
            else:
                assert "the gradients of some parameters could not be read" in said
                assert len(left) == 1
                assert torch.equal(now[left[0]], before[left[0]])
            # What was said is over: the next step is like any other.
            optimizer.step()
    assert failed_count >= 2


def test_a_gradient_that_cannot_be_read_in_a_backward(tmp_path: Path) -> None:
    plain = layers()
    backward(plain, 0)
    first = support.gradients(plain)
    backward(plain, 1)
    with ChosenStore(tmp_path) as store:
        for reads_count in range(LAYERS - 3):
            ours = layers()
            optimizer = bounded(sgd(ours), store)
            backward(ours, 0)
            store.fail_after(reads_count)
            with pytest.raises(StorageError, match="the test failed this read") as raised:
                backward(ours, 1)
            assert "could not bring back the gradient" in raised.value.__notes__[0]
            store.fail_after(0, 0)
            sums, both = support.gradients(ours), support.gradients(plain)
            for name, one in sums.items():
                assert torch.equal(one, first[name]) or torch.equal(one, both[name]), "no byte lost"
            optimizer.zero_grad()
            backwards(ours, 2)
            support.assert_equal_bits(support.gradients(ours), both)


@pytest.mark.parametrize("every", support.sizes(small=597, whole=59))
def test_an_interrupt_at_any_moment(every: int, tmp_path: Path) -> None:
    def once(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        optimizer.zero_grad()
        backwards(module, 2)
        clip_grad_norm_(module.parameters(), 0.01)
        optimizer.step()  # at a rate of 0
        return support.gradients(module)

    plain = layers(5)
    expected = once(plain, sgd(plain, 0.0))
    with ssdtrain.TensorStore(tmp_path, verify=True) as store:
        for number in itertools.count(step=every):
            module = layers(5)
            optimizer = bounded(sgd(module, 0.0), store, max_gradient_bytes=2 * ONE)
            try:
                with AtCall(number, interrupt) as signalled:
                    found = once(module, optimizer)
            except KeyboardInterrupt:
                found = {}
            assert signalled.came == (not found), f"the interrupt at {number} was lost"
            for _ in range(2):
                support.assert_equal_bits(once(module, optimizer), expected)
            assert resident_bytes(module) <= 2 * ONE
            del module, optimizer
            if found:
                break
        gc.collect()
        support.wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the disk is empty")
    assert number > 400
    support.assert_equal_bits(found, expected)


@pytest.mark.defends("gradients on memory of others stay")
def test_a_gradient_on_memory_of_numpy_stays_there(tmp_path: Path) -> None:
    module = layers()
    optimizer = bounded(sgd(module), tmp_path, max_gradient_bytes=ONE)
    given = {name: np.zeros((WIDTH, WIDTH), np.float32) for name in large_names(module)}
    for name, array in given.items():
        module.get_parameter(name).grad = torch.from_numpy(array)
    backwards(module)
    for name, one in large(module).items():
        assert not is_away(one)
        assert torch.equal(torch.from_numpy(given[name]), one)
        assert given[name].any(), "it is live"
    optimizer.step()


def test_a_session_that_has_no_room(tmp_path: Path) -> None:
    module = layers()
    with (
        ssdtrain.offload(tmp_path, max_resident_bytes=4 * ONE) as session,
        pytest.raises(ConfigError, match=r"max_gradient_bytes=.*is more than"),
    ):
        bounded(adamw(module), session, max_gradient_bytes=5 * ONE)
    plain = layers()
    optimizer = adamw(module)
    for one, other in zip(steps(module, optimizer), steps(plain, adamw(plain)), strict=True):
        support.assert_equal_bits(one, other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_gradient_bytes": ONE - 1}, r"does not hold the gradient of .*params\[0\]"),
        ({"max_gradient_bytes": "32KiB"}, "smaller gradients stay in memory anyway"),
        ({"overlap": "backward", "max_gradient_bytes": 2 * ONE - 1}, "still in use when the next"),
        ({"max_gradient_bytes": "much"}, "max_gradient_bytes"),
        ({"max_gradient_bytes": 0}, "max_gradient_bytes"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    optimizer = adamw(layers())
    with pytest.raises(ConfigError, match=said):
        bounded(optimizer, tmp_path, **options)
    assert type(optimizer) is torch.optim.AdamW
