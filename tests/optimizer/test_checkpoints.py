"""``ssdtrain.save`` and ``ssdtrain.load`` give back every bit, or say what does not fit."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import _TYPES as safetensors_dtypes
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import support
from ssdtrain import ConfigError, CorruptError, UnsupportedError, load, offload_optimizer, save
from ssdtrain.checkpoints import shards
from trained import WIDTH, away, everything, model, plain_step

MANIFEST = "manifest.json"


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters())


def groups(module: nn.Module) -> Optimizer:
    weights = [param for param in module.parameters() if param.dim() > 1]
    others = [param for param in module.parameters() if param.dim() == 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": torch.tensor(1e-2)}],
        fused=True,
    )


def momentum(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.named_parameters(), lr=1e-2, momentum=0.9)


MAKES: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "groups": groups,
    "momentum": momentum,
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters()),
    "nadam": lambda module: torch.optim.NAdam(module.parameters()),
}


class Run:
    """A model and its optimizer, which may be offloaded."""

    def __init__(
        self,
        directory: Path | None = None,
        make: Callable[[nn.Module], Optimizer] = adamw,
        build: Callable[[], nn.Module] = model,
    ) -> None:
        self.module = build()
        self.optimizer: Any = make(self.module)
        if directory is not None:
            offload_optimizer(self.optimizer, directory, buffer_bytes="1MiB")

    def steps(self, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(number)
            plain_step(self.module, self.optimizer, torch.randn(8, WIDTH))

    def now(self) -> dict[str, Any]:
        return everything(self.module, self.optimizer)


def files_of(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def assert_whole(folder: Path) -> None:
    """Nothing is in the folder but one checkpoint."""
    named = json.loads((folder / MANIFEST).read_text())["files"]
    assert files_of(folder) == {MANIFEST, *named}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(("from_disk", "to_disk"), [(True, True), (True, False), (False, True)])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    make: str, from_disk: bool, to_disk: bool, tmp_path: Path
) -> None:
    first = Run(tmp_path if from_disk else None, MAKES[make])
    first.steps(range(3))
    save(tmp_path / "saved", first.module, first.optimizer, extra={"step": 3}, shard_bytes="300KB")
    assert_whole(tmp_path / "saved")
    first.steps(range(3, 6))
    second = Run(tmp_path if to_disk else None, MAKES[make])
    second.steps(range(10, 12))
    assert load(tmp_path / "saved", second.module, second.optimizer) == {"step": 3}
    if to_disk and make in ("adamw", "groups"):
        assert away(second.optimizer) == 6, "the state that was loaded is on the disk"
    second.steps(range(3, 6))
    support.assert_equal_bits(second.now(), first.now())
    for one, other in zip(first.optimizer.param_groups, second.optimizer.param_groups, strict=True):
        options = [{key: group[key] for key in group if key != "params"} for group in (one, other)]
        assert options[0] == options[1]


def test_what_has_no_state_yet_has_none_later(tmp_path: Path) -> None:
    first, second = Run(tmp_path), Run(tmp_path)
    save(tmp_path / "saved", first.module, first.optimizer)
    second.steps(range(2))
    assert load(tmp_path / "saved", second.module, second.optimizer) is None
    assert not second.optimizer.state
    first.steps(range(2, 4))
    second.steps(range(2, 4))
    support.assert_equal_bits(second.now(), first.now())


class Odd(nn.Module):
    """Buffers, ties, other dtypes and orders, no elements, no dimensions, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.image = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.brief = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.randn(7, 3).t())
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("here_only", torch.ones(2), persistent=False)
        self.seen: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.image(x[:, :144].reshape(-1, 4, 6, 6)).sum() * self.scalar
        own = self.brief.float().sum() + self.transposed.square().sum()
        return self.norm(self.tied(self.first(x))) + image + own  # type: ignore[no-any-return]


