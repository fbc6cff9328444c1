"""Disks that fail or are full, processes that fork, stores that close: no weight is lost."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
import support
from children import forked_python
from ssdtrain import (
    ClosedError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    SsdtrainError,
    StorageError,
    TensorStore,
)
from ssdtrain.sizes import shown_bytes
from stores import SlowStore
from weights_away import (
    WIDTH,
    Training,
    adamw,
    away,
    is_away,
    layers,
    leave,
    numbered,
    offloaded,
    plain_step,
    quarter,
    return_everything,
    squared,
    unique,
)

ONE_BYTES = WIDTH * WIDTH * 4
TRIES_MAX = 300


def trained(model: nn.Module, steps_count: int = 5) -> list[dict[str, Any]]:
    return Training(model, adamw(model.parameters()), squared).run(plain_step, steps_count)


def told(error: BaseException) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", [])])


def assert_as_it_was(model: nn.Module) -> None:
    """The model is a plain one, with all it had."""
    assert not away(model)
    assert all("ssdtrain" not in repr(vars(param)) for param in model.parameters())
    support.assert_equal_bits(
        {name: one.detach() for name, one in model.named_parameters()},
        dict(layers().named_parameters()),
    )
    with pytest.raises(ConfigError):
        ssdtrain.parameter_stats(model)
    assert not away(model)


# Full disks


def test_a_full_disk_in_the_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    with (
        SlowStore(tmp_path, capacity_bytes=4 * ONE_BYTES) as store,
        caplog.at_level(logging.WARNING),
        pytest.raises(NoSpaceError),
    ):
        offloaded(model, store)
    assert_as_it_was(model)
    # The error says it all: that training goes on would be wrong.
    assert not [one.message for one in caplog.records if one.name == "ssdtrain"]
    # And it can be offloaded elsewhere.
    offloaded(model, tmp_path)
    assert away(model)
    for one, other in zip(trained(model), trained(layers()), strict=True):
        support.assert_equal_bits(one, other)


@pytest.mark.parametrize("faults", [{"io_error_rate": 1.0}, {"gone_after_count": 3}], ids=str)
def test_a_disk_that_fails_in_the_call(faults: dict[str, Any], tmp_path: Path) -> None:
    model = layers()
    with SlowStore(tmp_path, **faults) as store, pytest.raises(StorageError):
        offloaded(model, store)
    if "io_error_rate" in faults:
        assert_as_it_was(model)


def test_a_disk_that_is_full_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is room for what leaves in the call, and not for what leaves later."""
    with (
        SlowStore(tmp_path, capacity_bytes=int(6.6 * ONE_BYTES)) as store,
        caplog.at_level(logging.WARNING),
    ):
        model = offloaded(layers(), store)
        for one, other in zip(trained(model), trained(layers()), strict=True):
            support.assert_equal_bits(one, other)
        assert ssdtrain.parameter_stats(model).write_failed_count > 0
        said = [record for record in caplog.records if "stay in memory" in record.message]
        assert len(said) == 1
        assert "training goes on" in said[0].message


@pytest.mark.parametrize("bound_bytes", [1, 3 * ONE_BYTES, 5 * ONE_BYTES, 9 * ONE_BYTES])
def test_a_bound_on_the_disk(bound_bytes: int, tmp_path: Path) -> None:
    """What does not fit stays in memory, or the call says that nothing fits."""
    model = layers()
    told = None
    try:
        offloaded(model, tmp_path, max_disk_bytes=bound_bytes)
    except NoSpaceError as error:
        told = str(error)
        assert_as_it_was(model)
    assert told is not None or bound_bytes > 1
    assert told is None or bound_bytes < 6 * ONE_BYTES
    needed = shown_bytes(9 * ONE_BYTES)
    assert told is None or f"offload_parameters needs {needed} on the disk: all weights" in told
    seen = trained(model)
    for one, other in zip(seen, trained(layers()), strict=True):
        support.assert_equal_bits(one, other)


