"""Whoever looks at a weight that is away gets its bytes, or an error; never other bytes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import ssdtrain
import support
from ssdtrain.away.classes import AwayParameter
from weights_away import (
    LEAVING_BYTES_MIN,
    WIDTH,
    away,
    is_away,
    layers,
    leave,
    numbered,
    offloaded,
    squared,
    unique,
    use,
)

NAME = "2.weight"


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def gradient_through(weight: Tensor) -> Tensor:
    (found,) = torch.autograd.grad((weight * 3).sin().sum(), weight)
    return found


def with_grad(weight: Tensor) -> Any:
    weight.grad = torch.ones(weight.shape)
    assert weight.grad is not None
    weight.grad.mul_(3)
    found = weight.grad.clone()
    weight.grad = None
    return found


def refused(look: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the words of what a plain weight refuses too."""

    def words(weight: Any) -> str:
        with pytest.raises(
            (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
        ) as raised:
            look(weight)
        said = str(raised.value).replace(type(weight).__name__, "Parameter")
        return f"{type(raised.value).__name__} {said}"

    return words


LOOKS: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "format": lambda weight: f"{weight[0, 0]:.9f} {weight[3, 5]!r}",
    "equals": lambda weight: weight == weight.detach().clone(),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy().copy()),
    "numpy's array": lambda weight: torch.from_numpy(np.array(weight.detach())),
    "numpy of a gradient's leaf": refused(lambda weight: weight.numpy()),
    "tolist": lambda weight: weight.tolist(),
    "item": lambda weight: weight[7, 9].item(),
    "length": len,
    "iteration": lambda weight: [row.sum().item() for row in weight],
    "contains": lambda weight: weight.detach()[3, 3].item() in weight,
    "index": lambda weight: weight[5],
    "clone": lambda weight: weight.clone(),
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "turned": lambda weight: weight.T,
    "view": lambda weight: weight.view(-1),
    "as a subclass": lambda weight: weight.as_subclass(torch.Tensor),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "save": by_save,
    "new parameter": Parameter,
    "as_tensor": torch.as_tensor,
    "asarray": lambda weight: torch.asarray(weight, requires_grad=True),
    "cat": lambda weight: torch.cat((weight, torch.ones(1, WIDTH))),
    "einsum": lambda weight: torch.einsum("ij,kj->ik", weight, weight),
    "out": lambda weight: torch.mul(weight.detach(), 2, out=torch.empty(WIDTH, WIDTH)),
    "added to": lambda weight: torch.zeros(WIDTH, WIDTH).add_(weight.detach(), alpha=2),
    "assigned from": lambda weight: assigned_from(weight.detach()),
    "right operand": lambda weight: 1 - weight,
    "matrix product": lambda weight: torch.ones(3, WIDTH) @ weight,
    "foreach": lambda weight: torch._foreach_mul([weight], 3.0)[0],
    "foreach copy": lambda weight: copied_each(weight.detach()),
    "to float64": lambda weight: weight.to(torch.float64),
    "type": lambda weight: weight.type(),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda weight: weight.new_zeros(3),
    "storage": lambda weight: bytes(weight.untyped_storage()),
    "address": lambda weight: weight.data_ptr() != 0,
    "is the same set": lambda weight: weight.is_set_to(weight.detach()),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "dlpack in a capsule": lambda weight: torch.from_dlpack(
        torch.utils.dlpack.to_dlpack(weight.detach())
    ),
    "gradient": gradient_through,
    "grad set by hand": with_grad,
    "version": lambda weight: weight._version,
    "shape": lambda weight: [weight.shape, weight.stride(), weight.dtype, weight.device],
    "contiguous": lambda weight: weight.contiguous() is weight,
    "in a dict": lambda weight: {weight: 5}[weight],
    "a bad index": refused(lambda weight: weight[WIDTH + 5]),
    "set in a leaf": refused(lambda weight: weight.add_(1)),
    "no such thing": refused(lambda weight: weight.nothing_like_that),
}