@pytest.mark.parametrize("offloaded", [False, True])
def test_every_kind_of_tensor(offloaded: bool, tmp_path: Path) -> None:
    first = Run(tmp_path if offloaded else None, build=Odd)
    first.steps(range(2))
    first.module.seen = (1, [2.5, None])  # type: ignore[assignment]
    save(tmp_path / "saved", first.module, first.optimizer, shard_bytes=100)
    second = Run(tmp_path if offloaded else None, build=Odd)
    version = second.module.scalar._version
    load(tmp_path / "saved", second.module, second.optimizer)
    assert second.module.scalar._version > version, "autograd is told of the change"
    assert second.module.seen == (1, [2.5, None])
    assert second.module.tied.weight is second.module.first.weight  # type: ignore[union-attr]
    support.assert_equal_bits(
        dict(second.module.named_buffers()), dict(first.module.named_buffers())
    )
    moments = [
        one.optimizer.state[one.module.image.weight]["exp_avg"].stride()  # type: ignore[union-attr]
        for one in (first, second)
    ]
    assert moments[0] == moments[1] == first.module.image.weight.stride()  # type: ignore[union-attr]
    for one in (first, second):
        one.steps(range(2, 4))
    support.assert_equal_bits(second.now(), first.now())


def test_the_files_are_what_the_safetensors_package_reads(tmp_path: Path) -> None:
    run = Run(tmp_path, build=Odd)
    run.steps(range(2))
    save(tmp_path / "saved", run.module, run.optimizer)
    read = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            read |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    wave = read.pop("wave")
    assert torch.equal(wave.view(torch.complex128), run.module.wave), "as plain bytes"
    for name, tensor in run.module.state_dict().items():
        if isinstance(tensor, torch.Tensor) and name not in ("tied.weight", "wave"):
            assert torch.equal(read[name], tensor), name
    momentum = run.optimizer.state[run.module.first.weight]["exp_avg"]  # type: ignore[union-attr]
    assert torch.equal(read["first.weight/exp_avg"], momentum)


