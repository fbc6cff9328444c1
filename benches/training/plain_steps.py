"""Steps of the plain program: the demo's model in a process that never imports ssdtrain.

Other benchmarks train in several ways within one process, and compare their steps with these, which
take turns with them. `ssdtrain/demo/without.py` starts this script, with the demo's options. It
answers each line of its input with the seconds of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter

import torch

from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.text import ByteBatches, load_text
from turns import Child, answer


class Program:
    """That process, seen from the parent, which notes the seconds of its steps."""

    def __init__(self, options: TrainingOptions, *, updates: bool = True) -> None:
        words = [__file__, options.to_json(), "updates" if updates else "no updates"]
        self._child = Child("plain", words, is_without=True)
        self.seconds: list[float] = []

    def take(self, *_: object) -> None:
        """Have it take a step, and note its time."""
        self.seconds.append(self._child.ask("step")["seconds"])

    def close(self) -> None:
        """End it."""
        self._child.end()


def prepared(
    options: TrainingOptions, *, updates: bool = True
) -> Callable[[int], Callable[[], None]]:
    """Build the model; return a function that makes the training step of a turn."""
    trainee = build_trainee(options)
    optimizer = torch.optim.SGD(trainee.module.parameters(), lr=1e-3)
    batches = ByteBatches(
        load_text(None), batch=options.batch, sequence=options.sequence, seed=options.seed
    )

    def step_of(turn: int) -> Callable[[], None]:
        text = batches.at(turn)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
                loss = trainee.loss(text)
            loss.backward()  # type: ignore[no-untyped-call]
            if updates:
                optimizer.step()

        return step

    return step_of


def main(words: list[str]) -> None:
    """Answer until the input ends."""
    options, updates = words
    step_of = prepared(TrainingOptions.from_json(options), updates=updates == "updates")
    turn = 0

    def timed(_: str) -> dict[str, float]:
        nonlocal turn
        step, turn = step_of(turn), turn + 1
        began_s = perf_counter()
        step()
        return {"seconds": perf_counter() - began_s}

    answer(timed)


if __name__ == "__main__":
    main(sys.argv[1:])
