"""What goes wrong on the device ends in an error that says so, and in nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from checkout import SCRATCH
from fake_device import FakeDevice, can_fail
from on_fake import child, on_fake_device

LAUNCH_FAILED, OUT_OF_MEMORY, NOT_INITIALIZED, NOT_SUPPORTED = 719, 2, 3, 801


def driver() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def clear_error() -> None:
    driver().cudaGetLastError()


@contextlib.contextmanager
def raises(*words: str) -> Iterator[None]:
    with pytest.raises(RuntimeError) as caught:
        yield
    assert all(word in str(caught.value) for word in words), caught.value


# Failures that a test asks for


@on_fake_device()
def test_every_function_can_fail(fake: FakeDevice) -> None:
    library = driver()
    assert len(can_fail()) > 120
    for symbol in can_fail():
        fake.fail(symbol, LAUNCH_FAILED)
        assert getattr(library, symbol)(*[None] * 7) == LAUNCH_FAILED, symbol
        text = library.cudaGetErrorString(LAUNCH_FAILED).decode()
        assert text == f"CUDA_ERROR_LAUNCH_FAILED (fake device: the test made {symbol} fail)"


def interrupted_in_shapes(frame: FrameType, event: str, _: object) -> None:
    """Be a trace function: an interrupt comes while Python tells the shape of what is filled."""
    if (event, frame.f_code.co_name) == ("call", "meta_fill_"):
        raise KeyboardInterrupt


@on_fake_device()
def test_an_interrupt_inside_an_operator_is_not_lost(fake: FakeDevice) -> None:
    x = torch.ones(4, device="cuda")
    sys.settrace(interrupted_in_shapes)
    with pytest.raises(KeyboardInterrupt):
        x.fill_(2.0)
    assert sys.gettrace() is None, "so it came"
    assert x.fill_(3.0).tolist() == [3.0] * 4
    assert not fake.races()


@on_fake_device()
def test_which_call_fails(fake: FakeDevice) -> None:
    library = driver()
    count = ctypes.byref(ctypes.c_int())
    answers = lambda calls: [library.cuDeviceGetCount(count) for _ in range(calls)]  # noqa: E731
    fake.fail("cuDeviceGetCount", 7, nth=3)
    assert answers(4) == [0, 0, 7, 0]
    fake.fail("cuDeviceGetCount", 8, nth=None)
    assert answers(3) == [8, 8, 8]
    fake.recover()
    assert answers(2) == [0, 0]
    before = fake.calls()["cuDeviceGetCount"]
    assert answers(5) == [0] * 5
    assert fake.calls()["cuDeviceGetCount"] == before + 5
    for name in ("cuNothingOfThatName", "cudaGetLastError"):
        with pytest.raises(ValueError, match=f"no {name} that can fail"):
            fake.fail(name)


@on_fake_device()
def test_failure_that_lasts(fake: FakeDevice) -> None:
    tensor = torch.ones(8, device="cuda")
    torch.cuda.synchronize()  # what has not run by then does not run any more
    fake.fail("cudaMemcpyAsync", LAUNCH_FAILED, lasts=True)
    for _ in range(2):
        with raises("LAUNCH_FAILED", "the test made cudaMemcpyAsync fail"):
            tensor.cpu()
    with raises("the test made cudaMemcpyAsync fail"):
        torch.cuda.synchronize()
    with raises("the test made cudaMemcpyAsync fail"):
        tensor + 1
    fake.recover()
    clear_error()
    assert tensor.cpu().eq(1).all()


def some_bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cuda")


def timed() -> float:
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    second.synchronize()
    return first.elapsed_time(second)


def registered() -> None:
    memory = torch.empty(8192)
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), 4096, 0))
    runtime.cudaHostUnregister(memory.data_ptr())


def freed() -> None:
    some_bytes(50 << 20)
    torch.cuda.empty_cache()


def captured() -> None:
    tensor = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    graph.replay()


BY_TORCH: dict[Callable[[], object], str] = {
    lambda: some_bytes(50 << 20): "cudaGetDevice cudaMalloc cuMemAlloc_v2",
    lambda: torch.empty(9 << 20, pin_memory=True): "cudaHostAlloc cuMemHostAlloc",
    lambda: some_bytes(8).add_(1): "cudaLaunchKernel",
    lambda: some_bytes(8).cpu(): "cudaMemcpyAsync cuMemcpyAsync cudaStreamSynchronize",
    lambda: torch.ones(8).cuda(): "cuStreamSynchronize",
    lambda: torch.cuda.Event().record(): "cudaEventCreateWithFlags cuEventCreate",
    lambda: torch.cuda.Event().record(): "cudaEventRecordWithFlags cuEventRecordWithFlags",
    lambda: torch.cuda.current_stream().query(): "cudaStreamQuery cuStreamQuery",
    lambda: torch.cuda.current_stream().synchronize(): "cudaStreamSynchronize",
    lambda: torch.cuda.current_stream().wait_event(
        torch.cuda.current_stream().record_event()
    ): "cudaStreamWaitEvent cuStreamWaitEvent",
    timed: "cudaEventSynchronize cuEventSynchronize cudaEventElapsedTime cuEventElapsedTime_v2",
    torch.cuda.synchronize: "cudaDeviceSynchronize cuCtxSynchronize",
    torch.cuda.mem_get_info: "cudaMemGetInfo cuMemGetInfo_v2",
    registered: "cudaHostRegister cuMemHostRegister_v2",
    freed: "cudaFree cuMemFree_v2",
    captured: "cudaStreamBeginCapture cudaGraphInstantiateWithFlags cuGraphLaunch",
}


@on_fake_device()
def test_torch_raises_what_fails(fake: FakeDevice) -> None:
    """The exception names the function, and after it the same call goes well."""
    for function, symbols in BY_TORCH.items():
        for symbol in symbols.split():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()
            fake.fail(symbol, LAUNCH_FAILED)
            with raises("CUDA_ERROR_LAUNCH_FAILED", f"the test made {symbol} fail"):
                function()
            fake.recover()
            clear_error()
            function()


@on_fake_device(memory_bytes=64 << 20)
def test_memory_that_runs_out(fake: FakeDevice) -> None:
    some_bytes(40 << 20)
    for _ in range(2):
        with raises("CUDA out of memory"):
            some_bytes(80 << 20)
        fake.fail("cudaMalloc", OUT_OF_MEMORY, nth=None)
        with raises("CUDA out of memory"):
            some_bytes(50 << 20)
        fake.recover()
        torch.cuda.empty_cache()
        some_bytes(60 << 20)


def step() -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4)).cuda()
    model(torch.randn(8, 16).pin_memory().to("cuda", non_blocking=True)).sum().backward()
    return [weight.grad.cpu() for weight in model.parameters()]


@on_fake_device()
def test_training_after_a_failure(fake: FakeDevice) -> None:
    """Whichever call of a step fails: it raises, or the gradients are right; the next one is."""
    plain = step()
    before = fake.calls()
    step()
    called = [name for name in can_fail() if fake.calls()[name] > before[name]]
    assert len(called) > 15
    raised = set()
    for symbol in called:
        for nth in (1, 2, None):
            fake.fail(symbol, LAUNCH_FAILED, nth=nth)
            try:
                assert all(map(torch.equal, plain, step())), symbol
            except RuntimeError as error:
                assert symbol in str(error), (symbol, error)  # noqa: PT017 - there is no pytest
                raised.add(symbol)
            fake.recover()
            clear_error()
            assert all(map(torch.equal, plain, step())), symbol
    assert {"cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"} <= raised, raised


# Errors of kernels


@on_fake_device()
def test_operator_that_is_given_garbage(fake: FakeDevice) -> None:
    words = ("CUDA_ERROR_ASSERT", "aten::index_select failed on its stream", "out of range")
    index = torch.tensor([1, 1 << 40], device="cuda")
    weight = torch.ones(4, 4, device="cuda")
    torch.embedding(weight, index)
    for _ in range(2):
        with raises(*words):
            torch.cuda.synchronize()
    with raises(*words):
        weight.cpu()
    fake.recover()
    clear_error()
    assert weight.cpu().eq(1).all()


@on_fake_device()
def test_operator_that_touches_what_is_not_there(fake: FakeDevice) -> None:
    index = torch.tensor([1 << 40], device="cuda")
    weight = torch.ones(4, 4, device="cuda")
    out = torch.empty(9, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    torch._convert_indices_from_coo_to_csr(index, 8, out=out)  # writes until the index
    with raises("CUDA_ERROR_ILLEGAL_ADDRESS", "aten::_convert_indices_from_coo_to_csr failed"):
        torch.cuda.synchronize()
    fake.recover()
    clear_error()
    assert weight.add(1).cpu().eq(2).all()


@on_fake_device()
def test_memory_is_between_guards(fake: FakeDevice) -> None:
    """Where kernels reach it, there is nobody next to it whom they could hit."""
    kept = torch.ones(4, device="cuda")
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    guards = [span.split("-") for span, access, *_ in maps if access.startswith("---")]
    found = [
        span.split("-")
        for span, access, *_, name in maps
        if access == "rw-s" and "memory of the fake device" in name and "pinned" not in name
    ]
    assert found
    for begin, end in found:
        assert begin in {guard_end for _, guard_end in guards}
        assert end in {guard_begin for guard_begin, _ in guards}
    del kept


# The host where it must not be


def reads(fake: FakeDevice, is_freed: bool) -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    address = tensor.data_ptr()
    if is_freed:
        del tensor
        torch.cuda.empty_cache()
    ctypes.string_at(address + 16, 4)


def writes(fake: FakeDevice) -> None:
    ctypes.memset(torch.ones(4, device="cuda").data_ptr(), 0, 4)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (
            reads,
            {"is_freed": False},
            r"the host reads memory of a device, byte 16 of \d+ on device 0",
        ),
        (reads, {"is_freed": True}, "the host reads memory of a device that was freed"),
        (writes, {}, r"the host writes to memory of a device, byte \d+ of \d+ on device 0"),
    ],
)
def test_host_that_touches_memory_of_the_device(
    function: Callable[..., None], arguments: dict[str, bool], words: str
) -> None:
    done = child(function, **arguments)
    assert done.returncode == -signal.SIGSEGV, done
    assert re.search(f"fake device: {words}", done.stderr), done.stderr
    assert f"in {function.__name__}" in done.stderr  # where in Python


@on_fake_device()
def test_system_call_on_memory_of_the_device(fake: FakeDevice) -> None:
    tensor = torch.ones(4, device="cuda")
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/dev/zero", "rb") as zero:
        assert libc.read(zero.fileno(), ctypes.c_void_p(tensor.data_ptr()), 16) == -1
        assert os.strerror(ctypes.get_errno()) == "Bad address"
    assert tensor.cpu().eq(1).all()


# Waits


def waits_for_what_is_held(fake: FakeDevice) -> None:
    tensor = torch.ones(4, device="cuda")
    fake.hold("kernels", torch.cuda.Stream())
    tensor.add_(1)
    torch.cuda.synchronize()


def test_wait_that_does_not_end() -> None:
    done = child(waits_for_what_is_held, {"patience_s": 1})
    assert done.returncode == -signal.SIGABRT, done
    assert "cuCtxSynchronize waited for 1 s, and the device did not get there" in done.stderr
    assert "(held by the test: kernels, stream " in done.stderr


def ends_with_work_under_way(fake: FakeDevice) -> None:
    fake.hold("kernels")
    torch.ones(4, device="cuda").add_(1)
    sys.exit(0)


def test_process_that_ends_with_work_under_way() -> None:
    done = child(ends_with_work_under_way)
    assert done.returncode == 0, done


@on_fake_device()
def test_waits_with_the_interpreters_lock(fake: FakeDevice) -> None:
    tensor = torch.ones(4, device="cuda")
    fake.hold("kernels")
    tensor.add_(1)
    release = threading.Timer(0.05, fake.release)
    release.start()
    torch.cuda.synchronize()  # lets go of the lock, else nobody could release it
    assert not fake.waits_with_gil()
    fake.lag(300_000)
    for _ in range(3):
        tensor.add_(1)
    assert ctypes.PyDLL(None).cuCtxSynchronize() == 0  # keeps it
    assert fake.waits_with_gil() == {"cuCtxSynchronize": 1}


# Other processes, other functions


@on_fake_device()
def test_forked_child_cannot_use_the_device(fake: FakeDevice) -> None:
    source, target = torch.ones(4, device="cuda"), torch.zeros(4).pin_memory()
    target.copy_(source, non_blocking=True)
    with tempfile.TemporaryFile(dir=SCRATCH) as file:
        process = os.fork()
        if not process:
            # What the parent must not touch now is open here.
            assert os.pwrite(file.fileno(), target.numpy(), 0) == 16
            os._exit(driver().cuCtxSynchronize())
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == NOT_INITIALIZED
    torch.cuda.synchronize()


def calls_what_is_missing(fake: FakeDevice) -> None:
    library = driver()
    for _ in range(2):
        assert library.cudaMallocAsync(None, 8, None) == NOT_SUPPORTED
        assert library.cuMemCreate(None, 8, None, 0) == NOT_SUPPORTED
    assert fake.refused() == {"cudaMallocAsync": 2, "cuMemCreate": 2}


def test_function_that_the_fake_lacks() -> None:
    done = child(calls_what_is_missing)
    assert done.returncode == 1, done
    assert done.stderr.count("fake device: cudaMallocAsync was called, which the fake does") == 1
    assert "not device.refused()" in done.stderr
