"""A script of a trainer's user, unchanged: `ssdtrain run` and launchers around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
BOUND = "256MiB"
"""Holds on a slow disk too; each step saves 750 MiB."""
TRAIN = """
import json
import sys
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import torch

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        n_layer=6, n_embd=384, n_head=6, vocab_size=2048, bos_token_id=None, eos_token_id=None
    )
)
rows = torch.randint(2048, (64, 256), generator=torch.Generator().manual_seed(1))
options = {
    "max_steps": int(sys.argv[1]),
    "per_device_train_batch_size": 8,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
trainer = Trainer(
    model,
    TrainingArguments(output_dir="out", **options),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
START
trainer.train()
history = trainer.state.log_history
found = {
    "losses": [one["loss"] for one in history if "loss" in one],
    "weights": [one.double().sum().item().hex() for one in model.parameters()],
    "peak_bytes": status("VmHWM"),
}
with open(f"found{trainer.args.process_index}.json", "w") as file:
    json.dump(found, file)
"""
PLAIN = TRAIN.replace("START", "")
IMPORT_FIRST = "import ssdtrain\n" + TRAIN.replace(
    "START", f"ssdtrain.offload('.', max_resident_bytes='{BOUND}').__enter__()"
)
OFFLOADED = ("run", "--dir", ".", "--max-resident-bytes", BOUND, "--report", "report.json")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)


def trained(folder: Path, *words: str, script: str = PLAIN, steps: int = 2, ranks: int = 1):
    """Run the script with what stands before its name; return what each rank found, and said."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    hidden = ("THP_MEM_ALLOC_ENABLE", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    # As in the shell of a user who has activated the environment.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, *words, "script.py", str(steps)],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(ranks)]
    assert all(len(one["losses"]) == steps for one in found)
    return found, done.stderr


@pytest.mark.alone
def test_an_unchanged_script_trains_the_same_in_as_little_memory_as_with_the_import_first(
    tmp_path: Path,
) -> None:
    [plain], _ = trained(tmp_path / "plain", steps=4)
    [first], _ = trained(tmp_path / "first", script=IMPORT_FIRST, steps=4)
    [run], said = trained(tmp_path / "run", "-m", "ssdtrain", *OFFLOADED, steps=4)
    peaks = [one.pop("peak_bytes") for one in (plain, first, run)]
    assert run == first == plain
    assert "ssdtrain run: script.py\nssdtrain: " in said
    figures = json.loads((tmp_path / "run" / "report.json").read_text())
    assert figures["bytes_offloaded"] > 4 * figures["resident_bytes_peak"]
    # Half of what a step saves, to be above all noise.
    saved_bytes = (figures["bytes_offloaded"] + figures["bytes_kept"]) // 4
    assert peaks[1] < peaks[0] - saved_bytes // 2, peaks
    assert peaks[2] < peaks[0] - saved_bytes // 2, peaks
    assert peaks[2] < peaks[1] + saved_bytes // 8, peaks


@pytest.mark.parametrize(
    ("launcher", "ours", "ranks"),
    [
        (TORCHRUN, ("--no-python", "ssdtrain"), 2),
        (ACCELERATE, ("--no_python", "ssdtrain"), 1),
    ],
    ids=["torchrun", "accelerate"],
)
def test_launchers_start_it_in_each_rank(
    launcher: tuple[str, ...], ours: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    plain, _ = trained(tmp_path / "plain", *launcher, ranks=ranks)
    run, said = trained(tmp_path / "run", *launcher, *ours, *OFFLOADED, ranks=ranks)
    for one in (*plain, *run):
        del one["peak_bytes"]
    assert run == plain
    assert said.count("ssdtrain run: script.py") == ranks
    reports = [json.loads(one.read_text()) for one in (tmp_path / "run").glob("report*.json")]
    assert len(reports) == ranks
    assert all(one["bytes_offloaded"] > 100 << 20 for one in reports)
