"""Rounds of a GPU of which only what leaves memory is followed, and those that are skimmed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ssdtrain
from fake_device import FakeDevice
from offloading import chain, check, gpus_of, made, offloaded, settle, use_memory
from on_devices import Device, on_each_device
from on_fake import on_fake_device
from ssdtrain.activations import followed
from ssdtrain.activations.followed import Followed
from ssdtrain.planning.policy import Item, Plan, Policy
from test_training import LAG_US, train

COUNT = 40
RING = 64 << 20


class EachSecond(Policy):
    """A policy by which each second tensor leaves, or only the first of so many."""

    def __init__(self, period: int = 2, *, is_bold: bool = True) -> None:
        super().__init__()
        self._period = period
        self._is_bold = is_bold

    def learn(self, signature: int, items: Sequence[Item], *_: Any) -> None:
        """Plan by place alone."""
        leaving = items[:: self._period]
        keep = frozenset(item.key for item in items) - {item.key for item in leaving}
        self.plans[signature] = Plan(keep, written_bytes=sum(item.nbytes for item in leaving))
        self.keep |= keep
        self.keep -= {item.key for item in leaving}

    def would_plan_anew(self) -> bool:
        """Say whether later plans will have more."""
        return not self._is_bold

    def is_settled(self, signature: int) -> bool:
        """Say that the first plan is the last."""
        return signature in self.plans


class FirstHalf(EachSecond):
    """A policy by which the first half leaves, and is read once a quarter was needed."""

    def learn(self, signature: int, items: Sequence[Item], *others: Any) -> None:
        """Count each need as a second."""
        super().learn(signature, items, *others)
        leaving = {item.key for item in items[: len(items) // 2]}
        keep = frozenset(item.key for item in items) - leaving
        self.plans[signature] = Plan(
            keep,
            start_by_s=dict.fromkeys(leaving, len(items) / 4),
            needed_s={item.key: 1.0 * place for place, item in enumerate(reversed(items))},
            written_bytes=sum(item.nbytes for item in items if item.key in leaving),
        )
        self.keep = self.keep - leaving | keep


@contextmanager
def scopes() -> Iterator[list[str]]:
    """Yield how much is followed of each round that begins from now on."""
    seen: list[str] = []
    real = Followed.scope

    def scope(self: Followed, opening: int) -> Any:
        seen.append(real(self, opening))
        return seen[-1]

    with mock.patch.object(Followed, "scope", scope):
        yield seen


def step(session: ssdtrain.Session, loss: Tensor) -> None:
    """Run a backward, and let the round be one that can be learned from."""
    loss.backward()
    del loss
    torch.cuda.synchronize()
    settle(session)


@pytest.mark.parametrize("case", ["mlp", "two streams", "reentrant checkpoint"])
@on_each_device()
def test_every_case_gives_the_bits_of_a_plain_run(device: Device, case: str) -> None:
    plain = train(case)
    for trial in range(2):
        device.lag(LAG_US * trial, seed=trial + 1)
        with scopes() as seen, offloaded(EachSecond(), pinned_bytes=RING) as session:
            trained = [train(case) for _ in range(5)]
        device.lag(0)
        for one in trained:
            assert all(map(torch.equal, plain, one))
        assert device.races() == []
        assert "partial" in seen
        assert session.stats.bytes_offloaded + session.stats.bytes_forwarded > 0


@on_each_device()
def test_only_what_leaves_is_followed(device: Device) -> None:
    leaf = made(0)
    with scopes() as seen, offloaded(EachSecond(), pinned_bytes=RING) as session:
        rounds = session._hooks.prefetcher.rounds  # type: ignore[union-attr]
        counts, left, kept, grads = [], [], [], []
        for _ in range(8):
            before = session.stats
            leaf.grad = None
            saved = chain(leaf, COUNT)
            settle(session)
            # Half of it has left the GPU, whether all was followed or not.
            counts.append(rounds.current.count)
            step(session, saved.sum())
            del saved
            made_since = session.stats.since(before)
            left.append(made_since.bytes_offloaded // leaf.nbytes)
            kept.append(made_since.bytes_kept // leaf.nbytes)
            grads.append(leaf.grad)
    assert seen == ["whole", "partial", "whole", "partial", "partial", "whole", *2 * ["partial"]]
    partial = [place for place, scope in enumerate(seen) if scope == "partial"]
    assert [counts[place] for place in partial] == [COUNT // 2] * len(partial)
    assert {count for place, count in enumerate(counts) if place not in partial} == {COUNT}
    assert left[1:] == [COUNT // 2] * 7
    check(leaf, COUNT)
    assert all(torch.equal(leaf.grad, one) for one in grads)
    assert kept[1:] == [COUNT // 2] * 7
    assert device.races() == []


@on_each_device()
def test_reads_begin_by_their_deadlines_while_only_what_stays_is_needed(device: Device) -> None:
    leaf = made(0)
    loaded: list[int] = []
    with scopes() as seen, offloaded(FirstHalf(), pinned_bytes=RING) as session:
        for _ in range(4):
            leaf.grad = None
            saved = chain(leaf, COUNT // 2)
            for _ in range(4):
                saved = chain(saved, COUNT // 8)
                saved.register_hook(lambda _: loaded.append(gpus_of(session).loaded_bytes()))
            settle(session)
            loaded.clear()
            step(session, saved.sum())
            del saved
            if seen[-1] == "partial":
                _, before, due, after = loaded
                assert before == 0, "at the peak nothing is read that is not needed soon"
                assert due == 0
                assert after == COUNT // 2 * leaf.nbytes
    assert seen == ["whole", "partial", "whole", "partial"]
    check(leaf, COUNT)
    assert device.races() == []


@on_each_device()
def test_a_round_that_packs_something_else_is_followed_from_there(device: Device) -> None:
    leaf = made(0)
    with scopes() as seen, offloaded(EachSecond(), pinned_bytes=RING) as session:
        rounds = session._hooks.prefetcher.rounds  # type: ignore[union-attr]
        for _ in range(3):
            step(session, chain(leaf, COUNT).sum())
        assert seen == ["whole", "partial", "whole"]
        leaf.grad = None
        before = session.stats
        same = chain(leaf, COUNT // 2)
        other = chain(torch.cat([same, same]), COUNT // 2)
        settle(session)
        followed_count = rounds.current.count
        step(session, other.sum())
        del same, other
        # Of what nothing is known all leaves.
        made_since = session.stats.since(before)
        assert made_since.bytes_offloaded >= COUNT // 2 * 2 * leaf.nbytes
        assert followed_count == COUNT // 4 + COUNT // 2
        step(session, chain(leaf, COUNT).sum())
    assert seen[3:] == ["partial", "whole"]
    assert device.races() == []
    assert leaf.grad is not None
    plain = made(0)
    same = chain(plain, COUNT // 2)
    chain(torch.cat([same, same]), COUNT // 2).sum().backward()
    chain(plain, COUNT).sum().backward()
    assert plain.grad is not None
    assert torch.equal(leaf.grad.cpu(), plain.grad.cpu())


@on_each_device()
def test_rounds_of_which_little_leaves_are_skimmed(device: Device) -> None:
    leaf, grads = made(0), []
    with scopes() as seen, offloaded(EachSecond(COUNT), pinned_bytes=RING) as session:
        for number in range(8):
            before = session.stats
            leaf.grad = None
            step(session, chain(leaf, COUNT).sum())
            grads.append(leaf.grad)
            made_since = session.stats.since(before)
            left_bytes = made_since.bytes_offloaded + made_since.bytes_forwarded
            if number:
                expected = {"whole": 1, "skimmed": 0}[seen[number]]
                assert left_bytes == expected * leaf.nbytes
    assert seen == ["whole", "skimmed", "whole", "skimmed", "skimmed", "whole", *2 * ["skimmed"]]
    check(leaf, COUNT)
    assert all(torch.equal(leaf.grad, one) for one in grads)
    assert device.races() == []


@on_each_device()
def test_rounds_in_which_moving_is_too_dear_keep_all(device: Device) -> None:
    leaf, grads, left = made(0), [], []
    real = followed.Followed.note_price

    def dear(self: Followed, opening: int, _: float) -> bool:
        return real(self, opening, 1.0)

    with (
        scopes() as seen,
        offloaded(EachSecond(), pinned_bytes=RING) as session,
        mock.patch.object(Followed, "note_price", dear),
        mock.patch.object(followed, "PRICE_MAX", 1 / 4),
    ):
        for _ in range(8):
            before = session.stats
            leaf.grad = None
            step(session, chain(leaf, COUNT).sum())
            grads.append(leaf.grad)
            made_since = session.stats.since(before)
            left.append(made_since.bytes_offloaded + made_since.bytes_forwarded)
    # The first round after one that is followed in whole tells the price anew.
    dear_scopes = ["partial", "skimmed"]
    assert seen == ["whole", "partial", "whole", *dear_scopes, "whole", *dear_scopes]
    half_bytes = COUNT // 2 * leaf.nbytes
    assert left[1:] == [half_bytes * (scope != "skimmed") for scope in seen[1:]]
    check(leaf, COUNT)
    assert all(torch.equal(leaf.grad, one) for one in grads)
    assert device.races() == []


@on_fake_device()
def test_a_gpu_that_is_behind_has_no_price(fake: FakeDevice) -> None:
    leaf, prices = made(0), []
    real = Followed.note_price

    def noted(self: Followed, opening: int, price_share: float) -> bool:
        prices.append(price_share)
        return real(self, opening, price_share)

    with (
        scopes() as seen,
        mock.patch.object(Followed, "note_price", noted),
        offloaded(EachSecond(), pinned_bytes=RING) as session,
    ):
        step(session, chain(leaf, COUNT).sum())
        fake.hold("kernels")
        chain(leaf, COUNT).sum().backward()
        # The next round begins, and the GPU has not come to the end of the last one.
        loss = chain(leaf, COUNT).sum()
        fake.release()
        step(session, loss)
        del loss
        step(session, chain(leaf, COUNT).sum())
        session._hooks.learn_from_last()  # type: ignore[union-attr]
    assert seen[:2] == ["whole", "partial"]
    assert prices[0] == 0.0
    assert fake.races() == []


@on_each_device()
def test_after_stalls_rounds_of_which_hardly_anything_leaves_are_learned_from(
    device: Device,
) -> None:
    leaf, policy = made(0), EachSecond(COUNT, is_bold=False)
    with (
        scopes() as seen,
        mock.patch.object(policy, "learn", wraps=policy.learn) as learn,
        offloaded(policy, pinned_bytes=RING) as session,
    ):
        for _ in range(6):
            leaf.grad = None
            step(session, chain(leaf, COUNT).sum())
    assert seen.count("skimmed") == 3
    assert learn.call_count == 6
    check(leaf, COUNT)
    assert device.races() == []


@on_each_device()
def test_tensors_of_the_cpu_leave_in_partial_rounds_too(device: Device) -> None:
    leaf, on_cpu = made(0), torch.randn(16 << 10, requires_grad=True)
    with scopes() as seen, offloaded(EachSecond(), pinned_bytes=RING) as session:
        left = []
        for _ in range(4):
            before = session.stats
            saved, beside = chain(leaf, 2), chain(on_cpu, COUNT)
            settle(session)
            step(session, saved.sum().cpu() + beside.sum())
            del saved, beside
            made_since = session.stats.since(before)
            left.append(made_since.bytes_offloaded + made_since.bytes_forwarded)
    assert seen == ["whole", "partial", "whole", "partial"]
    half_bytes = leaf.nbytes + COUNT // 2 * on_cpu.nbytes
    assert left[1:] == [half_bytes] * 3
    assert device.races() == []


@on_fake_device(devices=2)
def test_a_model_that_moves_to_another_gpu_is_followed_there(fake: FakeDevice) -> None:
    leaves = [made(0), made(0).detach().to("cuda:1").requires_grad_()]
    grads: list[Tensor] = []
    with scopes() as seen, offloaded(EachSecond(), pinned_bytes=RING) as session:
        rounds = session._hooks.prefetcher.rounds  # type: ignore[union-attr]
        for number in range(6):
            leaf = leaves[number // 3]
            leaf.grad = None
            with torch.cuda.device(leaf.device):
                saved = chain(leaf, COUNT)
                # Of the round that was guided by one on the other GPU all is followed.
                followed_count = rounds.current.count
                step(session, saved.sum())
                del saved
            assert leaf.grad is not None
            grads.append(leaf.grad.cpu())
            assert followed_count in (COUNT, COUNT // 2)
            assert followed_count == COUNT or number in (1, 4, 5)
    assert seen[:4] == ["whole", "partial", "whole", "partial"]
    check(leaves[0], COUNT)
    assert all(torch.equal(grads[0], one) for one in grads)
    assert fake.races() == []


@on_fake_device()
def test_a_stream_that_saves_only_what_stays_is_seen(fake: FakeDevice) -> None:
    """It reads what leaves, too, and is late: that memory may not be given to others before."""
    leaf, sides = made(0), [torch.cuda.Stream() for _ in range(4)]

    def loss_of(session: ssdtrain.Session | None, number: int) -> Tensor:
        main, side = torch.cuda.current_stream(), sides[number]
        first = torch.exp(leaf * 0.01)
        stays = torch.exp(first * 0.1)
        leaves = torch.sigmoid(first * 1.01)
        side.wait_stream(main)
        fake.hold(side)
        # Only some steps use another stream, and each of them one that is new.
        with torch.cuda.stream(side if number % 2 else main):
            late = leaves + stays * stays
        x = torch.tanh(leaves + stays)
        del leaves
        for _ in range(6):
            x = chain(x, 10)
            if session is not None:
                session.flush(wait=False)
            main.synchronize()
            use_memory(leaf, 40)
        fake.release()
        main.wait_stream(side)
        late.record_stream(main)
        stays.record_stream(side)
        return x.sum() + torch.tanh(late).sum()

    plain = [loss_of(None, number).item() for number in range(4)]
    with scopes() as seen, offloaded(EachSecond(), pinned_bytes=RING) as session:
        losses = []
        for number in range(4):
            loss = loss_of(session, number)
            losses.append(loss.item())
            step(session, loss)
            del loss
    assert seen == ["whole", "partial", "whole", "partial"]
    assert fake.races() == []
    assert losses == plain
