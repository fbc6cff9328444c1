"""Optimizers and models that name the same directories share one store; its last user closes it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW

import support
from children import forked_python
from ssdtrain import (
    ConfigError,
    TensorStore,
    _core,
    offload_optimizer,
    offload_parameters,
    place,
)
from trained import everything, model, plain_step

COUNT = 20
STEPS = 3
GROWTH_BYTES = 64 << 20
"""A file grows by at least so much."""
STORE_PARTS_MAX = 4
"""A file, a ring and an event; one thread for the ring, or four where the kernel has none."""
Tool = tuple[nn.Module, AdamW]


def tool(directory: Any, **options: Any) -> Tool:
    module = model()
    optimizer = AdamW(module.parameters())
    return module, offload_optimizer(optimizer, directory, buffer_bytes="1MiB", **options)


def store_of(one: Tool) -> TensorStore:
    disk: Any = one[1]._disk  # type: ignore[attr-defined]
    return disk.store  # type: ignore[no-any-return]


def spill_bytes(directory: Path) -> list[int]:
    """Return the size on the disk of each spill file in a directory."""
    return [
        os.fstat(int(entry.name)).st_blocks * 512
        for entry in os.scandir("/proc/self/fd")
        # The descriptor of this look itself is closed by now, or a folder.
        if os.path.islink(entry) and os.readlink(entry).startswith(f"{directory}/")
    ]


def counted() -> tuple[int, int]:
    """Return how many descriptors there are, and threads but for the kernel's own."""
    names = [Path(one.path, "comm").read_text() for one in os.scandir("/proc/self/task")]
    # Workers of a ring, which idle for five seconds.
    ours = [name for name in names if not name.startswith("iou-wrk")]
    return len(os.listdir("/proc/self/fd")), len(ours)


