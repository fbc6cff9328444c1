"""``ssdtrain.offload()`` without a directory opens and writes nothing, and changes no bit."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from children import forked_python
from support import Result, assert_equal_bits, gradients

STEPS = 4


def trained(model: nn.Module) -> Result:
    """Return the gradients of some steps, each on the sum of those before."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        model(torch.randn(1024, 256)).square().mean().backward()
    return gradients(model)


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout())


def test_gradients_are_those_of_plain_autograd_and_all_is_kept() -> None:
    plain = trained(made())
    with ssdtrain.offload(rematerialize="never") as session:
        assert_equal_bits(trained(made()), plain)
    stats = session.stats
    assert stats.bytes_kept == STEPS * stats.saved_bytes_peak > 8 << 20
    assert stats.bytes_eligible > stats.bytes_kept / 2
    assert stats.tensors_offloaded == stats.tensors_forwarded == 0
    assert stats.bytes_written == stats.write_failed_count == stats.write_refused_count == 0
    assert stats.engines == ()
    assert stats.limit == "compute"
    report = str(session)
    assert "hardly anything was gained" in report
    assert "\n  disks      none, so nothing is written\n" in report
    assert stats.reason is not None
    assert stats.reason.startswith("no directory was given, so nothing is written")
    assert stats.is_surprising


def test_saved_tensors_are_made_again_and_nothing_is_written() -> None:
    plain = trained(made())
    with ssdtrain.offload(rematerialize="always") as session:
        assert_equal_bits(trained(made()), plain)
    assert session.stats.bytes_rematerialized > 0
    assert session.stats.bytes_written == 0


def test_the_log_tells_it_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssdtrain"), ssdtrain.offload(rematerialize="never"):
        trained(made())
    first, *others, last = caplog.messages
    assert first == "ssdtrain has no directory here, so it writes nothing"
    assert others == ["nothing is written, because no directory was given"]
    assert last.startswith("ssdtrain offloaded little or nothing: no directory was given")


PROGRAM = """
import os, signal, torch, ssdtrain
def held():
    return sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
def step():
    x = torch.ones(100_000, requires_grad=True)
    (x.sin() * x.cos()).sum().backward()
    return x.grad.clone()
torch.set_num_threads(1)
plain, before = step(), held()
with ssdtrain.offload() as session:
    assert torch.equal(step(), plain)
    assert held() == before, (held(), before)
    graph = (torch.ones(100_000, requires_grad=True) * 2).sin().sum()
    child = os.fork()
    if not child:
        signal.alarm(10)
        graph.backward()
        assert torch.equal(step(), plain)
        assert "none, so nothing is written" in str(session)
        session.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
graph.backward()
"""


def test_no_file_and_no_thread_is_added_and_a_forked_child_trains() -> None:
    done = forked_python(PROGRAM)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_resident_bytes": "1GiB"}, "max_resident_bytes needs a directory"),
        ({"max_disk_bytes": 5}, "max_disk_bytes needs a directory"),
        ({"backend": "psync"}, "backend needs a directory"),
        ({"direct_io": "optional"}, "direct_io needs a directory"),
        ({"gds": "required"}, "gds='required' needs a directory"),
        ({"verify": True, "backend": "psync"}, "backend and verify need a directory"),
    ],
)
def test_options_of_disks_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ssdtrain.ConfigError, match=rf"^{words}: ssdtrain.offload\(dir, \.\.\.\)"):
        ssdtrain.offload(**options)


def test_others_cannot_share_its_store_and_take_their_own(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    with ssdtrain.offload() as session:
        with pytest.raises(ssdtrain.ConfigError, match="no directory, and weights would need"):
            ssdtrain.offload_parameters(model, session)
        with pytest.raises(ssdtrain.ConfigError, match="pass a directory here"):
            ssdtrain.offload_optimizer(optimizer, session)
        ssdtrain.offload_optimizer(optimizer, tmp_path)
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
    assert session.stats.classes == ()


def test_an_object_without_a_directory_shows_and_copies_its_options() -> None:
    tool = ssdtrain.offload(max_host_bytes=1 << 20)
    assert repr(tool) == repr(pickle.loads(pickle.dumps(tool)))
    assert repr(tool) == "ssdtrain.offload(max_host_bytes=1048576)"
    assert repr(ssdtrain.offload(None)) == "ssdtrain.offload()"
