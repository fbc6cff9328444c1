"""Step of `benches/gpu_check.py`: whether cuFile (GPUDirect Storage) works here, and why not.

*native*: a drive moved the bytes of a GPU past the CPU's memory, as far as cuFile tells; nvidia-fs
counts them where it is loaded. *compatibility*: cuFile runs, but copies through the CPU, which the
sessions of ssdtrain do not use. *absent*: neither works. None of them is a failure.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from gpu_found import Found, run_step, step_parser
from ssdtrain.machine import cufile


def look(_options: argparse.Namespace, folder: Path, found: Found) -> None:
    """Try cuFile without its compatibility mode, and with it if that does not work."""
    gpu = torch.cuda.current_device()
    found.note("library", cufile.find_library())
    before = cufile.direct_bytes()
    native = cufile.try_out(str(folder), gpu)
    after = cufile.direct_bytes()
    compat = None if native.works else cufile.try_out(str(folder), gpu, allows_compat=True)
    if compat is None:
        found.note("cufile", "native", f"native: {native.message}")
    elif compat.works:
        found.note("cufile", "compatibility", f"compatibility ({compat.message}): {native.message}")
    else:
        found.note("cufile", "absent", f"absent: {compat.message}")
    found.figures["native"] = native.message
    found.figures["compatibility"] = None if compat is None else compat.message
    if before is None or after is None:
        found.note("nvidia_fs", None, "counts nothing here")
        return
    written, read = after[0] - before[0], after[1] - before[1]
    told = {"written_bytes": written, "read_bytes": read, "all_bytes": after}
    shown = f"{written >> 20} MiB written, {read >> 20} read while 1 and 1 were tried"
    # Nothing where cuFile goes by the kernel's own peer-to-peer transfers.
    found.note("nvidia_fs", told, shown)


if __name__ == "__main__":
    sys.exit(run_step(look, step_parser(__doc__).parse_args()))