def one_for_each(
    directory: Path | None, *, in_hooks: bool, **options: Any
) -> tuple[list[Parameter], list[AdamW], list[Tensor]]:
    """Train parameters with an optimizer for each, which steps in a gradient hook or in a loop."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(160, 160)) for _ in range(COUNT)]
    optimizers = {param: AdamW([param]) for param in params}
    if directory is not None:
        for optimizer in optimizers.values():
            offload_optimizer(optimizer, directory, buffer_bytes="256KiB", **options)

    def step(param: Tensor) -> None:
        optimizer = optimizers[param]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    hooks = [one.register_post_accumulate_grad_hook(step) for one in params if in_hooks]
    for _ in range(STEPS):
        torch.stack([param.square().sum() for param in params]).sum().backward()
        for param in [] if in_hooks else params:
            step(param)
    for hook in hooks:
        hook.remove()
    found: list[Tensor] = []
    for param in params:
        found += [param.detach().clone(), optimizers[param].state[param]["exp_avg_sq"].clone()]
    return params, list(optimizers.values()), found


@pytest.mark.parametrize("in_hooks", [True, False])
@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_an_optimizer_for_each_parameter(overlap: str, in_hooks: bool, tmp_path: Path) -> None:
    *_, plain = one_for_each(None, in_hooks=in_hooks)
    gc.collect()
    before = counted()
    params, optimizers, found = one_for_each(tmp_path, in_hooks=in_hooks, overlap=overlap)
    assert all(map(torch.equal, found, plain))
    for optimizer in optimizers:
        assert optimizer.offload_stats.written_bytes > 0  # type: ignore[attr-defined]
    (nbytes,) = spill_bytes(tmp_path)
    assert 0 < nbytes <= 2 * GROWTH_BYTES
    grown = [now - then for now, then in zip(counted(), before, strict=True)]
    assert max(grown) <= STORE_PARTS_MAX
    del params, optimizers, optimizer
    gc.collect()
    assert not spill_bytes(tmp_path)


def test_a_user_that_goes_leaves_the_store_to_the_others(tmp_path: Path) -> None:
    plain_module = model()
    plain = plain_module, AdamW(plain_module.parameters())
    staying, leaving = tool(tmp_path), tool(tmp_path)
    weights = offload_parameters(model(), tmp_path)
    assert len(spill_bytes(tmp_path)) == 1
    assert store_of(staying) is store_of(leaving)
    x = torch.randn(8, 160)
    for one in (plain, staying, leaving):
        plain_step(*one, x)
    with torch.no_grad():
        expected = weights(x)
    with pytest.raises(ConfigError, match="offloaded already"):
        offload_optimizer(leaving[1], tmp_path)
    with pytest.raises(ConfigError, match="less than"):
        offload_parameters(model(), tmp_path, max_resident_bytes="1KiB")
    del leaving, one
    gc.collect()
    for one in (plain, staying):
        plain_step(*one, x)
    support.assert_equal_bits(everything(*staying), everything(*plain))
    with torch.no_grad():
        assert torch.equal(weights(x), expected)
    del staying, one
    gc.collect()
    with torch.no_grad():
        assert torch.equal(weights(x), expected)
    assert len(spill_bytes(tmp_path)) == 1
    del weights
    gc.collect()
    assert not spill_bytes(tmp_path)


def test_what_names_the_same_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    first, both = tool("a"), tool(["a", "b"])
    assert store_of(tool(f"{tmp_path}/b/../a/")) is store_of(first)
    assert store_of(tool((tmp_path / "b", tmp_path / "a"))) is store_of(both)
    assert store_of(both) is not store_of(first)
    assert store_of(tool("b")) is not store_of(first)
    verified = tool("a", verify=True)
    assert store_of(verified) is not store_of(first)
    assert store_of(tool("a", verify=True)) is store_of(verified)
    # A bound is one on the bytes of one call.
    bounded = tool("a", max_disk_bytes="1GB")
    assert store_of(tool("a", max_disk_bytes="1GB")) is not store_of(bounded)
    own = TensorStore("a")
    assert store_of(tool(own)) is own
    with pytest.raises(ConfigError, match="is a symbolic link"):
        tool("link")
    with pytest.raises(ConfigError, match="verify must be True or False"):
        tool("a", verify=0)


def test_an_opening_that_fails_leaves_nothing(tmp_path: Path) -> None:
    where = tmp_path / "later"
    with pytest.raises(ConfigError, match="does not exist"):
        tool(where)
    where.mkdir(mode=0o777)
    where.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written to by everyone"):
        tool(where)
    assert not spill_bytes(where)
    where.chmod(0o700)
    one = tool(where)
    assert len(spill_bytes(where)) == 1
    del one


def test_a_store_without_its_directory_is_not_given_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk fails each write, so that it goes out of use."""
    opened = place._open

    def on_a_broken_disk(config: Any) -> TensorStore:
        disk = _core.SimulatedDisk(io_error_rate=1.0)
        return TensorStore.over(
            _core.Store(
                [(one, None) for one in config.dirs],
                backend="simulated",
                direct_io="optional",
                max_disk_bytes=None,
                verify=False,
                simulated_disk=disk,
            )
        )

    monkeypatch.setattr(place, "_open", on_a_broken_disk)
    x = torch.randn(8, 160)
    broken = tool(tmp_path)
    for _ in range(3):
        plain_step(*broken, x)
    assert store_of(broken).has_lost_directories()
    monkeypatch.setattr(place, "_open", opened)
    mended = tool(tmp_path)
    assert store_of(mended) is not store_of(broken)
    assert store_of(tool(tmp_path)) is store_of(mended)
    for _ in range(3):
        plain_step(*mended, x)
    support.assert_equal_bits(everything(*mended), everything(*broken))


FORKED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import torch
from torch.optim import AdamW
import ssdtrain
from trained import model, plain_step
torch.set_num_threads(1)
def train(tool, count=2):
    for number in range(count):
        plain_step(*tool, torch.full((8, 160), 1.0 + number))
    return [param.detach().clone() for param in tool[0].parameters()]
def offloaded():
    module = model()
    return module, ssdtrain.offload_optimizer(AdamW(module.parameters()), sys.argv[1])
plain = model()
plain = train((plain, AdamW(plain.parameters())))
tool = offloaded()
store = tool[1]._disk.store
child = os.fork()
if not child:
    signal.alarm(60)
    own = offloaded()
    assert own[1]._disk.store is not store
    assert all(map(torch.equal, train(own), plain))
    del own, tool
    os._exit(0)
_, status = os.waitpid(child, 0)
print(status, all(map(torch.equal, train(tool), plain)), offloaded()[1]._disk.store is store)
"""


def test_a_forked_process_opens_its_own(tmp_path: Path) -> None:
    done = forked_python(FORKED, str(tmp_path), str(Path(__file__).parent))
    assert (done.stdout, done.returncode) == ("0 True True\n", 0), done.stderr
