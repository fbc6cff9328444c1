"""What a bfloat16 weight does not say of its float32 master, packed and unpacked without loss."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from ssdtrain._core import MasterCode

EDGES = (0, 1, 2, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF)


def packed(weights: Tensor, masters: Tensor) -> tuple[MasterCode, Tensor] | None:
    payload = torch.empty(MasterCode.payload_len_max(masters.numel()), dtype=torch.int16)
    code = MasterCode.pack(
        weights.data_ptr(), masters.data_ptr(), payload.data_ptr(), masters.numel()
    )
    return None if code is None else (code, payload[: code.payload_len].clone())


def unpacked(code: MasterCode, weights: Tensor, payload: Tensor) -> Tensor | None:
    masters = torch.full(weights.shape, -7.0)
    is_of = code.unpack(weights.data_ptr(), payload.data_ptr(), masters.data_ptr())
    return masters if is_of else None


def is_rounded(weights: Tensor, masters: Tensor) -> bool:
    return MasterCode.is_rounded(weights.data_ptr(), masters.data_ptr(), masters.numel())


def upper_halves(uppers: Tensor) -> Tensor:
    """All patterns of 32 bits whose upper half is one of these."""
    patterns = (uppers.to(torch.int64)[:, None] << 16) | torch.arange(1 << 16)
    return patterns.view(-1).to(torch.int32).view(torch.float32)


def prove(masters: Tensor) -> None:
    """What torch rounds comes back as it was; of what is no number one may be refused."""
    weights = masters.bfloat16()
    assert is_rounded(weights, masters)
    numbers = masters[~masters.isnan()].contiguous()
    if not numbers.numel():
        return
    rounded = numbers.bfloat16()
    found = packed(rounded, numbers)
    assert found is not None, "torch rounds as we do"
    code, payload = found
    back = unpacked(code, rounded, payload)
    assert back is not None
    assert torch.equal(back.view(torch.int32), numbers.view(torch.int32))


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_edges(sign: int) -> None:
    """Zeros, subnormals, the least normal, one, the largest, infinities, and what is no number."""
    for upper in EDGES:
        prove(upper_halves(torch.tensor([upper | sign])))


@pytest.mark.long
@pytest.mark.parametrize("part", range(16))
def test_every_pattern(part: int) -> None:
    for block in range(16):
        first = part * 4096 + block * 256
        prove(upper_halves(torch.arange(first, first + 256)))


def test_what_is_no_number_is_packed_or_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0x7F80_0001, 0x8000_0000, (3000,), generator=generator)
    kept = 0
    for master in patterns.to(torch.int32).view(torch.float32).split(1):
        found = packed(master.bfloat16(), master)
        if found is not None:
            back = unpacked(found[0], master.bfloat16(), found[1])
            assert back is not None
            assert torch.equal(back.view(torch.int32), master.view(torch.int32))
            kept += 1
    assert kept < 3000, "a payload of two bytes cannot tell all of them"


def test_random_masters_cost_two_bytes_each() -> None:
    masters = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    masters.view(torch.int32)[::100_000].bitwise_and_(-0x2_0000).bitwise_or_(0x8000)
    weights = masters.bfloat16()
    found = packed(weights, masters)
    assert found is not None
    code, payload = found
    assert payload.numel() == masters.numel(), "few ties are noted elsewhere"
    back = unpacked(code, weights, payload)
    assert back is not None
    assert torch.equal(back, masters)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 4095, 4096, 4097, 100_001])
def test_ties_cost_a_bit_more(count: int) -> None:
    masters = torch.full((count,), 2.0 + 2**-7)
    masters[::3] = 2.0
    weights = masters.bfloat16()
    assert bool((weights == 2.0).all()), "a tie, to the even one below"
    found = packed(weights, masters)
    assert found is not None
    code, payload = found
    if count > 1:
        assert payload.numel() == MasterCode.payload_len_max(count) == count + -(-count // 16)
    back = unpacked(code, weights, payload)
    assert back is not None
    assert torch.equal(back, masters)


@pytest.mark.parametrize("count", [1, 4096, 100_001])
def test_a_weight_that_is_not_its_master_rounded_is_refused(count: int) -> None:
    masters = torch.randn(count, generator=torch.Generator().manual_seed(0))
    weights = masters.bfloat16()
    for place in {0, count // 2, count - 1}:
        bits = weights.view(torch.int16)
        for change in (1, -1, 0x4000):
            bits[place] += change
            assert not is_rounded(weights, masters)
            assert packed(weights, masters) is None
            bits[place] -= change
    assert packed(weights, masters) is not None


@pytest.mark.parametrize("count", [2, 4096, 100_001])
def test_other_weights_are_seen(count: int) -> None:
    masters = torch.randn(count, generator=torch.Generator().manual_seed(0))
    weights = masters.bfloat16()
    found = packed(weights, masters)
    assert found is not None
    code, payload = found
    # Also two changes of which a sum would not tell.
    for places in ([0], [count - 1], [0, count - 1]):
        weights[places] = -weights[places]
        assert unpacked(code, weights, payload) is None
        weights[places] = -weights[places]
    assert unpacked(code, weights, payload) is not None


def test_addresses_of_nothing_are_refused() -> None:
    numbers = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="no number lies at address 0x0"):
        MasterCode.pack(0, numbers.data_ptr(), numbers.data_ptr(), 1)
    with pytest.raises(ValueError, match="no number lies at address"):
        MasterCode.is_rounded(numbers.data_ptr(), numbers.data_ptr() + 2, 1)


def test_a_tie_to_the_odd_weight_is_no_rounding() -> None:
    for weight, master in [(0x3F81, 0x3F80_8000), (0x3F81, 0x3F81_8000)]:
        weights = torch.tensor([weight], dtype=torch.int16).view(torch.bfloat16)
        masters = torch.tensor([master], dtype=torch.int32).view(torch.float32)
        assert not is_rounded(weights, masters)
        assert packed(weights, masters) is None
        assert packed(masters.bfloat16(), masters) is not None


def test_what_is_packed_while_others_change_weights_is_of_the_same_weights() -> None:
    """Training without locks changes them at any time: the checksum is of those that were used."""
    torch.manual_seed(0)
    masters = torch.randn(4 * 4096)
    first = masters.bfloat16()
    second = first.clone()
    second.view(torch.int16)[::7] ^= 1
    weights, ends = first.clone(), threading.Event()

    def change() -> None:
        while not ends.is_set():
            weights.copy_(second)
            weights.copy_(first)

    payload = torch.empty(MasterCode.payload_len_max(masters.numel()), dtype=torch.int16)
    addresses = weights.data_ptr(), masters.data_ptr(), payload.data_ptr()
    back = torch.empty(masters.shape)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100_000):
            code = MasterCode.pack(*addresses, masters.numel())
            if code is not None:
                assert code.unpack(first.data_ptr(), payload.data_ptr(), back.data_ptr())
    finally:
        ends.set()
        thread.join()
