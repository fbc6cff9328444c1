"""Where things lie in this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
LONG = TESTS / "long"
FAKE_DEVICE = TESTS / "fake_device"
BENCHES = ROOT / "benches"

SCRATCH = ROOT / "target" / "tmp"
"""Where test folders lie: /tmp is memory on many machines, and a store refuses memory."""

SCRATCH.mkdir(parents=True, exist_ok=True)