# Failing writes and reads


@pytest.mark.parametrize(
    "faults",
    [
        {"space_error_rate": 0.05},
        {"io_error_rate": 0.02, "short_rate": 0.3, "late_rate": 0.2, "retry_rate": 0.2},
        {"short_rate": 0.5, "retry_rate": 0.5, "late_rate": 0.5},
    ],
    ids=["space", "errors", "slow"],
)
def test_failing_disks_never_give_other_bytes(faults: dict[str, Any], tmp_path: Path) -> None:
    for seed in range(8):
        with SlowStore(tmp_path, verify=True, **{**faults, "seed": seed}) as store:
            model = layers()
            try:
                offloaded(model, store)
            except StorageError:
                assert_as_it_was(model)
            else:
                again_and_again(model)


class FailingReads(SlowStore):
    """A store of which some reads fail, at their beginning or at their end."""

    chance: random.Random | None = None
    failed_count = 0

    def read(self, stored: Any) -> Any:
        pending: Any = super().read(stored)
        if self.chance is None or self.chance.random() < 0.8:
            return pending
        if self.chance.random() < 0.3:
            self._fail()
        pending.result = self._fail
        return pending

    def _fail(self) -> Any:
        self.failed_count += 1
        raise StorageError("the device failed, says the test")


def test_reads_that_fail_at_random(tmp_path: Path) -> None:
    with FailingReads(tmp_path) as store:
        model = offloaded(layers(), store)
        for seed in range(5):
            store.chance = random.Random(seed)
            again_and_again(model)
        assert store.failed_count > 20
        store.chance = None
        with ssdtrain.parameters_in_memory(model):
            for name, param in layers().named_parameters():
                assert torch.equal(model.get_parameter(name), param) == ("weight" in name)
        assert ssdtrain.parameter_stats(model).peak_resident_bytes <= 8 * ONE_BYTES


def again_and_again(model: nn.Module) -> None:
    """Make each forward and backward until the disk lets it; each time it is right."""
    expected = layers()
    for number in range(3):
        with torch.no_grad():
            for one in (model, expected):
                for place in range(8):
                    one.get_parameter(f"{place}.bias").fill_(number)
        expected.zero_grad()
        loss = squared(expected, number)
        loss.backward()
        for _ in range(TRIES_MAX):
            model.zero_grad()
            try:
                again = squared(model, number)
                again.backward()
            except StorageError:
                support.assert_nothing_is_on()
            else:
                break
        support.assert_equal_bits({"": again}, {"": loss})
        support.assert_equal_bits(support.gradients(model), support.gradients(expected))


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    with SlowStore(tmp_path, verify=True, bit_flip_rate=1.0) as store:
        model = offloaded(layers(), store)
        names = list(away(model))
        for look in (lambda one: one.sum(), torch.clone, repr, lambda one: one.detach().numpy()):
            with pytest.raises(CorruptError) as raised:
                look(model.get_parameter(names[0]))
            assert names[0] in told(raised.value)
        with pytest.raises(CorruptError):
            squared(model, 1)
        assert set(names) <= set(away(model)), "what could not be read is on the disk still"
        support.assert_nothing_is_on()


def test_a_read_that_failed_is_made_again(tmp_path: Path) -> None:
    with SlowStore(tmp_path, io_error_rate=0.0) as store:
        model = offloaded(layers(), store)
        weight = leave(model, "2.weight")
        own, calls = store.read, []

        def read(stored: Any) -> Any:
            calls.append(stored)
            raise StorageError("the device failed, says the test")

        store.read = read  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(StorageError) as raised:
                weight.sum()
        store.read = own  # type: ignore[method-assign]
        assert len(calls) == 2
        assert is_away(weight)
        assert "'2.weight'" in told(raised.value)
        assert torch.equal(weight, layers().get_parameter("2.weight"))


