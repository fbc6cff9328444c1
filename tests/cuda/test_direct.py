"""Tensors of a GPU go past the CPU's memory: by a cuFile of ours, and by NVIDIA's own.

NVIDIA's runs in compatibility mode here, which copies through the CPU: it is real code over a fake
GPU. Ours says that it moves bytes directly, is stricter, and fails as it is told.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ssdtrain
from checkout import SCRATCH
from fake_cufile import MOVES_HALF, MOVES_NOTHING, FakeCufile
from fake_device import FakeDevice
from offloading import chain, gpus_of, made, offloaded, settle, use_memory
from on_fake import on_fake_device
from ssdtrain.machine import cufile
from support import shared_out
from test_training import LAG_US, train

ON_DEVICE = "copies on the device"
COUNT = 8
SMALL_RING, LARGE_RING = 256 << 10, 64 << 20


def plain_gradient(count: int = COUNT) -> torch.Tensor:
    leaf = made(0)
    chain(leaf, count).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.cpu()


def step(leaf: torch.Tensor, session: ssdtrain.Session) -> torch.Tensor:
    """Save, wait until all is on the disk, load, and return the gradient."""
    leaf.grad = None
    saved = chain(leaf, COUNT)
    settle(session)
    saved.sum().backward()
    torch.cuda.synchronize()
    assert leaf.grad is not None
    return leaf.grad.cpu()


@pytest.mark.parametrize("case", shared_out(["two streams", "two devices"], quick=["two streams"]))
@on_fake_device(devices=2, cufile="fake")
def test_every_case_gives_the_bits_of_a_plain_run(fake: FakeDevice, case: str) -> None:
    plain = train(case)
    direct = FakeCufile()
    for trial in range(4):
        fake.lag(LAG_US if trial < 2 else 0, seed=trial + 1)
        ring = SMALL_RING if trial % 2 else LARGE_RING
        with offloaded(pinned_bytes=ring, gds="required") as session:
            seen = train(case)
            # Copies on the GPU are no link that a plan has to reckon with.
            assert gpus_of(session).copy_rates() == []
        fake.lag(0)
        assert all(map(torch.equal, plain, seen)), f"trial {trial}"
        assert fake.races() == [], f"trial {trial}"
        stats = session.stats
        assert stats.ring_bytes > 0
        assert stats.pinned_bytes == 0
        assert stats.bytes_offloaded + stats.bytes_forwarded > 0
    assert direct.calls("cuFileWrite") > 0


@pytest.mark.long
@on_fake_device(cufile="real")
def test_nvidias_own_library_gives_the_bits_of_a_plain_run(fake: FakeDevice) -> None:
    if cufile.find_library() is None:
        pytest.skip("PyTorch came without cuFile")
    plain, before = plain_gradient(), set(os.listdir())
    trial = cufile.try_out(str(SCRATCH), 0, allows_compat=True)
    assert trial.works, trial.message
    leaf = made(0)
    with offloaded(gds="compat", pinned_bytes=LARGE_RING) as session:
        for _ in range(2):
            assert torch.equal(step(leaf, session), plain)
        # Of lengths that are no whole blocks.
        for elements in (129, 1025, 5001, 70_001):
            odd = made(1, elements)
            saved = chain(odd, 3)
            settle(session)
            saved.sum().backward()
            same = made(1, elements)
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                chain(same, 3).sum().backward()
            assert odd.grad is not None
            assert same.grad is not None
            assert torch.equal(odd.grad, same.grad)
        stats = session.stats
        assert stats.write_failed_count == 0
        assert stats.bytes_written >= 2 * (COUNT - 1) * leaf.nbytes
        assert stats.bytes_read >= 2 * (COUNT - 1) * leaf.nbytes
    assert stats.ring_bytes > 0
    assert set(os.listdir()) == before, "cuFile wrote its log here"


@pytest.mark.long
@on_fake_device(cufile="real")
def test_nvidias_own_library_does_not_count_as_direct_here(fake: FakeDevice) -> None:
    if cufile.find_library() is None:
        pytest.skip("PyTorch came without cuFile")
    trial = cufile.try_out(str(SCRATCH), 0)
    assert not trial.works
    assert "cuFileDriverOpen of libcufile failed with 5001" in trial.message


# --- each wait ------------------------------------------------------------------


@on_fake_device(cufile="fake")
def test_a_source_is_let_go_and_a_slot_is_written_after_the_copy(fake: FakeDevice) -> None:
    leaf, plain = made(0), plain_gradient(11)
    with offloaded(gds="required", pinned_bytes=LARGE_RING) as session:
        fake.hold(ON_DEVICE)
        saved = chain(leaf, 11)
        session.flush(wait=False)
        use_memory(leaf, 20)
        assert session.stats.bytes_written == 0
        fake.release()
        saved.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.cpu(), plain)


@on_fake_device(cufile="fake")
def test_a_load_waits_for_its_memory_and_is_waited_for(fake: FakeDevice) -> None:
    leaf, plain = made(0), plain_gradient(20)
    with offloaded(gds="required", pinned_bytes=LARGE_RING) as session:
        saved = chain(leaf, 20)
        settle(session)
        use_memory(leaf, 40)
        fake.hold(ON_DEVICE)
        saved.sum().backward()
        fake.release()
        assert session.stats.bytes_read >= 15 * leaf.nbytes
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.cpu(), plain)


@on_fake_device(cufile="fake")
def test_a_slot_is_used_again_after_its_transfer(fake: FakeDevice) -> None:
    leaf, plain = made(0), plain_gradient(30)
    with offloaded(gds="required") as session:
        saved = leaf
        for _ in range(10):
            # No more at once than there are slots, so that all of it leaves the GPU.
            saved = chain(saved, 3)
            settle(session)
        fake.lag(20_000, ON_DEVICE)
        saved.sum().backward()
        assert session.stats.bytes_read >= 20 * leaf.nbytes
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.cpu(), plain)


# --- what fails -----------------------------------------------------------------


@pytest.mark.parametrize("symbol", ["cuFileWrite", "cuFileRead"])
@on_fake_device(cufile="fake")
def test_a_transfer_fails(fake: FakeDevice, symbol: str) -> None:
    plain, direct = plain_gradient(), FakeCufile()
    for code in (5, 5030, -5022, MOVES_HALF, MOVES_NOTHING):
        for nth in (1, 2, None):
            leaf, told = made(0), None
            with offloaded(gds="required") as session:
                direct.fail(symbol, code, nth=nth)
                try:
                    # What could not be written stays in the ring, so that is not waited for.
                    leaf.grad = None
                    saved = chain(leaf, COUNT)
                    session.flush()
                    saved.sum().backward()
                    torch.cuda.synchronize()
                except ssdtrain.StorageError as error:
                    told = str(error)
                    assert symbol == "cuFileRead"
                    assert nth is None or code == MOVES_NOTHING
                    assert f"{symbol} failed" in told or "moved no bytes" in told
                direct.recover()
                if told is None:
                    assert leaf.grad is not None
                    assert torch.equal(leaf.grad.cpu(), plain), f"{code} {nth}"
                saved = None
                # The next step works, in the same session, and leaves no slot behind.
                assert torch.equal(step(leaf, session), plain), f"{code} {nth}"
                settle(session)
            assert fake.races() == [], f"{code} {nth}"


@pytest.mark.parametrize(
    "symbol",
    [
        "cuFileSetParameterBool",
        "cuFileDriverOpen",
        "cuFileHandleRegister",
        "cuFileBufRegister",
    ],
)
@on_fake_device(cufile="fake")
def test_the_way_cannot_be_opened(fake: FakeDevice, symbol: str) -> None:
    """The child process that tried it said yes, and here it fails all the same."""
    plain, direct = plain_gradient(), FakeCufile()
    assert cufile.try_out(str(SCRATCH), 0).works
    leaf = made(0)
    direct.fail(symbol, 5030)
    with offloaded(gds="required") as session:
        with pytest.raises(ssdtrain.UnsupportedError, match=f"{symbol} of libcufile failed"):
            step(leaf, session)
        assert not os.listdir(SCRATCH) or not list(SCRATCH.glob(".ssdtrain-*"))
        # The next step works.
        direct.recover()
        assert torch.equal(step(leaf, session), plain)
        assert session.stats.ring_bytes > 0
    if symbol in {"cuFileHandleRegister", "cuFileBufRegister"}:
        direct.fail(symbol, 5030)
        with offloaded(gds="optional") as session:
            assert torch.equal(step(leaf, session), plain)
            assert session.stats.ring_bytes == 0
            assert session.stats.pinned_bytes > 0


# --- whether it works is asked in a child ---------------------------------------


def staged(leaf: torch.Tensor) -> str:
    """Run a step that may take either way, see it take pinned memory, and return why."""
    with offloaded(gds="optional") as session:
        step(leaf, session)
        assert session.stats.ring_bytes == 0
        assert session.stats.pinned_bytes > 0
    return cufile.try_out(str(SCRATCH), 0).message


def forget() -> None:
    cufile.try_out.cache_clear()


@pytest.mark.long
@on_fake_device(cufile="fake")
def test_a_library_that_does_not_answer_is_ended(fake: FakeDevice) -> None:
    leaf = made(0)
    cufile.TIMEOUT_S = 1
    for symbol in ("cuFileDriverOpen", "cuFileHandleRegister"):
        forget()
        os.environ["SSDTRAIN_FAKE_CUFILE"] = f"{symbol}:hang"
        assert "did not answer within 1 s" in staged(leaf)
        # A file has a name while it is registered; whoever ended the process removes it.
        assert not list(SCRATCH.glob(".ssdtrain-*"))
        with (
            pytest.raises(ssdtrain.UnsupportedError, match="did not answer within 1 s"),
            offloaded(gds="required"),
        ):
            pytest.fail("it was required and does not work")


@on_fake_device(cufile="fake")
def test_the_reason_is_told(fake: FakeDevice) -> None:
    leaf = made(0)
    for symbol in ("cuFileDriverOpen", "cuFileHandleRegister", "cuFileBufRegister"):
        forget()
        os.environ["SSDTRAIN_FAKE_CUFILE"] = f"{symbol}:5008"
        assert (
            staged(leaf)
            == (
                f"{symbol} of libcufile failed with 5008: this file system or drive has no "
                "GPUDirect Storage"
            )
            or symbol == "cuFileBufRegister"
        )
        with (
            pytest.raises(ssdtrain.UnsupportedError, match=f"{symbol} of libcufile .* 5008"),
            offloaded(gds="required"),
        ):
            pytest.fail("it was required and does not work")
    forget()
    del os.environ["SSDTRAIN_FAKE_CUFILE"]
    with offloaded(gds="optional") as session:
        step(leaf, session)
        assert session.stats.ring_bytes > 0


@on_fake_device(cufile="fake")
def test_a_missing_library_is_told(fake: FakeDevice) -> None:
    # The child that tries the library must not find the one that was preloaded.
    os.environ["LD_PRELOAD"] = os.environ["LD_PRELOAD"].split()[0]
    cufile.find_library = lambda: "/no/such/library"
    assert "libcufile.so.0, which is not on this machine" in staged(made(0))


@on_fake_device(cufile="fake")
def test_a_way_that_is_disabled_is_not_tried(fake: FakeDevice) -> None:
    tried = cufile.try_out.cache_info().misses
    leaf = made(0)
    with offloaded(gds="disabled") as session:
        step(leaf, session)
        assert session.stats.ring_bytes == 0
    assert cufile.try_out.cache_info().misses == tried


@pytest.mark.parametrize("option", [{"verify": True}, {"direct_io": "disabled"}])
def test_options_that_exclude_each_other(tmp_path: Path, option: dict[str, object]) -> None:
    tool = ssdtrain.offload(SCRATCH, gds="required", **option)  # type: ignore[arg-type]
    (name,) = option
    with pytest.raises(ssdtrain.ConfigError, match=f"gds='required' is not possible with {name}"):
        tool.__enter__()


def test_a_choice_that_is_none() -> None:
    with pytest.raises(ssdtrain.ConfigError, match="gds must be one of 'optional', 'required', "):
        ssdtrain.offload(SCRATCH, gds="always")  # type: ignore[arg-type]


def test_the_counts_of_nvidia_fs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = tmp_path / "stats"
    monkeypatch.setattr(cufile, "STATISTICS", statistics)
    assert cufile.direct_bytes() is None
    counts = (
        "Reads : n=5 ok=5 err=0 readMiB=7 io_state_err=0\n"
        "Writes : n=9 ok=9 err=0 writeMiB=11 io_state_err=0 pg-cache=0\n"
    )
    statistics.write_text("IO stats: Enabled, peer IO stats: Enabled\n" + counts)
    assert cufile.direct_bytes() == (11 << 20, 7 << 20)
    statistics.write_text("IO stats: Disabled, peer IO stats: Disabled\n" + counts)
    assert cufile.direct_bytes() is None