class Typed(nn.Module):
    """A weight and a buffer of one dtype, the buffer without dimensions."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(seed)
        # Bytes of which none is a NaN in any dtype.
        plain = torch.randint(1, 64, (33, 16), dtype=torch.uint8, generator=noise).view(dtype)
        self.weight = nn.Parameter(plain, requires_grad=False)
        self.register_buffer("scale", plain[0, 0].clone())


@pytest.mark.parametrize(
    "dtype", [one for one in safetensors_dtypes.values() if one is not torch.bool], ids=str
)
def test_dtypes_have_their_names_in_the_files(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Typed(dtype, 0)
    save(tmp_path / "saved", first)
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    for name, tensor in load_file(file).items():
        mine = first.state_dict()[name]
        assert (tensor.dtype, tensor.shape) == (dtype, mine.shape)
        assert support.bits(tensor) == support.bits(mine)
    # As they were written before some of the names were in use.
    monkeypatch.setattr(shards, "DTYPES", {})
    save(tmp_path / "older", first)
    for folder in ("saved", "older"):
        second = Typed(dtype, 1)
        load(tmp_path / folder, second)
        support.assert_equal_bits(second.state_dict(), first.state_dict())


def test_extra_values_and_a_scheduler(tmp_path: Path) -> None:
    run = Run()
    scheduler = lr_scheduler.MultiStepLR(run.optimizer, [2, 5], 0.5)
    for number in range(3):
        run.steps(range(number, number + 1))
        scheduler.step()
    extra = {
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "odd": (math.inf, -0.0, {1: "one", "$two": 2}, OrderedDict(a=1), Counter("aab"), {3}),
        "dtype": torch.bfloat16,
    }
    save(tmp_path / "saved", run.module, run.optimizer, extra=extra)
    other = Run()
    again = lr_scheduler.MultiStepLR(other.optimizer, [2, 5], 0.5)
    loaded = load(tmp_path / "saved", other.module, other.optimizer)
    assert torch.equal(loaded["random"], extra["random"])
    assert repr(loaded["odd"]) == repr(extra["odd"])
    assert loaded["dtype"] is torch.bfloat16
    again.load_state_dict(loaded["scheduler"])
    for one, its in ((run, scheduler), (other, again)):
        for number in range(3, 7):
            one.steps(range(number, number + 1))
            its.step()
    support.assert_equal_bits(other.now(), run.now())
    assert run.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"] == 2.5e-4


def test_weights_alone(tmp_path: Path) -> None:
    run, other = Run(), Run()
    run.steps(range(2))
    save(tmp_path / "saved", run.module, run.optimizer)
    load(tmp_path / "saved", other.module, check_first=False)
    support.assert_equal_bits(other.module.state_dict(), run.module.state_dict())
    save(tmp_path / "saved", run.module)
    assert_whole(tmp_path / "saved")
    with pytest.raises(ConfigError, match="saved without an optimizer"):
        load(tmp_path / "saved", other.module, other.optimizer)


class TwoRun(Run):
    """A model with an optimizer for its first layer, and another for the rest."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(directory, lambda module: adamw(module[0]))  # type: ignore[index]
        self.second = momentum(self.module[1:])  # type: ignore[index]
        if directory is not None:
            offload_optimizer(self.second, directory, buffer_bytes="1MiB")

    @property
    def both(self) -> list[Optimizer]:
        return [self.optimizer, self.second]

    def steps(self, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(number)
            self.module(torch.randn(8, WIDTH)).square().mean().backward()
            for one in self.both:
                one.step()
                one.zero_grad()

    def now(self) -> dict[str, Any]:
        first, second = (everything(self.module, one) for one in self.both)
        return first | {f"second {name}": value for name, value in second.items()}


@pytest.mark.parametrize("sequence", [list, tuple])
def test_several_optimizers(sequence: Callable[[Any], Any], tmp_path: Path) -> None:
    first = TwoRun(tmp_path)
    first.steps(range(2))
    save(tmp_path / "saved", first.module, sequence(first.both), extra=2, shard_bytes="300KB")
    assert_whole(tmp_path / "saved")
    first.steps(range(2, 4))
    for directory in (tmp_path, None):
        second = TwoRun(directory)
        second.steps(range(5, 6))
        assert load(tmp_path / "saved", second.module, sequence(second.both)) == 2
        second.steps(range(2, 4))
        support.assert_equal_bits(second.now(), first.now())
    load(tmp_path / "saved", second.module)
    before = second.now()
    for given, message in [
        (second.optimizer, "has the state of 2 optimizers, and 1 were given.*in the order"),
        (second.both[::-1], "optimizer 0 of the list: .*adamw.AdamW, and the optimizer here"),
        ([second.optimizer, None], "Optimizer, or a list of them, not <class 'NoneType'>"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "saved", second.module, given)
    support.assert_equal_bits(second.now(), before)


def test_a_list_of_one_optimizer_or_none_is_as_it(tmp_path: Path) -> None:
    run, other = Run(), Run()
    run.steps(range(2))
    save(tmp_path / "saved", run.module, [run.optimizer])
    load(tmp_path / "saved", other.module, other.optimizer)
    support.assert_equal_bits(other.now(), run.now())
    save(tmp_path / "saved", run.module, [])
    with pytest.raises(ConfigError, match="saved without an optimizer"):
        load(tmp_path / "saved", other.module, other.optimizer)


def test_two_optimizers_of_the_same_parameters(tmp_path: Path) -> None:
    run, other = Run(), Run()
    pairs = [[one.optimizer, momentum(one.module)] for one in (run, other)]
    for optimizer in pairs[0]:
        plain_step(run.module, optimizer, torch.randn(8, WIDTH))
    save(tmp_path / "saved", run.module, pairs[0])
    load(tmp_path / "saved", other.module, pairs[1])
    for mine, theirs in zip(*pairs, strict=True):
        support.assert_equal_bits(everything(other.module, theirs), everything(run.module, mine))


def test_names_that_a_file_would_have_twice(tmp_path: Path) -> None:
    module = nn.Module()
    names = ["w", "w@1", "w/exp_avg", "w/exp_avg@1", "__metadata__"]
    for number, name in enumerate(names):
        module.register_parameter(name, nn.Parameter(torch.full((4,), float(number))))
    pair = [adamw(module), torch.optim.AdamW(module.parameters(), lr=0.1)]
    for param in module.parameters():
        param.grad = torch.ones(4)
    for optimizer in pair:
        optimizer.step()
    before = everything(module, pair[0]), everything(module, pair[1])
    save(tmp_path / "saved", module, pair)
    count = 0
    for file in (tmp_path / "saved").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            count += len(opened.keys())
    assert count == len(names) * (1 + 2 * 3)
    for optimizer in pair:
        optimizer.step()
    load(tmp_path / "saved", module, pair)
    support.assert_equal_bits(everything(module, pair[0]), before[0])
    support.assert_equal_bits(everything(module, pair[1]), before[1])


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64(-0.0),
        np.float16("nan"),
        np.int64(-(1 << 62)),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.datetime64("2026-11-24T10:00"),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.asfortranarray(np.random.default_rng(0).random((3, 4))),
        np.zeros((0, 3), dtype=np.uint8),
        np.array(2.5),
    ],
    ids=lambda value: f"{type(value).__name__} of {value.dtype}",
)
def test_numbers_and_arrays_of_numpy_in_extra(value: Any, tmp_path: Path) -> None:
    save(tmp_path / "saved", model(), extra={"it": value})
    found = load(tmp_path / "saved", model())["it"]
    assert type(found) is type(value)
    assert (found.dtype.str, found.shape) == (value.dtype.str, value.shape)
    assert found.tobytes() == value.tobytes()
    if isinstance(found, np.ndarray):
        assert found.flags.writeable