def test_a_device_that_is_gone(tmp_path: Path) -> None:
    """What is in memory goes on; what is not is named, each time, and nothing hangs."""
    with SlowStore(tmp_path, gone_after_count=40) as store:
        model = offloaded(layers(), store)

        def go_on() -> None:
            for number in range(50):
                squared(model, number).backward()

        with pytest.raises(StorageError) as raised:
            go_on()
        (name,) = {one for one in away(model) if f"'{one}'" in told(raised.value)}
        for _ in range(2):
            with pytest.raises(StorageError):
                model.get_parameter(name).sum()
        for other, param in unique(model).items():
            if other not in away(model):
                assert torch.equal(param, layers().get_parameter(other))
        support.assert_nothing_is_on()


@pytest.mark.parametrize("how", ["forward", "backward", "look"])
def test_a_store_that_is_closed(how: str, tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    model = offloaded(layers(), store)
    loss = squared(model, 1)
    store.close()
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: squared(model, 1),
        "backward": loss.backward,
        "look": lambda: [param.sum() for param in model.parameters()],
    }
    # A backward that failed has freed a part of its graph.
    for _ in range(1 if how == "backward" else 2):
        with pytest.raises(ClosedError) as raised:
            uses[how]()
        assert "weight" in told(raised.value)
    support.assert_nothing_is_on()
    for name, param in unique(model).items():
        if not is_away(param):
            assert torch.equal(param, layers().get_parameter(name))


def test_a_model_that_is_dropped_after_its_store(tmp_path: Path) -> None:
    with support.nothing_leaks():
        with TensorStore(tmp_path) as store:
            model = offloaded(layers(), store)
        del model, store


# Processes that fork

