"""Tensors that recipes make again have the bits, the layout and the bytes of the saved ones."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_cases import CASES, vector
from recipe_graphs import Graph, Packed, assert_makes, bits, bring
from ssdtrain._core import Kept
from ssdtrain.rematerialize.find import STEPS_MAX, find_recipe
from ssdtrain.rematerialize.operations import OPERATIONS
from ssdtrain.rematerialize.rows import EPSILONS

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHAPES = ((4, 6), (3, 5, 7), (2, 33, 64))
GPU_ATTENTIONS = {
    "ScaledDotProductCudnnAttentionBackward0": lambda q, k, v: (
        aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=0.3)[0]
    ),
    "ScaledDotProductEfficientAttentionBackward0": lambda q, k, v: (
        aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
    ),
    "ScaledDotProductFlashAttentionBackward0": lambda q, k, v: (
        aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.3)[0]
    ),
}


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Give pairs of inputs in several layouts."""
    seeds = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=seeds, dtype=torch.float64).to(dtype) for _ in range(2))
    turned = [t.mT.contiguous().mT for t in (x, y)]
    yield from ((x, y), (turned[0], y), (turned[0], turned[1]))


NORMS = {"NativeLayerNormBackward0", "NativeGroupNormBackward0"}


def has_made(name: str, root: Tensor) -> bool:
    """Return whether a node with this name has made a tensor, or what it was made from."""
    nodes: list[Any] = [root.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            if node.name() == name:
                return True
            nodes += [edge[0] for edge in node.next_functions]
    return False


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operation_is_repeated(name: str, dtype: torch.dtype) -> None:
    for case in CASES[name]:
        for shape in SHAPES:
            for first, second in layouts(shape, dtype):
                graph = Graph()
                x, y = graph.input(first), graph.input(second)
                with graph.hooks():
                    made = case(x, y)
                    root = made.clone() if made._is_view() or made._version else made
                    further = made * 2
                assert has_made(name, root)
                if name in NORMS and dtype is torch.bfloat16:
                    # The rounded scale does not tell the epsilon.
                    assert graph.recipe(root) is None
                    continue
                assert_makes(graph.recipe(root), root)
                assert_makes(graph.recipe(further), further)


@pytest.mark.parametrize("name", GPU_ATTENTIONS)
def test_attention_of_gpus_is_asked_for_again(name: str) -> None:
    """Without a GPU, what torch knows of the kernels tells whether the call is right."""
    graph = Graph()
    given = [torch.empty(2, 4, 64, 32, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    with graph.hooks():
        root = GPU_ATTENTIONS[name](*[each.requires_grad_() for each in given])
    recipe = graph.recipe(root)
    assert has_made(name, root)
    assert recipe is not None
    made = recipe.make(bring)
    assert (made.dtype, made.shape, made.stride()) == (root.dtype, root.shape, root.stride())


def test_every_operation_has_a_case() -> None:
    assert OPERATIONS.keys() == {*CASES, *GPU_ATTENTIONS}


def test_product_is_made_of_saved_factors() -> None:
    graph = Graph()
    gate, up = graph.input(torch.randn(8, 16)), graph.input(torch.randn(8, 16))
    with graph.hooks():
        product = F.silu(gate) * up
    recipe = graph.recipe(product)
    assert recipe is not None
    assert recipe.operations == ("mul",)
    assert_makes(recipe, product)
    with graph.hooks():
        product = F.silu(gate) * up.detach()
    recipe = graph.recipe(product)
    assert recipe is not None
    assert recipe.operations == ("silu", "mul")
    assert_makes(recipe, product)


def test_value_that_nobody_saved_is_made_on_the_way() -> None:
    graph = Graph()
    stream = graph.input(torch.randn(8, 16))
    linear = nn.Linear(16, 16, bias=False)
    with graph.hooks():
        first = stream + linear(stream)
        second = first + linear(F.relu(first))
    recipe = graph.recipe(second)
    assert recipe is not None
    assert recipe.is_dear
    assert_makes(recipe, second)


def test_shared_value_is_made_once() -> None:
    graph = Graph()
    x = graph.input(torch.randn(8, 16))
    with graph.hooks():
        shared = -x
        root = (shared + 2 * shared) + shared
    recipe = graph.recipe(root)
    assert recipe is not None
    assert recipe.operations.count("neg") == 1
    assert len(recipe.sources) == 1
    assert_makes(recipe, root)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_embedding(dtype: torch.dtype) -> None:
    graph = Graph()
    hidden = graph.input(torch.randn(2, 8, 32).to(dtype))
    linear = nn.Linear(32, 32, bias=False).to(dtype)
    cos, sin = (torch.rand(8, 8).to(dtype) for _ in range(2))
    with graph.hooks():
        q = linear(hidden).view(2, 8, 4, 8).transpose(1, 2)
        half = torch.cat((-q[..., 4:], q[..., :4]), dim=-1)
        root = q * cos + half * sin
    assert_makes(graph.recipe(root), root)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_composite_rms_norm(dtype: torch.dtype) -> None:
    graph = Graph()
    x = graph.input(torch.randn(2, 8, 32).to(dtype))
    weight = nn.Parameter(torch.rand(32).to(dtype))
    with graph.hooks():
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        root = weight * (wide * scale).to(dtype)
    recipe = graph.recipe(root)
    assert recipe is not None
    assert not recipe.is_dear
    assert_makes(recipe, root)


@pytest.mark.parametrize("epsilon", tuple(EPSILONS))
def test_the_epsilon_of_a_layer_norm_is_found(epsilon: float) -> None:
    graph = Graph()
    x = graph.input(torch.randn(8, 16) * 1e-3)
    with graph.hooks():
        root = F.layer_norm(x, (16,), vector(x), vector(x), epsilon)
    assert_makes(graph.recipe(root), root)
    assert EPSILONS[0] == epsilon


def test_a_layer_norm_of_nan_is_made_again() -> None:
    graph = Graph()
    x = graph.input(torch.full((8, 16), torch.nan))
    with graph.hooks():
        root = F.layer_norm(x, (16,), vector(x), vector(x))
    assert_makes(graph.recipe(root), root)


def test_a_layer_norm_with_an_unknown_epsilon_raises() -> None:
    graph = Graph()
    x = graph.input(torch.randn(8, 16) * 1e-3)
    with graph.hooks():
        root = F.layer_norm(x, (16,), vector(x), vector(x), 0.3)
    recipe = graph.recipe(root)
    assert recipe is not None
    with pytest.raises(RuntimeError, match="none of the epsilons"):
        recipe.make(bring)


class Block(nn.Module):
    """A block of a transformer as Llama has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width)
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        heads = self.qkv(self.before(x)).view(batch, count, 3, width // 8, 8)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, count, width))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def assert_block(graph: Graph, names: set[str]) -> None:
    """Compare what recipes make of saved tensors; these operations must be among the recipes."""
    found: set[str] = set()
    for saved, packed in graph.saved:
        root = saved if saved._base is None else saved._base
        recipe = graph.recipe(root)
        if recipe is not None and not root.is_leaf:
            found.update(recipe.operations)
            assert packed not in recipe.sources
            assert torch.equal(bits(recipe.make(bring)), bits(root)), recipe.operations
    assert found >= names, found


@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
def test_block_like_llama(way: str) -> None:
    graph = Graph()
    blocks = nn.Sequential(Block(32), Block(32))
    blocks.to(torch.bfloat16 if way == "bfloat16" else torch.float32)
    x = torch.randn(2, 16, 32, dtype=blocks[0].down.weight.dtype)
    enabled = way == "autocast"
    with graph.hooks(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        blocks(x).sum()
    assert_block(graph, {"mm", "silu", "mul", "attention", "add" if way != "bfloat16" else "cast"})


def test_block_like_bert() -> None:
    graph = Graph()
    block = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", layer_norm_eps=1e-12)
    with graph.hooks():
        block(torch.randn(16, 2, 32)).sum()
    assert_block(graph, {"addmm", "layer_norm", "gelu", "mul", "add"})


def test_conditions_of_the_backward_do_not_matter() -> None:
    """A recipe is made in backward, in any thread, below modes of the user."""
    graph = Graph()
    x = graph.input(torch.randn(8, 16))
    with graph.hooks(), torch.autocast("cpu", torch.bfloat16):
        root = F.linear(x, vector(x)[None])
    wide = graph.input(torch.randn(8, 16))
    with graph.hooks():
        product = wide @ wide.detach().T
    recipes = [(graph.recipe(each), each) for each in (root, product)]

    class Refusing(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            assert function.__name__ == "__get__", "`bring` looks at attributes, no more"
            return function(*given, **(named or {}))

    class RefusingDispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, *_: Any, **__: Any) -> Any:
            raise AssertionError(function)

    made: list[Tensor] = []

    def make() -> None:
        for recipe, _ in recipes:
            assert recipe is not None
            made.append(recipe.make(bring))

    def make_everywhere(gradient: Tensor) -> None:
        make()
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            make()
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_grad_enabled()
        with torch.inference_mode():
            make()
        with torch.device("meta"), RefusingDispatch(), Refusing():
            make()
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(make_everywhere)
    state = torch.get_rng_state()
    (leaf * 2).sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    assert len(made) == 2 * 5
    for at, each in enumerate(made):
        assert torch.equal(bits(each), bits(recipes[at % 2][1]))
        assert not each.is_inference()
        assert not each.requires_grad


def no_recipe(x: Tensor) -> dict[str, Tensor]:
    """Return results that cannot be made again."""

    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    custom = Silu.apply(x)
    type(custom.grad_fn).__name__ = "SiluBackward0"
    assert custom.grad_fn.name() == "SiluBackward0"
    frozen = nn.Parameter(torch.ones(x.shape[-1]), requires_grad=False)
    weight = torch.ones(x.shape[-1], x.shape[-1])
    many = x
    for _ in range(STEPS_MAX + 1):
        many = -many
    return {
        "changed in place": F.silu(x).mul_(2),
        "view": F.silu(x).t(),
        "leaf": torch.ones(3, requires_grad=True),
        "no gradient": torch.ones(3),
        "number that no node keeps": x + 1,
        "number that no node keeps, subtracted": 1 - x,
        "number that no node keeps, chosen": torch.where(x > 0, x, 0.0),
        "number that no node keeps, filled": x.masked_fill(x > 0, 0.0),
        "tensor that no node keeps": x + torch.ones_like(x),
        "tensor that no node keeps, joined": torch.cat([x, torch.ones_like(x)]),
        "frozen bias": torch.addmm(frozen, x, weight),
        "frozen bias of a convolution": F.conv1d(
            x[None], weight[:1, None, :2].repeat(3, 8, 1), frozen[:3]
        ),
        "weight that is changed in forward": F.embedding(x.argmax(0), nn.Parameter(x.detach())),
        "convolution on a GPU": F.conv1d(x.to("meta"), x.to("meta")[:, :, None]),
        "random": F.rrelu(x, training=True),
        "complex numbers": x.to(torch.complex64),
        "function of the user": custom,
        "function of the user on the way": -custom,
        "too many steps": many,
        "first a number": torch.mul(torch.ones(()) * 2, x.detach()) * 1,
    }


@pytest.mark.parametrize("what", no_recipe(torch.ones(8, 8, requires_grad=True).clone()))
def test_no_recipe(what: str) -> None:
    graph = Graph()
    x = graph.input(torch.randn(8, 8))
    with graph.hooks():
        root = no_recipe(x)[what]
    assert graph.recipe(root) is None


def test_objects_of_another_session_are_no_sources() -> None:
    graph = Graph()
    x = graph.input(torch.randn(8, 16))
    with graph.hooks():
        root = F.silu(x)
    assert find_recipe(root, graph.outputs, lambda _packed: False) is None
    assert find_recipe(root, Graph().outputs, lambda packed: packed is graph.saved[-1][1])


def test_tensors_saved_outside_of_hooks_are_no_sources() -> None:
    graph = Graph()
    x = torch.randn((), dtype=torch.float64, requires_grad=True) * 2
    root = x * torch.ones((), dtype=torch.float64)
    assert graph.recipe(root) is None
    assert graph.recipe(F.silu(x.float())) is None


def test_changed_sources_raise() -> None:
    graph = Graph()
    x = graph.input(torch.randn(8, 16))
    weight = nn.Parameter(torch.randn(16))
    with graph.hooks():
        sums = -x + weight
        products = F.silu(x)
    recipes = [graph.recipe(each) for each in (sums, products)]
    assert_makes(recipes[0], sums)
    with torch.no_grad():
        weight += 1
    assert recipes[0] is not None
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        recipes[0].make(bring)
    assert_makes(recipes[1], products)
    x.add_(1)
    assert recipes[1] is not None
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        recipes[1].make(bring)


def test_dead_outputs_are_not_found() -> None:
    graph = Graph()
    x = graph.input(torch.randn(8, 16))
    with graph.hooks():
        root = -x
    assert graph.recipe(root) is not None
    graph.saved.clear()
    assert graph.outputs.find(x.grad_fn, 0) is None
    assert graph.recipe(root) is None


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_notes_hold_nothing_and_mistake_no_node() -> None:
    graph = Graph()
    with torch.autograd.detect_anomaly():
        x = graph.input(torch.randn(8, 16))
    assert graph.outputs.find(x.grad_fn, 0) is graph.saved[0][1]
    assert graph.outputs.find(x.grad_fn, 1) is None
    assert Graph().outputs.find(x.grad_fn, 0) is None
    references = [weakref.ref(x), weakref.ref(graph.saved[0][1])]
    graph.saved.clear()
    gc.disable()
    try:
        del x
        assert [reference() for reference in references] == [None, None]
        for _ in range(100):
            other = torch.ones(8, requires_grad=True).clone()
            assert graph.outputs.find(other.grad_fn, 0) is None
    finally:
        gc.enable()


def test_result_of_a_function_of_the_user_is_a_source() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, two: Tensor, three: Tensor) -> Tensor:
            return two * 2 + three * 3

    graph = Graph()
    twice, thrice = Double.apply(torch.randn(8, requires_grad=True))
    graph.pack(thrice)
    with graph.hooks():
        roots = -thrice, -twice
    assert_makes(graph.recipe(roots[0]), roots[0])
    assert graph.recipe(roots[1]) is None


def test_objects_without_weak_references_are_not_noted() -> None:
    graph = Graph()
    x = torch.ones(2, requires_grad=True).clone()
    graph.outputs.note(x, Kept(x.detach(), x._version))
    assert graph.outputs.find(x.grad_fn, 0) is None


def test_changed_tensors_are_not_noted() -> None:
    graph = Graph()
    x = torch.ones(4, 4, requires_grad=True).clone()
    for tensor in (x.clone().add_(1), torch.ones(2), torch.ones(2, requires_grad=True)):
        packed = Packed(tensor)
        graph.outputs.note(tensor, packed)
        node = tensor.grad_fn
        assert node is None or graph.outputs.find(node, 0) is None


def test_recipe_holds_no_node() -> None:
    graph = Graph()
    x = graph.input(torch.randn(8, 16))
    with graph.hooks():
        root = F.silu(-x) * 2
    recipe = graph.recipe(root)
    made = weakref.ref(root), weakref.ref(x)
    graph.saved.clear()
    del root, x
    assert [each() for each in made] == [None, None]
    assert recipe is not None
    assert recipe.make(bring).shape == (8, 16)
    assert all(bring(source).grad_fn is None for source in recipe.sources)


def test_values_are_dropped_after_their_last_use() -> None:
    graph = Graph()
    x = graph.input(torch.randn(1024, 1024))
    with graph.hooks():
        root = x
        for _ in range(5):
            root = -root
    recipe = graph.recipe(root)
    assert recipe is not None
    results: list[weakref.ref[Tensor]] = []

    def noted(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        made = function(x)
        results.append(weakref.ref(made))
        assert sum(result() is not None for result in results) <= 2
        return made

    steps = [
        step._replace(
            operation=replace(step.operation, function=partial(noted, step.operation.function))
        )
        for step in recipe.steps
    ]
    assert_makes(replace(recipe, steps=tuple(steps)), root)
    assert len(results) == 5