def test_the_state_of_numpys_random_numbers_in_extra(tmp_path: Path) -> None:
    save(tmp_path / "saved", model(), extra={np.int64(3): np.random.get_state()})  # noqa: NPY002
    expected = np.random.random(4)  # noqa: NPY002
    np.random.set_state(load(tmp_path / "saved", model())[3])  # noqa: NPY002
    assert np.array_equal(np.random.random(4), expected)  # noqa: NPY002


def renamed() -> nn.Module:
    return nn.Sequential(OrderedDict(zip("abcde", model(), strict=True)))


def narrower() -> nn.Module:
    module = model()
    module[4] = nn.Linear(WIDTH, 3)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    module[1].weight = module[0].weight
    return module


def untied() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def reversed_params(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(list(module.parameters())[::-1])


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (
            {},
            {"build": renamed},
            r"only the checkpoint has 0\.bias, .* only this model has a\.bias",
        ),
        ({}, {"build": narrower}, r"4\.weight is float32 of shape \(160, 160\) in .*\(3, 160\)"),
        ({}, {"build": lambda: model().double()}, r"0\.weight is float32 .* float64 .* here"),
        ({"build": tied}, {"build": untied}, r"1\.weight is the same tensor as 0\.weight in the c"),
        ({"build": untied}, {"build": tied}, r"1\.weight is another tensor than 0\.weight in the"),
        ({}, {"make": momentum}, r"adamw\.AdamW, and the optimizer here is a torch\.optim\.sgd"),
        ({}, {"make": groups}, r"have \[8\] parameters in the checkpoint, and \[3, 5\] here"),
        ({}, {"make": reversed_params}, r"parameter 0 of group 0 is 0\.weight in .* 4\.bias here"),
    ],
)
@pytest.mark.parametrize("offloaded", [False, True])
def test_another_model_or_optimizer_is_refused_by_name(
    saved: Any, loaded: Any, message: str, offloaded: bool, tmp_path: Path
) -> None:
    first = Run(tmp_path, **saved)
    first.steps(range(1))
    save(tmp_path / "saved", first.module, first.optimizer)
    other = Run(tmp_path if offloaded else None, **loaded)
    if other.module[0].weight.dtype == torch.float32 and loaded.get("build") is not narrower:  # type: ignore[index]
        other.steps(range(5, 6))
    before = other.now()
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "saved", other.module, other.optimizer)
    support.assert_equal_bits(other.now(), before)