def assigned_from(weight: Tensor) -> Tensor:
    found = torch.zeros(2, WIDTH, WIDTH)
    found[1] = weight
    return found


def copied_each(weight: Tensor) -> Tensor:
    found = torch.zeros(WIDTH, WIDTH)
    torch._foreach_copy_([found], [weight])
    return found


def own_class(found: object) -> type:
    """Return the class of what a look has found; that of a weight, also if it is away."""
    return Parameter if type(found) is AwayParameter else type(found)


def assert_same_look(actual: Any, expected: Any) -> None:
    # What is the weight itself may be away still.
    assert own_class(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert actual.requires_grad == expected.requires_grad
        assert actual.stride() == expected.stride()
        support.assert_equal_bits({"": actual}, {"": expected})
    else:
        assert actual == expected


def one_away(directory: Path) -> tuple[nn.Module, Any]:
    """Return a model with random weights, and one of them that is away."""
    model = offloaded(layers(), directory)
    return model, leave(model, NAME)


# Which plain weights get, too.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.parametrize("look", LOOKS)
def test_looks(look: str, tmp_path: Path) -> None:
    expected = layers().get_parameter(NAME)
    model, weight = one_away(tmp_path)
    assert_same_look(LOOKS[look](weight), LOOKS[look](expected))
    # The same when it is in memory, and away once more.
    use(weight)
    assert type(weight) is Parameter
    assert_same_look(LOOKS[look](weight), LOOKS[look](expected))
    gc.collect()
    leave(model, NAME)
    assert_same_look(LOOKS[look](weight), LOOKS[look](expected))
    assert torch.equal(weight, expected)


MOVES: dict[str, Callable[[Any], Any]] = {
    "hash": hash,
    "id": id,
    "shape": lambda weight: weight.shape,
    "size": lambda weight: [weight.size(), weight.size(0), weight.dim(), weight.numel()],
    "dtype": lambda weight: [weight.dtype, weight.device, weight.layout, weight.ndim],
    "stride": lambda weight: [weight.stride(), weight.storage_offset(), weight.is_contiguous()],
    "bytes": lambda weight: [weight.nbytes, weight.itemsize, weight.element_size()],
    "requires_grad": lambda weight: [weight.requires_grad, weight.is_leaf, weight.grad_fn],
    "grad": lambda weight: weight.grad,
    "set grad": with_grad,
    "instance": lambda weight: isinstance(weight, Parameter),
    "weak reference": lambda weight: weakref.ref(weight)() is weight,
    "attribute": lambda weight: setattr(weight, "told", 5),
    "hook": lambda weight: weight.register_hook(lambda grad: grad).remove(),
    "freeze": lambda weight: [weight.requires_grad_(one).shape for one in (False, True)],
}


@pytest.mark.parametrize("move", MOVES)
def test_looks_without_bytes_read_nothing(move: str, tmp_path: Path) -> None:
    expected = layers().get_parameter(NAME)
    _, weight = one_away(tmp_path)
    number, hashed = id(weight), hash(weight)
    if move in ("hash", "id"):
        assert MOVES[move](weight) in (number, hashed)
    else:
        assert_same_look(MOVES[move](weight), MOVES[move](expected))
    assert is_away(weight), "it was brought without need"


class Doubled(torch.autograd.Function):
    """What reads its tensors below torch's functions for Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def scripted(weight: Tensor) -> Tensor:
    return torch.jit.script(tripled)(weight)  # type: ignore[no-any-return]


def tripled(x: Tensor) -> Tensor:
    return x * 3


PAST_PYTHON: dict[str, Callable[[Any], Any]] = {
    "tensor": torch.tensor,
    "a legacy constructor": torch.FloatTensor,
    "set_": lambda weight: torch.empty(0).set_(weight.detach()),
    "a tensor over its storage": lambda weight: torch.empty(0).set_(weight.untyped_storage()),
    "a Function": Doubled.apply,  # type: ignore[no-untyped-call]
    "a scripted function": scripted,
    "its implementation": lambda weight: Tensor._make_subclass(Tensor, weight),
    "its functorch wrapper": torch.vmap(torch.sin),
}


# Of scripts and traces torch says that they are deprecated, and whom it says so depends on it.
without_news = pytest.mark.filterwarnings(
    "ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning"
)


@without_news
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("look", PAST_PYTHON)
def test_looks_past_python_are_right_or_refused(look: str, tmp_path: Path) -> None:
    expected = layers().get_parameter(NAME)
    model, weight = one_away(tmp_path)
    plainly = PAST_PYTHON[look](expected)
    try:
        found = PAST_PYTHON[look](weight)
        # Some give a tensor on the same memory, which raises when it is used.
        support.assert_equal_bits({"": found.detach()}, {"": plainly.detach()})
    except RuntimeError as error:
        assert "ssdtrain.offload_parameters" in str(error)  # noqa: PT017 - or it is right
        assert "so ssdtrain could not bring them" in str(error)  # noqa: PT017
        assert "parameters_in_memory" in str(error)  # noqa: PT017
    found = None
    gc.collect()
    with ssdtrain.parameters_in_memory(model):
        found = PAST_PYTHON[look](weight)
        support.assert_equal_bits({"": found.detach()}, {"": plainly.detach()})
        del found
    assert torch.equal(weight, expected)


# Whole models


MODELS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: dict(model.named_parameters()),
    "parameters": lambda model: dict(enumerated(model.parameters())),
    "deepcopy": lambda model: copy.deepcopy(model).state_dict(),
    "pickle": lambda model: by_pickle(model).state_dict(),
    "save": lambda model: by_save(model).state_dict(),
    "bfloat16": lambda model: model.bfloat16().state_dict(),
    "and back": lambda model: model.bfloat16().float().state_dict(),
    "vector": lambda model: {"": nn.utils.parameters_to_vector(model.parameters())},
    "frozen": lambda model: model.requires_grad_(False).state_dict(keep_vars=True),
    "a part": lambda model: model[2:4].state_dict(),
    "a part called": lambda model: {"": model[2](numbered(1, 3, WIDTH))},
    "forward itself": lambda model: {"": model[2].forward(numbered(1, 3, WIDTH))},
    "applied": lambda model: model.apply(halve).state_dict(),
    "shared memory": lambda model: model.share_memory().state_dict(),
    "functional": lambda model: functional(model, {}),
    "functional, replaced": lambda model: functional(model, replaced(model)),
}


def enumerated(values: Any) -> list[tuple[str, Tensor]]:
    return [(str(number), value) for number, value in enumerate(values)]


@torch.no_grad()
def halve(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.mul_(0.5)
        nn.init.constant_(module.bias, 0.25)


def functional(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"": torch.func.functional_call(model, given, (numbered(1, 3, WIDTH),))}


def replaced(model: nn.Module) -> dict[str, Tensor]:
    return {"2.weight": torch.ones(WIDTH, WIDTH), "3.bias": torch.ones(WIDTH)}


@pytest.mark.parametrize("look", MODELS)
def test_models(look: str, tmp_path: Path) -> None:
    def looked_at(directory: Path | None) -> dict[str, Tensor]:
        model = layers()
        if directory is not None:
            offloaded(model, directory)
            assert away(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(2):
            squared(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        found: dict[str, Tensor] = MODELS[look](model)
        return found

    actual, expected = looked_at(tmp_path), looked_at(None)
    support.assert_equal_bits(actual, expected)
    for name, tensor in expected.items():
        assert own_class(actual[name]) is type(tensor), name
        assert actual[name].requires_grad == tensor.requires_grad, name


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, by_pickle, by_save], ids=lambda one: one.__name__
)
def test_a_copy_is_a_plain_model_in_memory(copied: Any, tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    twin = copied(model)
    assert all(type(param) is Parameter for param in twin.parameters())
    expected = layers()
    assert torch.equal(squared(twin, 1), squared(expected, 1))
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert torch.equal(squared(model, 1), squared(expected, 1)), "the copy has its own memory"
    # Nothing of the feature runs in the copy, which can be offloaded for itself.
    assert all(type(param) is Parameter for param in twin.parameters())
    offloaded(twin, tmp_path)
    assert away(twin)
    assert torch.equal(squared(twin, 1), torch.zeros(()))


def test_identity_and_type_after_use(tmp_path: Path) -> None:
    model = layers()
    params = dict(model.named_parameters())
    hashes = {name: hash(param) for name, param in params.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    offloaded(model, tmp_path)
    for number in range(3):
        squared(model, number).backward()
        optimizer.step()
        for name, param in model.named_parameters():
            assert param is params[name]
            assert hash(param) == hashes[name]
            assert isinstance(param, Parameter)
            assert param.is_leaf
        for param in optimizer.param_groups[0]["params"]:
            if param.nbytes >= LEAVING_BYTES_MIN:
                use(param)
            assert type(param) is Parameter, "in memory it is nothing but a parameter"
            assert "ssdtrain" not in repr(vars(param))
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [
        id(param) for param in params.values()
    ]


def test_attributes_of_weights_stay(tmp_path: Path) -> None:
    model = layers()
    weight = model.get_parameter(NAME)
    weight.told = ["by", "a", "user"]  # type: ignore[attr-defined]
    offloaded(model, tmp_path)
    leave(model, NAME)
    assert weight.told == ["by", "a", "user"]  # type: ignore[attr-defined]
    weight.later = 5  # type: ignore[attr-defined]
    use(weight)
    assert weight.later == 5  # type: ignore[attr-defined]
    assert list(vars(weight)) == ["told", "later"]


def test_all_weights_in_memory_on_request(tmp_path: Path) -> None:
    model, expected = offloaded(layers(), tmp_path), layers()
    total_bytes = sum(param.nbytes for param in unique(model).values())
    x = numbered(1, 3, WIDTH)
    names = [name for name, _ in model.named_parameters()]

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, given, (x,))
        return out.square().mean()

    with ssdtrain.parameters_in_memory(model):
        assert not away(model)
        assert ssdtrain.parameter_stats(model).resident_bytes == total_bytes
        found = torch.func.grad(loss)(dict(model.named_parameters()), x)
        with ssdtrain.parameters_in_memory(model):
            squared(model, 1).backward()
        assert not away(model), "the inner block ends, the outer one goes on"
    expected(x).square().mean().backward()
    plainly = {name: expected.get_parameter(name).grad for name in names}
    support.assert_equal_bits(found, plainly)  # type: ignore[arg-type]
    del found
    squared(model, 1)
    assert away(model)
    assert ssdtrain.parameter_stats(model).resident_bytes < total_bytes


def test_an_error_in_the_block_ends_it(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    with pytest.raises(KeyError), ssdtrain.parameters_in_memory(model):
        raise KeyError
    squared(model, 1)
    assert away(model)


@without_news
@pytest.mark.parametrize("transform", ["grad", "vmap", "trace"])
def test_transforms_are_refused(transform: str, tmp_path: Path) -> None:
    model, x = offloaded(layers(), tmp_path), numbered(1, 3, WIDTH)
    transforms: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(x),
        "vmap": lambda: torch.vmap(model)(x),
        "trace": lambda: torch.jit.trace(model, x),
    }

    with pytest.raises(ssdtrain.UnsupportedError, match="parameters_in_memory"):
        transforms[transform]()
    with ssdtrain.parameters_in_memory(model):
        assert transforms[transform]() is not None
    assert torch.equal(squared(model, 1), squared(layers(), 1)), "and the model goes on"


@pytest.mark.defends("weights stay that a graph or another library has")
def test_a_frozen_weight_that_another_library_has_stays(tmp_path: Path) -> None:
    model = layers().requires_grad_(False)
    offloaded(model, tmp_path)
    weights = [weight for weight in model.parameters() if weight.ndim == 2]
    seen = [(np.from_dlpack(weight), weight.clone()) for weight in weights]
    for number in range(2):
        squared(model, number)
    assert not away(model)
    for array, expected in seen:
        assert torch.equal(torch.tensor(array), expected)
    del array, seen
    squared(model, 1)
    assert away(model)
