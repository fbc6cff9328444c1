"""Whole models, walked in every order, in threads, and random graphs."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from support import (
    Flush,
    Result,
    Rig,
    Step,
    assert_equal_bits,
    batch,
    bits,
    chain,
    gradients,
    mlp,
    nothing,
    prove,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# Graphs that are walked more than once, in part, or not at all


def retain_twice(flush: Flush) -> Result:
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    loss = (x * 2).exp().sin().square().sum()
    flush()
    grads = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(3)]
    flush()
    loss.backward()
    assert x.grad is not None
    return {"loss": loss, "x": x.grad, "all": torch.stack(grads)}


def double_backward(flush: Flush) -> Result:
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    y = (x.sin() * x.exp()).square().sum()
    flush()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    flush()
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    flush()
    second.sin().sum().backward()
    assert x.grad is not None
    return {"x": x.grad, "first": first, "second": second}


def gradient_penalty(flush: Flush) -> Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Softplus())
    for _ in range(2):
        x = torch.randn(8, 16, requires_grad=True)
        out = model(x).sum()
        flush()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        flush()
        (out + (grad.norm(dim=1) - 1).square().mean()).backward()
    return gradients(model)


def partial_backward(flush: Flush) -> Result:
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    a = (x * 2).exp()
    b = a.sin().square()
    c = b.tanh().sum()
    flush()
    (late,) = torch.autograd.grad(c, b, retain_graph=True)
    (middle,) = torch.autograd.grad(c, a, retain_graph=True)
    c.backward(inputs=[x])
    assert x.grad is not None
    return {"late": late, "middle": middle, "x": x.grad}


def dead_branches(flush: Flush) -> Result:
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    dead = [(x * n).exp().sin() for n in range(5)]
    live = (x * 2).exp().square()
    dead += [live.cos().exp()]
    loss = live.sum()
    flush()
    loss.backward()
    assert x.grad is not None
    assert all(one.grad_fn is not None for one in dead)
    return {"x": x.grad}


def saved_attributes(flush: Flush) -> Result:
    x = torch.linspace(-1, 1, 1000).requires_grad_()
    y = (x * 2).exp()
    loss = y.sin().sum()
    del y
    flush()
    assert loss.grad_fn is not None
    node: Any = loss.grad_fn.next_functions[0][0]
    seen = [node._saved_self.detach().clone() for _ in range(2)]
    loss.backward()
    assert x.grad is not None
    return {"x": x.grad, "first": seen[0], "second": seen[1]}


GRAPHS: tuple[Step, ...] = (
    retain_twice,
    double_backward,
    gradient_penalty,
    partial_backward,
    dead_branches,
    saved_attributes,
)


@pytest.mark.parametrize("step", GRAPHS, ids=lambda step: step.__name__)
def test_graphs_walked_in_any_way_give_equal_bits(step: Step, tmp_path: Path) -> None:
    prove(step, tmp_path)


# Orders of forward and backward


def interleaved(order: str) -> Callable[[Flush], Result]:
    """Run an order such as ``"F0 F1 B0 B1"``, with evaluations ``E`` and ``N`` (no grad)."""

    def step(flush: Flush) -> Result:
        models = [mlp(1), mlp(2)]
        torch.manual_seed(0)
        graphs: dict[str, Tensor] = {}
        seen = []
        for word in order.split():
            what, number = word[0], word[1:]
            model = models[int(number) % 2]
            if what == "F":
                graphs[number] = model(batch(int(number))).square().sum()
            elif what == "B":
                flush()
                graphs.pop(number).backward()
            elif what == "E":
                model.eval()
                seen.append(model(batch(7)).sum().detach())
                model.train()
            else:
                with torch.no_grad():
                    seen.append(model(batch(7)).sum())
        assert not graphs
        first, second = (gradients(model) for model in models)
        return {
            **first,
            **{f"second {name}": one for name, one in second.items()},
            **{f"seen {number}": one for number, one in enumerate(seen)},
        }

    return step


@pytest.mark.parametrize(
    "order",
    [
        "F0 F1 B1 B0",
        "F0 F2 F4 F6 B0 B2 B4 B6",
        "F0 F2 F4 B0 F6 B2 F8 B4 B6 B8",
        "F0 E0 B0 F0 N0 B0 F1 E0 N1 B1",
    ],
)
def test_any_order_of_forwards_and_backwards_gives_equal_bits(order: str, tmp_path: Path) -> None:
    prove(interleaved(order), tmp_path)


# Threads


def in_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_backward_in_another_thread_gives_equal_bits(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        model = mlp()
        loss = model(batch()).square().sum()
        flush()
        in_thread(loss.backward)
        return gradients(model)

    prove(step, tmp_path)


def test_forwards_and_backwards_in_several_threads_give_equal_bits(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    start = threading.Barrier(4)

    def train(seed: int) -> Result:
        start.wait()
        with rig.context():
            x = batch(seed, rows=500).requires_grad_()
            losses = []
            for _ in range(5):
                loss = chain(x).sum()
                rig.flush()
                loss.backward()
                losses.append(loss.detach())
        assert x.grad is not None
        return {"x": x.grad, "losses": torch.stack(losses)}

    def plain(seed: int) -> Result:
        x = batch(seed, rows=500).requires_grad_()
        losses = [chain(x).sum() for _ in range(5)]
        for loss in losses:
            loss.backward()
        assert x.grad is not None
        return {"x": x.grad, "losses": torch.stack(losses).detach()}

    with ThreadPoolExecutor(4) as pool:
        for seed, result in enumerate(pool.map(train, range(4))):
            assert_equal_bits(result, plain(seed))
    assert rig.stats.bytes_read > 0
    rig.assert_empty()


def test_concurrent_backwards_through_shared_tensors_give_equal_bits(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    x = torch.linspace(-1, 1, 10_000).requires_grad_()

    def losses() -> list[Tensor]:
        h = [(x * (n + 1)).exp() for n in range(8)]
        return [torch.stack([one.sin() * one for one in h]).mul(n + 1).sum() for n in range(4)]

    def grad(loss: Tensor) -> Tensor:
        start.wait()
        return torch.autograd.grad(loss, x, retain_graph=True)[0]

    start = threading.Barrier(1)
    expected = [grad(loss) for loss in losses()]
    start = threading.Barrier(4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with rig.context(), ThreadPoolExecutor(4) as pool:
            for _ in range(10):
                built = losses()
                rig.flush()
                actual = list(pool.map(grad, built))
                assert [bits(one) for one in actual] == [bits(one) for one in expected]
    finally:
        sys.setswitchinterval(interval)
    del built
    assert rig.stats.bytes_read > 0
    rig.assert_empty()


# Copies, and workers of data loaders


def test_modules_can_be_copied_pickled_and_saved_in_the_middle_of_a_step(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        model = mlp()
        loss = model(batch()).square().sum()
        flush()
        twin = copy.deepcopy(model)
        third = pickle.loads(pickle.dumps(model))
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        loss.backward()
        saved.seek(0)
        twin.load_state_dict(torch.load(saved))
        for one in (twin, third):
            one.eval()
            one(batch()).sum().backward()
        return {
            **gradients(model),
            **{f"twin {name}": one for name, one in gradients(twin).items()},
            **{f"third {name}": one for name, one in gradients(third).items()},
        }

    prove(step, tmp_path)


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        # Autograd and its hooks in a worker, too: the store of the parent is not the worker's.
        x = torch.full((64,), float(index), requires_grad=True)
        (x.exp() * 0 + x).sum().backward()
        assert x.grad is not None
        return x.detach()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_of_a_data_loader_may_be_forked_inside_the_block(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        model = mlp()
        losses = []
        for rows in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2):
            loss = model(rows).square().sum()
            flush()
            loss.backward()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses), **gradients(model)}

    prove(step, tmp_path)


# Models that were not written for this


def cells(cell: nn.Module, flush: Flush) -> Result:
    state: Any = None
    for _ in range(4):
        state = cell(torch.randn(6, 8, dtype=cell.weight_hh.dtype), state)
    hidden = state[0] if isinstance(state, tuple) else state
    loss = hidden.square().sum()
    del state, hidden
    flush()
    loss.backward()
    return {"loss": loss, **gradients(cell)}


def packed(layer: nn.Module, flush: Flush) -> Result:
    rows = nn.utils.rnn.pack_padded_sequence(
        torch.randn(7, 5, 8, dtype=layer.weight_hh_l0.dtype), [7, 5, 4, 2, 1]
    )
    y, _ = layer(rows)
    loss = y.data.square().sum()
    del rows, y
    flush()
    loss.backward()
    return {"loss": loss, **gradients(layer)}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in ("LSTMCell", "GRUCell", "RNNCell", "LSTM", "GRU")),
        ("LSTMCell", torch.bfloat16),
    ],
)
def test_recurrent_networks_train_with_equal_bits(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Cells fill the parts of one storage one after the other, each with a counter of its own."""

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        network = getattr(nn, kind)(8, 12).to(dtype)
        walk = cells if kind.endswith("Cell") else packed
        return walk(network, flush)

    prove(step, tmp_path)
    rig = Rig(tmp_path, verify=True)
    rig.end_writes_at_once()
    with rig.context():
        actual = step(nothing)
    assert_equal_bits(actual, step(nothing))
    assert rig.stats.bytes_read > 0
    del actual
    rig.assert_empty()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=97,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "half"), [(gpt2, False), (bert, True), (t5, True), (llama, False)]
)
def test_models_of_transformers_train_with_equal_bits(
    make: Callable[[], nn.Module], half: bool, tmp_path: Path
) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        model = make()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            tokens = torch.randint(1, 97, (3, 17))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                loss = model(input_ids=tokens, labels=tokens).loss
            flush()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        weights = {name: one.detach() for name, one in model.named_parameters()}
        return {
            "losses": torch.stack(losses),
            **weights,
            **{f"grad of {name}": one for name, one in gradients(model).items()},
        }

    stats = prove(step, tmp_path)
    assert stats.tensors_offloaded > 20