@pytest.mark.parametrize("part", ["weights", "state"])
@pytest.mark.parametrize("place", ["header", "first", "last"])
def test_a_flipped_byte_is_found_before_anything_is_changed(
    part: str, place: str, tmp_path: Path
) -> None:
    first, other = Run(tmp_path), Run(tmp_path)
    first.steps(range(2))
    folder = tmp_path / "saved"
    save(folder, first.module, first.optimizer)
    other.steps(range(5, 6))
    before = other.now()
    (file,) = folder.glob(f"{part}-*.safetensors")
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[{"header": 20, "first": header, "last": len(content) - 1}[place]] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError, match=rf"in {file.name} was changed after it was written"):
        load(folder, other.module, other.optimizer)
    support.assert_equal_bits(other.now(), before)
    if place != "header":
        with pytest.raises(CorruptError, match="was changed after it was written"):
            load(folder, other.module, other.optimizer, check_first=False)
    if part == "state":
        load(folder, other.module)


def cut(folder: Path) -> None:
    file = next(folder.glob("state-*"))
    os.truncate(file, file.stat().st_size - 1)


def changed_option(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    assert '"lr": 0.001' in text
    (folder / MANIFEST).write_text(text.replace('"lr": 0.001', '"lr": 0.002'))


def later_version(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"version": 1', '"version": 2'))


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (cut, CorruptError, r"state-.* has \d+ bytes instead of \d+: it was cut off"),
        (lambda one: next(one.glob("weights-*")).unlink(), CorruptError, "lacks weights-.*, which"),
        (changed_option, CorruptError, "its checksum does not fit"),
        (lambda one: os.truncate(one / MANIFEST, 100), CorruptError, "is damaged"),
        (lambda one: (one / MANIFEST).write_text("[1]"), ConfigError, "is not the manifest"),
        (later_version, ConfigError, "reads version 1; load it with the version"),
        (lambda one: (one / MANIFEST).unlink(), ConfigError, "there is no whole checkpoint in"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(
    damage: Any, kind: Any, message: str, tmp_path: Path
) -> None:
    first, other = Run(), Run(tmp_path)
    first.steps(range(2))
    folder = tmp_path / "saved"
    save(folder, first.module, first.optimizer)
    other.steps(range(5, 6))
    before = other.now()
    damage(folder)
    left = files_of(folder)
    with pytest.raises(kind, match=message):
        load(folder, other.module, other.optimizer)
    support.assert_equal_bits(other.now(), before)
    assert files_of(folder) == left


class Keyed(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"more": 1}


def with_sparse_buffer() -> nn.Module:
    module = model()
    module.register_buffer("rare", torch.eye(3).to_sparse())
    return module


def constant_rate(optimizer: Optimizer) -> lr_scheduler.LambdaLR:
    return lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    run = Run()
    hooked = model()
    hooked.register_state_dict_post_hook(
        lambda _module, state, *_: state.update({"0.bias": state["0.bias"] * 2})
    )
    odd_state = Run()
    odd_state.optimizer.state["whole"] = 1
    saves: list[tuple[type[Exception], str, Callable[[], None]]] = [
        (
            UnsupportedError,
            "rare .* its layout is",
            lambda: save(tmp_path / "a", with_sparse_buffer()),
        ),
        (UnsupportedError, "0.weight .* meta", lambda: save(tmp_path / "a", model().to("meta"))),
        (UnsupportedError, "0.bias .* made by a hook", lambda: save(tmp_path / "a", hooked)),
        (
            UnsupportedError,
            "Keyed saves its state in a way of its own",
            lambda: save(tmp_path / "a", run.module, Keyed(run.module.parameters(), lr=0.1)),
        ),
        (
            UnsupportedError,
            "belongs to no parameter",
            lambda: save(tmp_path / "a", odd_state.module, odd_state.optimizer),
        ),
        (
            UnsupportedError,
            r"extra\['f'\]\[0\] is a builtins.function",
            lambda: save(tmp_path / "a", run.module, extra={"f": [lambda: 1]}),
        ),
        (
            UnsupportedError,
            "extra is a numpy.ndarray of dtype .*, which .* small tensors and arrays of numbers",
            lambda: save(tmp_path / "a", run.module, extra=np.array([object()])),
        ),
        (
            UnsupportedError,
            "extra is an array of .* bytes.*make it a buffer",
            lambda: save(tmp_path / "a", run.module, extra=np.zeros(1 << 20)),
        ),
        (
            UnsupportedError,
            r"LambdaLR, which .*; give its state_dict\(\)",
            lambda: save(tmp_path / "a", run.module, extra=constant_rate(run.optimizer)),
        ),
        (
            UnsupportedError,
            "make it a buffer of the model",
            lambda: save(tmp_path / "a", run.module, extra=torch.zeros(1 << 20)),
        ),
        (
            ConfigError,
            r"params\[0\] of group 0, .* not in the state_dict\(\) of the model",
            lambda: save(tmp_path / "a", run.module, adamw(nn.Linear(2, 2))),
        ),
        (ConfigError, "takes a torch.nn.Module", lambda: save(tmp_path / "a", {})),  # type: ignore[arg-type]
        (ConfigError, "is a path, not", lambda: save(run.module, tmp_path / "a")),  # type: ignore[arg-type]
        (ConfigError, "is a path, not", lambda: load(run.module, tmp_path / "a")),  # type: ignore[arg-type]
        (ConfigError, "takes a torch.optim", lambda: save(tmp_path / "a", run.module, 3)),  # type: ignore[arg-type]
        (ConfigError, "does not exist; make it", lambda: save(tmp_path / "b" / "c", run.module)),
        (ConfigError, "shard_bytes", lambda: save(tmp_path / "a", run.module, shard_bytes=0)),
        (ConfigError, "other files .* 'mine'", lambda: save(tmp_path / "full", run.module)),
        (ConfigError, "is no folder", lambda: save(tmp_path / "full" / "mine", run.module)),
    ]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for kind, message, act in saves:
        with pytest.raises(kind, match=message):
            act()
    assert files_of(tmp_path) == {"full"}
    assert files_of(tmp_path / "full") == {"mine"}
    with pytest.raises(ConfigError, match="there is no whole checkpoint"):
        load(tmp_path / "full", run.module)


def test_a_link_to_a_folder_is_the_folder(tmp_path: Path) -> None:
    run = Run()
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    save(tmp_path / "here", run.module)
    assert (tmp_path / "here").is_symlink()
    assert_whole(tmp_path / "there")
    load(tmp_path / "here", run.module)


def test_plain_checkpoints_of_torch_go_on_working(tmp_path: Path) -> None:
    plain, offloaded = Run(), Run(tmp_path)
    plain.steps(range(2))
    torch.save((plain.module.state_dict(), plain.optimizer.state_dict()), tmp_path / "plain.pt")
    weights, state = torch.load(tmp_path / "plain.pt")
    offloaded.module.load_state_dict(weights)
    offloaded.optimizer.load_state_dict(state)
    for run in (plain, offloaded):
        run.steps(range(2, 4))
    support.assert_equal_bits(offloaded.now(), plain.now())
