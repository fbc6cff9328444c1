"""The callback of Lightning with both of its packages: equal bits, and nothing stays on."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ssdtrain
from ssdtrain.machine.torch_internals import top_hooks
from support import assert_equal_bits, nothing_leaks

# Lightning 2.6 uses what torch 2.15 gave up.
pytestmark = pytest.mark.filterwarnings("default")
pl = importlib.import_module("lightning.pytorch")
other_package = importlib.import_module("pytorch_lightning")
OffloadCallback: Any = importlib.import_module("ssdtrain.integrations.lightning").OffloadCallback

PACKAGES = pytest.mark.parametrize("package", [pl, other_package], ids=lambda one: one.__name__)
BATCHES = 4
EVENTS = (
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
)
