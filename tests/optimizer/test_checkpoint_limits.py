"""Odd tensors, names and files: a checkpoint gives every bit back, or refuses before any change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import support
from ssdtrain import (
    BusyError,
    ConfigError,
    CorruptError,
    UnsupportedError,
    load,
    offload_parameters,
    save,
)
from ssdtrain.checkpoints.folder import NewFiles
from ssdtrain.checkpoints.manifest import packed
from trained import model

MANIFEST = "manifest.json"


def made(seed: int, name: str = "odd", buffer: Callable[[], Tensor] | None = None) -> nn.Module:
    """A layer with a buffer of this name; other weights for another seed."""
    torch.manual_seed(seed)
    module = nn.Linear(4, 4)
    if buffer is not None:
        module.register_buffer(name, buffer())
    return module


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("conjugated", lambda: torch.randn(5, dtype=torch.complex64).conj()),
        ("negated", lambda: torch._neg_view(torch.randn(5))),
        ("imaginary", lambda: torch.randn(5, dtype=torch.complex64).conj().imag),
        ("my_extra_state", lambda: torch.randn(3)),
    ],
)
def test_every_bit_comes_back(name: str, buffer: Callable[[], Tensor], tmp_path: Path) -> None:
    first, second = made(0, name, buffer), made(1, name, buffer)
    save(tmp_path / "saved", first, extra=getattr(first, name))
    assert not torch.equal(getattr(second, name), getattr(first, name))
    extra = load(tmp_path / "saved", second)
    support.assert_equal_bits(values(second), values(first))
    assert torch.equal(extra, getattr(first, name))


def test_a_loaded_weight_counts_as_changed(tmp_path: Path) -> None:
    module = made(0)
    save(tmp_path / "saved", module)
    loss = module(torch.randn(2, 4, requires_grad=True)).sum()
    load(tmp_path / "saved", module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return made(1)


def test_load_refuses_a_model_of_inference_mode(tmp_path: Path) -> None:
    save(tmp_path / "saved", made(0))
    module = in_inference_mode()
    before = values(module)
    with pytest.raises(UnsupportedError, match=r"weight: .* torch\.inference_mode"):
        load(tmp_path / "saved", module)
    support.assert_equal_bits(values(module), before)


def test_save_refuses_a_buffer_into_which_nothing_can_be_loaded(tmp_path: Path) -> None:
    module = made(0, "odd", lambda: torch.randn(1).expand(10))
    with pytest.raises(UnsupportedError, match="odd cannot be saved or loaded: several of its"):
        save(tmp_path / "saved", module)
    assert os.listdir(tmp_path) == []


def test_what_could_not_be_given_back_is_not_saved(tmp_path: Path) -> None:
    module = made(0)
    module._register_state_dict_hook(lambda _m, found, prefix, _l: found.update({prefix + "v": 3}))
    with pytest.raises(UnsupportedError, match=r"v in the state_dict.* int that a hook"):
        save(tmp_path / "saved", module)
    with pytest.raises(UnsupportedError, match="extra is no plain dense tensor"):
        save(tmp_path / "saved", made(0), extra=torch.zeros(2, device="meta"))
    assert os.listdir(tmp_path) == []


def test_a_model_on_meta_is_told_what_gives_it_bytes(tmp_path: Path) -> None:
    whole = model()
    save(tmp_path / "saved", whole)
    with torch.device("meta"):
        without = model()
    with pytest.raises(UnsupportedError, match=r"0\.weight .*meta.*offload_parameters.*to_empty"):
        load(tmp_path / "saved", without)
    offload_parameters(without, tmp_path)
    load(tmp_path / "saved", without)
    support.assert_equal_bits(without.state_dict(), whole.state_dict())


def test_two_saves_that_begin_before_the_folder_exists(tmp_path: Path) -> None:
    """The second one neither takes files of the first one away, nor loses its own."""
    folder = tmp_path / "saved"
    first, second = NewFiles(folder), NewFiles(folder)
    with first:
        name = first.create("weights", 1)[1]
        with second:
            second.create("weights", 1)
            first.commit(name.encode())
            with pytest.raises(BusyError, match="another process saves into"):
                second.commit(b"")
        assert (folder / MANIFEST).read_bytes() == name.encode()
    assert sorted(os.listdir(folder)) == [MANIFEST, name]


def test_a_save_takes_its_turn_after_one_that_made_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    module = made(1)
    with NewFiles(folder) as late:
        name = late.create("weights", 1)[1]
        save(folder, module)
        late.commit(name.encode())
        with pytest.raises(BusyError, match="another process saves into"):
            save(folder, module)
    assert sorted(os.listdir(folder)) == [MANIFEST, name]


def forge(folder: Path, name: str) -> None:
    """Let the manifest, with a checksum that fits, name another file."""
    manifest = folder / MANIFEST
    content = json.loads(manifest.read_text())
    (own,) = content["files"]
    content = json.loads(manifest.read_text().replace(own, name))
    for key in ("format", "version", "crc32"):
        del content[key]
    manifest.write_bytes(packed(content))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "weights.safetensors"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save(folder, made(0))
    (weights,) = folder.glob("weights-*")
    (tmp_path / "outside").write_bytes(weights.read_bytes())
    forge(folder, name)
    module = made(1)
    before = values(module)
    with pytest.raises(CorruptError, match="which is no file of a checkpoint"):
        load(folder, module)
    support.assert_equal_bits(values(module), before)
    assert weights.exists(), "what is not understood is not removed"


@pytest.mark.parametrize("which", ["weights-*", MANIFEST])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
def test_no_file_in_the_place_of_a_file(which: str, put: Any, tmp_path: Path) -> None:
    """To open a pipe that nobody writes into would wait for ever."""
    folder = tmp_path / "saved"
    save(folder, made(0))
    (path,) = folder.glob(which)
    path.unlink()
    put(path)
    with pytest.raises(CorruptError, match="is no file but something else"):
        load(folder, made(1))


def test_places_where_nothing_can_be_saved(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="is a link to nowhere, which is not there"):
        save(tmp_path / "link", made(0))
    (tmp_path / "odd" / MANIFEST).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"manifest\.json is a folder"):
        save(tmp_path / "odd", made(0))
    assert os.listdir(tmp_path / "odd") == [MANIFEST]