FORK = """
import os, sys, torch, ssdtrain
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(136, 136) for _ in range(8)))
x = torch.ones(2, 136)
with torch.no_grad():
    expected = model(x)
ssdtrain.offload_parameters(model, sys.argv[1], max_resident_bytes=2 * 136 * 136 * 4)
def plain(param):
    return type(param) is nn.Parameter
away = [param for param in model.parameters() if not plain(param)]
here = [param for param in model.parameters() if plain(param)]
child = os.fork()
if child == 0:
    told = 0
    for param in away:
        assert param.shape == (136, 136), param.shape
        try:
            param.sum()
        except ssdtrain.ClosedError as error:
            told += "fork" in str(error)
            assert "the weight" in " ".join(getattr(error, "__notes__", [])), error
    for param in here:
        param.sum()
    try:
        model(x)
    except ssdtrain.ClosedError:
        told += 1
    ssdtrain.parameter_stats(model)
    del model, away, here, param
    os._exit(0 if told == 7 or told == 8 else 10 + told)
_, status = os.waitpid(child, 0)
assert status == 0, os.waitstatus_to_exitcode(status)
with torch.no_grad():
    for _ in range(3):
        assert torch.equal(model(x), expected)
model(x).sum().backward()
print("parent goes on")
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    done = forked_python(FORK, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "parent goes on\n"), done.stderr


def test_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """Also with a model that is used then, and with one that is never dropped."""
    program = FORK.partition("def plain")[0] + (
        "import atexit, builtins\nbuiltins.kept = model\n"
        "atexit.register(lambda: print(torch.equal(model(x), expected)))\n"
    )
    done = forked_python(program, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# Bad arguments

BAD: dict[str, tuple[Callable[[Path], Any], type[SsdtrainError], str]] = {
    "no module": (
        lambda place: ssdtrain.offload_parameters([1], place),  # type: ignore[type-var]
        ConfigError,
        r"takes a torch\.nn\.Module first, not .*list.*: offload_parameters\(model, dir\)",
    ),
    "a small bound": (
        lambda place: ssdtrain.offload_parameters(layers(), place, max_resident_bytes="70KiB"),
        ConfigError,
        r"max_resident_bytes=70 KiB .*72\.2 KiB of weights.* 0 \(Linear\).*give more",
    ),
    "a word": (
        lambda place: ssdtrain.offload_parameters(layers(), place, max_resident_bytes="much"),
        ConfigError,
        "max_resident_bytes.*much",
    ),
    "no directory": (
        lambda place: ssdtrain.offload_parameters(layers(), place / "none"),
        ConfigError,
        "none",
    ),
    "small weights": (
        lambda place: ssdtrain.offload_parameters(nn.Linear(3, 3), place),
        ConfigError,
        "no weight of this Linear can leave memory.*64 KiB",
    ),
    "figures of no model": (
        lambda place: ssdtrain.parameter_stats(3),  # type: ignore[arg-type]
        ConfigError,
        "parameter_stats takes a torch.nn.Module",
    ),
    "figures of a plain model": (
        lambda place: ssdtrain.parameter_stats(layers()),
        ConfigError,
        r"ssdtrain\.offload_parameters has taken no weight of this Sequential",
    ),
    "figures of two models in one": (
        lambda place: ssdtrain.parameter_stats(
            nn.Sequential(*(ssdtrain.offload_parameters(layers(), place) for _ in range(2)))
        ),
        ConfigError,
        r"this Sequential was not given to ssdtrain\.offload_parameters as a whole",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, tmp_path: Path) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call(tmp_path)


def test_options_of_a_store_that_is_open(tmp_path: Path) -> None:
    with TensorStore(tmp_path) as store:
        for options in ({"verify": True}, {"max_disk_bytes": "1GiB"}):
            model = layers()
            with pytest.raises(ConfigError, match="options of the store"):
                ssdtrain.offload_parameters(model, store, **options)  # type: ignore[arg-type]
            assert_as_it_was(model)
        return_everything(store)


def test_a_model_that_is_offloaded_already(tmp_path: Path) -> None:
    model: Any = offloaded(layers(), tmp_path)
    for again in (model, model[2], nn.Sequential(nn.Linear(300, 300), model[5])):
        with pytest.raises(ConfigError, match=r"weight '.*' of this model is offloaded already"):
            ssdtrain.offload_parameters(again, tmp_path)
    assert torch.equal(squared(model, 1), squared(layers(), 1))


def test_a_refused_model_is_as_it_was(tmp_path: Path) -> None:
    model = layers()
    with pytest.raises(ConfigError):
        ssdtrain.offload_parameters(model, tmp_path, max_resident_bytes=5)
    assert_as_it_was(model)


# What may not leave


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_weights_that_stay_in_memory(tmp_path: Path) -> None:
    """Of a model with weights of every kind only the plain ones leave."""

    class Own(nn.Parameter):
        pass

    both = torch.randn(2, WIDTH, WIDTH)
    model: Any = layers(12)
    model[0].weight = nn.Parameter(both[0])
    model[1].weight = nn.Parameter(both[1])
    model[2].weight = Own(torch.randn(WIDTH, WIDTH))
    model[3].weight = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))
    model[4].weight.share_memory_()
    model[5] = torch.jit.script(model[5])
    staying = {f"{number}.weight" for number in range(6)}
    held = {name: one.detach().clone() for name, one in model.named_parameters()}
    offloaded(model, tmp_path, 2 * ONE_BYTES)
    stats = ssdtrain.parameter_stats(model)
    assert stats.total_bytes == 6 * ONE_BYTES
    assert stats.staying_bytes == sum(p.nbytes for p in model.parameters()) - 6 * ONE_BYTES
    x = numbered(1, 2, WIDTH)
    for _ in range(3):
        for number, part in enumerate(model):
            if number != 5:
                part(x)
    assert not staying & set(away(model))
    assert len(away(model)) >= 4
    support.assert_equal_bits(dict(model.named_parameters()), held)
    assert quarter(layers(12)) > 2 * ONE_BYTES
