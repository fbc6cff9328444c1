"""What a ``BudgetError`` says, that it is true, and who takes it for a lack of memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disks import MIB
from ssdtrain.errors import BudgetError
from support import Rig, bits, chain

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Of hooks on modules, which another test in this process may have put on.
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
]

Body = Callable[[], Tensor]


def long_chain() -> Tensor:
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    return torch.autograd.grad(chain(x, 10).sum(), x)[0]


def regions() -> Tensor:
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    y = x
    for _ in range(2):
        y = checkpoint(chain, y, 6, use_reentrant=True)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


class Product(torch.autograd.Function):
    """Asks for both factors at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


def product_of_two() -> Tensor:
    """One node asks for two tensors at once that others saved one after the other."""
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    return torch.autograd.grad(Product.apply(x.exp(), x.sin().exp()).sum(), x)[0]


class SavesMany(torch.autograd.Function):
    """One node that saves many tensors, as a model that was compiled whole does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(*(x * n for n in range(8)))
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + sum(ctx.saved_tensors)


def one_node() -> Tensor:
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    return torch.autograd.grad(SavesMany.apply(x).sum(), x)[0]


def lstm_cell() -> Tensor:
    torch.manual_seed(0)
    cell = nn.LSTMCell(64, 64)
    state = (torch.zeros(64, 64), torch.zeros(64, 64))
    for one in torch.randn(12, 64, 64):
        state = cell(one, state)
    state[0].sum().backward()
    assert cell.weight_ih.grad is not None
    return cell.weight_ih.grad


def detached_parts() -> Tensor:
    """What a loss compares with: parts of a larger tensor, each detached for itself."""
    wide = torch.linspace(-1, 1, MIB)
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    loss = sum((x * part.detach()).sum() for part in wide.split(MIB // 4))
    return torch.autograd.grad(loss, x)[0]


def many_small() -> Tensor:
    x = torch.linspace(-1, 1, MIB // 32, requires_grad=True)
    return torch.autograd.grad(chain(x, 24).sum(), x)[0]


def refused(directory: Path, body: Body, **options: Any) -> tuple[str, int]:
    """Return the message of the ``BudgetError``, and the bound that it names."""
    rig = Rig(directory, **options)
    with rig.context(), pytest.raises(BudgetError) as caught:
        body()
    message = str(caught.value)
    named = re.search(r"needs? at least max_resident_bytes=(\d+)", message)
    assert named is not None, message
    del caught
    rig.assert_empty()
    return message, int(named[1])


@pytest.mark.parametrize("body", [long_chain, regions, product_of_two, one_node])
def test_the_bound_that_is_named_is_enough_and_less_is_not(body: Body, tmp_path: Path) -> None:
    expected = bits(body())
    low = 1
    for _ in range(12):
        _, named = refused(tmp_path, body, max_resident_bytes=low)
        assert named > low
        low = named
        rig = Rig(tmp_path, max_resident_bytes=low)
        try:
            with rig.context():
                assert bits(body()) == expected
        except BudgetError:
            continue
        break
    else:
        pytest.fail("the named bounds do not come to an end")
    assert rig.stats.resident_bytes_peak <= low
    # With less it does not pass: what was named last was needed. A read takes up to two blocks
    # more than the tensor has, depending on where it lay, so a little less might do.
    refused(tmp_path, body, max_resident_bytes=low * 9 // 10)


class Cell(nn.Module):
    """A recurrent loop written by hand, whose gates are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        state, outs = (torch.zeros(64, 64), torch.zeros(64, 64)), []
        for one in x.view(32, 64, 32):
            state = self.cell(one, state)
            outs.append(state[0])
        return torch.stack(outs)


class Messages(nn.Module):
    """Layers of a graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        generator = torch.Generator().manual_seed(0)
        self.source, self.target = torch.randint(0, 2048, (2, 8192), generator=generator)

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            message = layer(h)[self.source].relu()
            h = h + torch.zeros_like(h).index_add(0, self.target, message)
            to = self.target[:, None].expand(-1, 32)
            h = h.scatter_reduce(0, to, message, "amax")
        return h


class Reduced(torch.autograd.Function):
    """Asks at once for many tensors, each of which another node has saved before."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        return torch.stack(parts).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad * part for part in ctx.saved_tensors)


class Shared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reduced.apply(*((x * n).exp() for n in range(1, 9)))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 128, batch_first=True)


def perceptron() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "loop": Cell,
    "graph": Messages,
    "shared": Shared,
    "transformer": encoder,
    "perceptron": perceptron,
    "compiled": lambda: torch.compile(perceptron(), backend="aot_eager"),
}


def trained(name: str, has_penalty: bool) -> Tensor:
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(64, 32, 32).flatten(0, 1).requires_grad_()
    torch.manual_seed(1)
    out = model(x.view(64, 32, 32) if name == "transformer" else x).square().sum()
    if has_penalty:
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        out = out + slope.square().sum()
    (grad,) = torch.autograd.grad(out, x)
    return grad


def named_after(bound: int, name: str, has_penalty: bool, expected: bytes, directory: Path) -> int:
    """Train under a bound; return the one that the error names, or 0 if all went well."""
    rig = Rig(directory, max_resident_bytes=bound, min_bytes=16 << 10)
    message = ""
    try:
        with rig.context():
            assert bits(trained(name, has_penalty)) == expected
    except BudgetError as error:
        message = str(error)
    assert rig.stats.resident_bytes_peak <= bound
    rig.assert_empty()
    if not message:
        return 0
    named = re.search(r"at least max_resident_bytes=(\d+)", message)
    assert named is not None, message
    assert int(named[1]) > bound
    return int(named[1])


