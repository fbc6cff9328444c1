"""Modes of torch that are on when a tensor of a GPU is seen first."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fake_device import FakeDevice
from offloading import chain, check, made, offloaded, settle
from on_fake import on_fake_device


class OnTheMeta(TorchDispatchMode):
    """Gives each new tensor no bytes, as a program may that only asks for shapes."""

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        keywords = dict(keywords or {})
        if operator._schema.name == "aten::empty":
            keywords["device"] = "meta"
        return operator(*arguments, **keywords)


MODES = {
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "user": OnTheMeta,
}


@pytest.mark.parametrize("mode", MODES)
@on_fake_device()
def test_a_mode_that_is_on_at_the_first_look_changes_nothing_later(
    fake: FakeDevice, mode: str
) -> None:
    leaf = made(0)
    with offloaded() as session:
        seen = leaf * 1.01
        with MODES[mode]():
            torch.sin(seen)
        saved = chain(leaf, 8)
        settle(session)
        assert session.stats.bytes_written >= 7 * leaf.nbytes
        saved.sum().backward()
    check(leaf, 8)
