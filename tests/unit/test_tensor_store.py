"""``ssdtrain.TensorStore``: what is written comes back, in kind and bit for bit, or an error."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from children import forked_python
from ssdtrain import ConfigError, CorruptError, StorageError, TensorStore
from ssdtrain.errors import ClosedError, SsdtrainError
from stores import SlowStore, assert_same
from support import shared_out, wait_until

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
RECORD = np.dtype([("name", "S5"), ("place", ">i2", (3,)), ("weight", "f8")])
NUMPY_DTYPES = [
    *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    *(">i4", ">f8", "g", "M8[ns]", "m8[s]", "S7", "U3", "V9"),
    RECORD,
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    with TensorStore(tmp_path) as opened:
        yield opened


def random_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor of random bytes, NaNs of every kind included."""
    empty = torch.empty(shape, dtype=dtype)
    count = empty.numel() * empty.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def random_array(dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3 == 0)
    if dtype.kind == "U":
        # Random bytes are no characters.
        return np.resize(np.array(["a", "üß", "xyz"], dtype), shape)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def round_trip(store: TensorStore, source: Any) -> Any:
    stored = store.write(source)
    assert stored.nbytes == source.nbytes
    stored.wait()
    assert stored.done()
    result = store.read(stored).result()
    assert_same(result, source)
    return result


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype(store: TensorStore, dtype: torch.dtype) -> None:
    for shape in ((), (3, 7, 11), (9_001,)):
        round_trip(store, random_tensor(dtype, *shape))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_every_numpy_dtype(store: TensorStore, dtype: Any) -> None:
    for shape in ((), (3, 7, 11), (9_001,)):
        round_trip(store, random_array(dtype, *shape))


BASE = torch.arange(12 * 10 * 6, dtype=torch.float32).reshape(12, 10, 6)
VIEWS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "empty with strides": lambda: torch.empty_strided((3, 0, 2), (5, 7, 1)),
    "slice": lambda: BASE[3:9, 1::2, 2:5],
    "single": lambda: BASE[5, 5, 5],
    "transposed": lambda: BASE.transpose(0, 2),
    "permuted": lambda: BASE.permute(1, 2, 0),
    "expanded": lambda: BASE[:, :1].expand(12, 10, 6),
    "overlapping": lambda: BASE.as_strided((8, 8), (1, 2), 3),
    "conjugated": lambda: torch.randn(7, 3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.randn(3, 5)),
    "of a parameter": torch.nn.Linear(5, 3).weight.t,
    "with a graph": lambda: torch.ones(3, requires_grad=True).exp(),
    "inference": torch.inference_mode()(lambda: torch.randn(5)),
    "channels last": lambda: torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last),
    "odd address": lambda: torch.arange(99, dtype=torch.uint8)[1:],
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_torch_views_keep_their_strides(store: TensorStore, make: Callable[[], Tensor]) -> None:
    round_trip(store, make().detach())


def test_a_parameter_comes_back_as_a_plain_tensor(store: TensorStore) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 3))
    result = store.read(store.write(parameter)).result()
    assert type(result) is Tensor
    assert_same(result, parameter.detach())


ARRAY = np.arange(12 * 10 * 6, dtype=np.float64).reshape(12, 10, 6)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "empty": np.empty((0, 4)),
    "no bytes per item": np.zeros(3, "V0"),
    "slice": ARRAY[3:9, 1::2, 2:5],
    "reversed": ARRAY[::-1, :, ::-2],
    "reversed single": np.arange(6)[:1][::-1],
    "transposed": ARRAY.T,
    "fortran": np.asfortranarray(ARRAY),
    "broadcast": np.broadcast_to(ARRAY[0, 0], (4, 6)),
    "far strides of one": np.lib.stride_tricks.as_strided(ARRAY[0, 0], (1, 6), (-(1 << 40), 8)),
    "unaligned": np.zeros(17, np.uint8)[1:9].view("f8"),
    "field of records": np.resize(np.arange(99, dtype=np.uint8), 40 * 19).view(RECORD)["weight"],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_views(store: TensorStore, name: str) -> None:
    round_trip(store, ARRAYS[name])


DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128])


@st.composite
def torch_views(draw: st.DrawFn) -> Tensor:
    """Draw a tensor, sliced, permuted and expanded at random."""
    shape = draw(st.lists(st.integers(0, 40), max_size=4))
    tensor = random_tensor(draw(DTYPES), *shape)
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        tensor = tensor[(slice(None),) * dim + (slice(start, stop, draw(st.integers(1, 3))),)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    return tensor


@st.composite
def numpy_views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Draw an array, sliced (backwards, too) and transposed at random."""
    shape = draw(st.lists(st.integers(0, 30), max_size=4))
    array = random_array(draw(st.sampled_from(NUMPY_DTYPES)), *shape)
    steps = st.sampled_from([-3, -2, -1, 1, 2, 3])
    array = array[(*(slice(None, None, draw(steps)) for _ in shape), ...)]
    return array.transpose(draw(st.permutations(range(array.ndim))))


@pytest.mark.parametrize("verify", shared_out([False, True], quick=[True]))
def test_any_view_comes_back(tmp_path: Path, verify: bool) -> None:
    with TensorStore(tmp_path, verify=verify) as store:

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.one_of(torch_views(), numpy_views()), min_size=1, max_size=5))
        def check(sources: list[Any]) -> None:
            pending = [store.read(store.write(source)) for source in sources]
            for one, source in zip(reversed(pending), reversed(sources), strict=True):
                assert_same(one.result(), source)

        check()
        del check
        gc.collect()
        assert store.stats()["disk_used_bytes"] == 0


def test_the_result_is_its_own(store: TensorStore) -> None:
    source = torch.randn(5000)
    expected = source.clone()
    stored = store.write(source)
    stored.wait()
    source.zero_()
    first, second = store.read(stored).result(), store.read(stored).result()
    first.fill_(7)
    assert torch.equal(second, expected)
    assert torch.equal(store.read(stored).result(), expected)
    array = np.arange(3000.0)
    kept = store.write(array)
    kept.wait()
    array[:] = 0
    result = store.read(kept).result()
    result += 1
    assert np.array_equal(store.read(kept).result(), np.arange(3000.0))


def test_a_result_is_made_once(store: TensorStore) -> None:
    pending = store.read(store.write(torch.ones(5)))
    assert pending.result() is pending.result()
    assert pending.done()


def test_write_returns_before_the_disk_has_moved(tmp_path: Path) -> None:
    with SlowStore(tmp_path, paused=True) as store:
        source = torch.randn(1000)
        stored = store.write(source)
        pending = store.read(stored)
        assert not stored.done()
        assert not pending.done()
        store.disk.resume()
        assert_same(pending.result(), source)
        assert stored.done()


def test_the_source_lives_until_the_write_has_ended(tmp_path: Path) -> None:
    with SlowStore(tmp_path, paused=True) as store:
        source, expected = torch.full((5000,), 3.5), torch.full((5000,), 3.5)
        alive = weakref.ref(source.untyped_storage())
        stored = store.write(source)
        del source
        gc.collect()
        assert alive() is not None
        store.disk.resume()
        stored.wait()
        assert torch.equal(store.read(stored).result(), expected)
        store.stats()
        gc.collect()
        assert alive() is None


def test_wait_and_result_raise_what_went_wrong(tmp_path: Path) -> None:
    with SlowStore(tmp_path, io_error_rate=1.0) as store:
        stored = store.write(torch.ones(1000))
        for _ in range(2):
            with pytest.raises(StorageError, match="Input/output error") as caught:
                stored.wait()
            assert caught.value.errno == 5
        assert stored.done()
        with pytest.raises(StorageError):
            store.read(stored)


def test_a_read_begun_before_its_write_failed_raises(tmp_path: Path) -> None:
    with SlowStore(tmp_path, paused=True, io_error_rate=1.0) as store:
        pending = store.read(store.write(torch.ones(1000)))
        store.disk.resume()
        with pytest.raises(StorageError, match="Input/output error"):
            pending.result()


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    for verify in (False, True):
        store = SlowStore(tmp_path, verify=verify, seed=3, bit_flip_rate=1.0)
        # Whole blocks at a page's start, so that the flipped bit is one of the tensor's.
        source = np.frombuffer(bytearray(3 * 4096), np.uint8)
        source = source[-source.ctypes.data % 4096 :][:4096]
        pending = store.read(store.write(source))
        if verify:
            with pytest.raises(CorruptError, match="came back changed"):
                pending.result()
        else:
            assert not np.array_equal(pending.result(), source)
        store.close()


def test_release_gives_the_space_back(store: TensorStore) -> None:
    stored = store.write(torch.ones(100_000))
    stored.wait()
    assert store.stats()["disk_used_bytes"] >= 400_000
    store.release(stored)
    assert store.stats()["disk_used_bytes"] == 0
    store.release(stored)
    for use in (stored.wait, lambda: store.read(stored)):
        with pytest.raises(ClosedError, match="was released; write it again"):
            use()


def test_the_death_of_stored_gives_the_space_back(store: TensorStore) -> None:
    stored = store.write(torch.ones(100_000))
    stored.wait()
    del stored
    assert store.stats()["disk_used_bytes"] == 0
    assert store.stats()["arena_live_bytes"] == 0


def test_release_during_a_read_that_waits_for_its_write(tmp_path: Path) -> None:
    with SlowStore(tmp_path, paused=True) as store:
        stored = store.write(torch.ones(1000))
        pending = store.read(stored)
        store.release(stored)
        store.disk.resume()
        with pytest.raises(ClosedError):
            pending.result()
        wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the space comes back")


def test_release_during_a_read_keeps_its_bytes_apart(store: TensorStore) -> None:
    stored = store.write(torch.randn(3_000_000))
    stored.wait()
    pending = store.read(stored)
    store.release(stored)
    # What is written now must not be what the read still moves, on the disk or in memory.
    sources = [torch.full((3_000_000,), float(index)) for index in range(4)]
    others = [store.read(store.write(source)) for source in sources]
    with pytest.raises(ClosedError, match="was released"):
        pending.result()
    for other, source in zip(others, sources, strict=True):
        assert torch.equal(other.result(), source)


def test_requests_without_a_wait_leave_nothing(store: TensorStore) -> None:
    for _ in range(50):
        store.read(store.write(torch.ones(200_000)))
    wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the space comes back")
    wait_until(lambda: store.stats()["arena_live_bytes"] == 0, "the memory comes back")


def test_close_twice_and_then_refuse(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    stored = store.write(torch.ones(1000))
    stored.wait()
    store.close()
    store.close()
    for use in (lambda: store.write(torch.ones(5)), lambda: store.read(stored)):
        with pytest.raises(ClosedError, match="closed; open a new one"):
            use()
    assert store.stats()["write_count"] == 1


def test_close_answers_those_who_wait(tmp_path: Path) -> None:
    store = SlowStore(tmp_path, paused=True)
    # Too large to be joined: more of them than the engine has threads, so the last one waits.
    stored = [store.write(torch.ones(1 << 20)) for _ in range(8)]
    raised: list[BaseException] = []
    waiting = threading.Barrier(2)

    def wait() -> None:
        waiting.wait()
        try:
            stored[-1].wait()
        except SsdtrainError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiting.wait()
    store.close()
    waiter.join()
    assert [type(one) for one in raised] == [ClosedError]
    with pytest.raises(ClosedError):
        store.read(stored[-1])


def test_results_outlive_everything(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    tensor, array = torch.randn(100_000), np.arange(100_000)
    tensors = [store.read(store.write(tensor)).result() for _ in range(3)]
    arrays = [store.read(store.write(array)).result() for _ in range(3)]
    view = tensors.pop()[50_000:]
    store.close()
    del store
    gc.collect()
    assert all(torch.equal(one, tensor) for one in tensors)
    assert all(np.array_equal(one, array) for one in arrays)
    assert torch.equal(view, tensor[50_000:])
    tensors[0].add_(1)
    assert torch.equal(tensors[1], tensor)


def test_the_context_closes_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TensorStore(tmp_path) as store:
        raise KeyError
    with pytest.raises(ClosedError):
        store.write(torch.ones(1))


class Tagged(Tensor):
    """A tensor whose bytes do not say everything."""


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(5)


def ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(5, device="meta"), r"only CPU tensors .* not meta"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"only dense tensors .*to_dense\(\)"),
    "nested": (ragged, "only dense tensors"),
    "objects": (lambda: np.array([{}, "a"], object), "an array of Python objects"),
    "records of objects": (lambda: np.zeros(2, [("a", "O")]), "an array of Python objects"),
    "list": (lambda: [1.0, 2.0], "only torch tensors and numpy arrays .* 'list'"),
    "bytes": (lambda: b"abc", "only torch tensors and numpy arrays .* 'bytes'"),
    "numpy scalar": (lambda: np.float64(3), "only torch tensors and numpy arrays"),
    # Their bytes do not say everything: what came back would be something else.
    "masked array": (lambda: np.ma.masked_array([1, 2, 3], [0, 1, 0]), "MaskedArray"),
    "tensor subclass": (lambda: torch.ones(3).as_subclass(Tagged), "Tagged"),
    "fake tensor": (fake, "FakeTensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(store: TensorStore, name: str) -> None:
    make, message = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = make()
    with pytest.raises(ConfigError, match=message):
        store.write(source)
    assert store.stats()["disk_used_bytes"] == 0


def test_another_stores_tensor_is_refused(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    two = TensorStore([tmp_path / "a", tmp_path / "b"])
    one = TensorStore(tmp_path / "c")
    with two, one:
        stored = [two.write(torch.ones(10)) for _ in range(4)]
        for other in stored:
            other.wait()
            with pytest.raises(ConfigError, match="another store"):
                one.read(other).result()


def test_many_wait_for_one_write(tmp_path: Path) -> None:
    with SlowStore(tmp_path, paused=True) as store:
        source = torch.randn(1000)
        stored = store.write(source)
        results: list[Tensor] = []
        threads = [
            threading.Thread(target=lambda: results.append(store.read(stored).result()))
            for _ in range(6)
        ]
        for one in threads:
            one.start()
        store.disk.resume()
        for one in threads:
            one.join()
        assert len(results) == 6
        assert all(torch.equal(one, source) for one in results)


EXIT = """
import sys, torch, ssdtrain
store = ssdtrain.TensorStore(sys.argv[1])
sources = [torch.full((1 << 20,), float(index)) for index in range(64)]
stored = [store.write(source) for source in sources]
stored[0].wait()
pending = [store.read(one) for one in stored]
if sys.argv[2] == "thread":
    import threading
    # Not `result`: Python ends a daemon thread in the middle of torch's functions, and C++ aborts.
    threading.Thread(target=stored[-1].wait, daemon=True).start()
print(len(stored))
"""


@pytest.mark.parametrize("waiting", ["nobody", "thread"])
def test_exit_with_requests_in_flight(tmp_path: Path, waiting: str) -> None:
    done = forked_python(EXIT, str(tmp_path), waiting)
    assert (done.returncode, done.stdout, done.stderr) == (0, "64\n", "")
    assert not list(tmp_path.iterdir())


FORK = """
import os, sys, torch, ssdtrain
from ssdtrain.errors import ClosedError
store = ssdtrain.TensorStore(sys.argv[1])
stored = store.write(torch.arange(5000))
stored.wait()
result = store.read(stored).result()
child = os.fork()
if child == 0:
    for use in (lambda: store.write(torch.ones(3)), lambda: store.read(stored)):
        try:
            use()
        except ClosedError as error:
            assert "a forked process must open its own" in str(error), error
        else:
            sys.exit("the store of the parent worked in its child")
    assert torch.equal(result, torch.arange(5000))
    store.close()
    del stored, store
    with ssdtrain.TensorStore(sys.argv[1]) as own:
        assert torch.equal(own.read(own.write(torch.ones(9))).result(), torch.ones(9))
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert torch.equal(store.read(stored).result(), torch.arange(5000))
assert torch.equal(store.read(store.write(torch.ones(9))).result(), torch.ones(9))
store.close()
print("parent goes on")
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    done = forked_python(FORK, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "parent goes on\n"