@pytest.mark.parametrize(
    ("name", "has_penalty"),
    [*((name, False) for name in MODELS), ("perceptron", True), ("graph", True)],
)
def test_the_advised_bound_works_at_the_third_try(
    name: str, has_penalty: bool, tmp_path: Path
) -> None:
    expected = bits(trained(name, has_penalty))
    bounds = [64 << 10]
    while bounds[-1] and len(bounds) <= 3:
        bounds.append(named_after(bounds[-1], name, has_penalty, expected, tmp_path))
    assert bounds[-1] == 0, "the bound that was named last was too low"


def test_a_pass_that_does_not_fit_keeps_nothing_and_only_its_backward_raises(
    tmp_path: Path,
) -> None:
    expected = bits(long_chain())
    rig = Rig(tmp_path, max_resident_bytes=3 * MIB)
    with rig.context():
        # As in an evaluation that forgot torch.no_grad(): nobody asks for what was saved.
        x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
        output = SavesMany.apply(x)
        assert rig.stats.resident_bytes <= 3 * MIB
        with pytest.raises(
            BudgetError, match=f"at least max_resident_bytes={8 * MIB + 9 * 8192} "
        ) as caught:
            output.sum().backward()
        del caught
        assert rig.stats.resident_bytes_peak <= 3 * MIB
        # Who caught it goes on, with the tensors of that pass still there.
        assert bits(long_chain()) == expected
        with pytest.raises(BudgetError):
            output.sum().backward()
    del output
    rig.assert_empty()


CASES = {
    "first of all": (
        long_chain,
        {"max_resident_bytes": MIB // 4},
        r"saves .*\[float32 \[262144\]\], needs 1 MiB at once\. The forward went on without",
    ),
    "own result": (
        long_chain,
        {"max_resident_bytes": MIB // 2},
        r"ExpBackward0 at .*support\.py:\d+, which saves its result \[float32 \[262144\]\], needs",
    ),
    "in backward": (
        product_of_two,
        {"max_resident_bytes": 3 * MIB // 2},
        r"ProductBackward, to which \[float32 \[262144\]\] has to be read back",
    ),
    "one node": (
        one_node,
        {"max_resident_bytes": 4 * MIB},
        r"4(\.0)? MiB in 4 tensors whose operation has not ended.*compile it block by block",
    ),
    "small": (
        many_small,
        {"max_resident_bytes": MIB, "min_bytes": 512 << 10},
        r"below min_bytes=524288 \(512 KiB\), the largest of 128 KiB.*or lower min_bytes to \d+\.",
    ),
    "parts": (
        lstm_cell,
        {"max_resident_bytes": 256 << 10, "min_bytes": 1024},
        r"parts of storages that count their changes apart.*smaller batch\. ",
    ),
    "detached parts": (
        detached_parts,
        {"max_resident_bytes": 2 * MIB},
        r"in parts of storages that the program detached from them.*or detach the whole tensor",
    ),
    "failing": (
        long_chain,
        {
            "max_resident_bytes": 3 * MIB,
            "backend": "simulated",
            "faults": {"seed": 1, "io_error_rate": 1.0},
        },
        r"cannot leave it because writes fail: .*, or see why the writes fail\.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_says_who_needs_what_and_what_holds_the_memory(case: str, tmp_path: Path) -> None:
    body, options, expected = CASES[case]
    message, _ = refused(tmp_path, body, **options)
    assert re.search(expected, message, re.DOTALL), message
    assert "Gradients are partial now: zero them before you try again." in message
    assert ("block by block" in message) == (case == "one node")
    assert ("or lower min_bytes" in message) == (case == "small")


def test_a_refusal_outside_of_a_backward_says_nothing_of_gradients(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_resident_bytes=MIB)
    with pytest.raises(BudgetError) as caught:
        rig.budget("a test").reserve(2 * MIB, 2 * MIB, lambda: "a test")
    assert "Gradients" not in str(caught.value)
    assert rig.residency.refused_count == 1


def test_a_pass_that_was_refused_counts_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_resident_bytes=3 * MIB // 2)
    with rig.context():
        x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
        product = Product.apply(x.exp(), x.sin().exp()).sum()
        refused_pass = SavesMany.apply(x)
        assert rig.residency.refused_count == 1
        # Its node needs more than there is, and the bound that is named is that of the other pass.
        with pytest.raises(BudgetError, match="went on without keeping what"):
            product.backward()
    assert rig.residency.refused_count == 1
    del product, refused_pass


# Who takes it for a lack of memory


def test_a_refusal_is_a_lack_of_memory_to_others(tmp_path: Path) -> None:
    with Rig(tmp_path, max_resident_bytes=MIB).context(), pytest.raises(MemoryError) as caught:
        long_chain()
    assert isinstance(caught.value, RuntimeError)
    assert should_reduce_batch_size(caught.value)
    # What Lightning's `is_oom_error` asks of an error.
    assert len(caught.value.args) == 1
    assert "DefaultCPUAllocator: can't allocate memory" in caught.value.args[0]


def test_a_search_for_a_batch_size_goes_on_in_the_same_block(tmp_path: Path) -> None:
    tried = []

    def train(batch_size: int) -> Tensor:
        tried.append(batch_size)
        x = torch.linspace(-1, 1, 32 << 10, requires_grad=True)
        rows = x.expand(batch_size, -1) * 1.0
        return torch.autograd.grad(rows.exp().sum(), x)[0]

    rig = Rig(tmp_path, max_resident_bytes=MIB)
    with rig.context():
        grad = find_executable_batch_size(train, starting_batch_size=16)()
    assert tried[0] == 16
    assert tried[-1] == 8, "a row is 128 KiB, so eight of them fit"
    assert bits(grad) == bits(train(8))
    rig.assert_empty()
