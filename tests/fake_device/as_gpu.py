"""Runs a program of Python as on a machine with a GPU: the fake device stands in for it.

    PYTHON tests/fake_device/as_gpu.py [-P] (SCRIPT | -m MODULE) ARGUMENTS

The process begins with the variables of `fake_build.environment()`. For programs that are meant for
hardware, so that they are known to work when somebody has some.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import fake_device


def main(words: list[str]) -> None:
    """Start the device and run the program."""
    words = [word for number, word in enumerate(words) if number or word != "-P"]
    fake = fake_device.start()
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        # Most programs end by `sys.exit`.
        refused, races = dict(fake.refused()), fake.races()
        if refused or races:
            sys.exit(f"the fake device refused {refused}, or saw races: {races}")


if __name__ == "__main__":
    main(sys.argv[1:])
