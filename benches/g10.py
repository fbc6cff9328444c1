"""The planner on G10's published traces: makes plans, and replays plans strictly.

    python benches/g10.py plan --data DIR --out DIR [--tries N] [--threads N] [NAME...]
    python benches/g10.py replay --data DIR PLAN... [--seed N]
    python benches/g10.py check --data DIR

DIR has the folder `graphs/` with one `BATCH.kernels.tsv` and `BATCH.tensors.tsv` for each model and
batch. `plan` writes one JSON file per trace and class, or for those named (`VIT-1280-ssd`), and
prints each score with its share of what no plan can beat. `replay` prints the scores of plans.
`check` replays empty plans and, if DIR has `plans/`, G10's own, and compares with what is known.
The work is done by `benches/planning/g10.rs`, which cargo builds first.
`docs/internals/planning.md` has the rules, `docs/results/planning.md` the scores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benches" / "planning"))

import g10_known as known  # noqa: E402 - it lies in a folder of its own

TOLERANCE = 1.5e-6
"""Known scores have six digits."""
Point = tuple[str, int, str]
"""Model, batch and class."""
Case = tuple[str, dict[str, Any], float, int]
"""A name, a plan, its known score, and the seed of the noise."""
TRIES = 24
"""Look-aheads for a plan: all 50 plans take about a minute on two cores."""
MOVE_COUNT_MAX = 100_000
"""In one plan."""


def tool() -> list[str]:
    """Build the compiled part and give its command."""
    package = ["-p", "ssdtrain-plan", "--bin", "g10"]
    build = ["cargo", "build", "--quiet", "--release", "--message-format", "json", *package]
    built = subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in built.splitlines()]
    program = [one["executable"] for one in messages if one.get("executable")]
    if len(program) != 1:
        raise SystemExit(f"g10: `{' '.join(build)}` made {len(program)} programs instead of one")
    return program


def run(*arguments: str, text: str) -> Iterator[list[str]]:
    """Give the compiled part a text; give the fields of each line that it prints, as they come."""
    with tempfile.TemporaryFile("w+") as given:
        given.write(text)
        given.seek(0)
        command = [*tool(), *arguments]
        with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip("\n").split("\t")
    if process.returncode:
        raise SystemExit(f"g10: `{arguments[0]}` failed; its reason is above")


def request(name: str, plan: Any) -> str:
    """Write a plan as the compiled part reads it, or say why it is no plan."""
    if not isinstance(plan, dict) or plan.get("format") != "g10-plan-1":
        raise SystemExit(f"g10: {name} is not in the format g10-plan-1")
    try:
        lines = [f"{name}\t{plan['model']}\t{int(plan['batch'])}\t{plan['class']}"]
        for one in plan["moves"]:
            action = {"evict": one.get("to"), "fetch": "fetch"}[one["move"]]
            priority = float(one.get("priority", 0))
            lines.append(f"{int(one['tensor'])}\t{action}\t{int(one['after'])}\t{priority!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SystemExit(f"g10: {name} has something that cannot be read: {error!r}") from error
    if len(lines) > MOVE_COUNT_MAX + 1:
        raise SystemExit(f"g10: {name} has {len(lines) - 1} moves; {MOVE_COUNT_MAX} at most")
    return "\n".join([*lines, "", ""])


def document(model: str, batch: int, kind: str, moves: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a plan as it lies in its file."""
    return {"format": "g10-plan-1", "model": model, "batch": batch, "class": kind, "moves": moves}


def own_moves(data: Path, model: str, batch: int, policy: str) -> list[dict[str, Any]]:
    """Turn one of G10's own plans into moves."""
    kernels = rows(data / "graphs" / model / f"{batch}.kernels.tsv")
    is_local = [row[3] == "0" for row in rows(data / "graphs" / model / f"{batch}.tensors.tsv")]
    first_use: dict[int, int] = {}
    for number, row in enumerate(kernels):
        for tensor in [*row[6].split(","), *row[7].split(",")]:
            if tensor:
                first_use.setdefault(int(tensor), number)
    moves = []
    for row in rows(data / "plans" / f"{model}-{batch}-{policy}.tsv"):
        kernel, tensor, to = int(row[0]), int(row[1]), row[2]
        move = {"tensor": tensor, "after": (kernel or len(kernels)) - 1}
        if to in {"ssd", "cpu"}:
            moves.append({**move, "move": "evict", "to": "host" if to == "cpu" else "ssd"})
        elif to == "gpu" and not (is_local[tensor] and kernel <= first_use.get(tensor, kernel)):
            moves.append({**move, "move": "fetch"})
    return moves


def rows(path: Path) -> list[list[str]]:
    """Read a table without its comment line; each row has all of its columns."""
    lines = path.read_text().splitlines()
    columns = lines[0].count("\t")
    return [[*line.split("\t"), *[""] * columns] for line in lines if not line.startswith("#")]


def empty_cases(data: Path) -> Iterator[Case]:
    """Give the plan without moves for every trace that is there."""
    for (model, batch), kinds in known.KNOWN.items():
        if (data / "graphs" / model / f"{batch}.kernels.tsv").exists():
            for kind, one in kinds.items():
                plan = document(model, batch, kind, [])
                yield f"{model}-{batch}-{kind}", plan, one.empty, 0


def own_cases(data: Path) -> Iterator[Case]:
    """Give G10's own plans, if they are there."""
    for index, (model, batch) in enumerate(known.MAIN if (data / "plans").is_dir() else ()):
        for policy, kind in known.POLICIES.items():
            plan = document(model, batch, kind, own_moves(data, model, batch, policy))
            name = f"{model}-{batch}-{policy}"
            yield name, plan, known.OWN[policy][index], 0
            if policy == "prefetch_lru":
                yield f"{name}-noise", plan, known.OWN_NOISY[index], 1


def check(data: Path) -> int:
    """Compare replayed scores with the known ones; how many differ."""
    cases = [*empty_cases(data), *own_cases(data)]
    wanted = {name: score for name, _, score, _ in cases}
    wrong = 0
    for seed in (0, 1):
        text = "".join(request(name, plan) for name, plan, _, its_seed in cases if its_seed == seed)
        for name, found in run("replay", str(data / "graphs"), str(seed), text=text):
            is_right = abs(float(found) - wanted[name]) < TOLERANCE
            wrong += not is_right
            verdict = "" if is_right else f"  known: {wanted[name]:.6f}"
            print(f"{name:40} {found}{verdict}", flush=True)
    print(f"{wrong} of {len(wanted)} scores differ from what is known")
    return wrong


def read(path: Path) -> Any:
    """Read a plan's file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"g10: {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"g10: {path} is not JSON: {error}") from error


def replay(data: Path, plans: Sequence[Path], seed: int) -> None:
    """Print the score of each plan."""
    text = "".join(request(str(path), read(path)) for path in plans)
    for name, found in run("replay", str(data / "graphs"), str(seed), text=text):
        print(f"{Path(name).stem:40} {found}", flush=True)


def points(data: Path, names: Sequence[str]) -> list[Point]:
    """List model, batch and class of what is there or named; the slowest first."""
    there = [
        (folder.name, int(path.name.split(".")[0]), kind)
        for folder in sorted((data / "graphs").iterdir())
        for path in sorted(folder.glob("*.kernels.tsv"))
        for kind in (known.HOST, known.SSD)
        if path.with_name(path.name.replace("kernels", "tensors")).exists()
    ]
    by_name = {f"{model}-{batch}-{kind}": (model, batch, kind) for model, batch, kind in there}
    if unknown := set(names) - set(by_name):
        raise SystemExit(f"g10: {data} has no trace for {', '.join(sorted(unknown))}")
    chosen = [by_name[name] for name in names] if names else there
    return sorted(chosen, key=lambda one: one[0] != "SENet154")


def plan(data: Path, out: Path, names: Sequence[str], tries: int, threads: int) -> None:
    """Make plans, write their files, and print the scores."""
    out.mkdir(parents=True, exist_ok=True)
    asked = points(data, names)
    text = "".join(f"{model}\t{batch}\t{kind}\n" for model, batch, kind in asked)
    scores: dict[Point, float] = {}
    bounds: dict[Point, float] = {}
    head, moves = None, []
    start = perf_counter()
    for fields in run("plan", str(data / "graphs"), str(threads), str(tries), text=text):
        if head is None:
            head, moves = (fields[0], int(fields[1]), fields[2]), []
            scores[head] = float(fields[3])
            bounds[head] = bound(head, by_arithmetic=float(fields[4]))
        elif len(fields) > 1:
            moves.append(a_move(fields))
        else:
            name = "-".join(map(str, head)) + ".json"
            (out / name).write_text(json.dumps(document(*head, moves)) + "\n")
            said = f"{scores[head] / bounds[head]:.4f} of the bound {bounds[head]:.4f}"
            print(f"{'-'.join(map(str, head)):26} {scores[head]:.6f}  {said}", flush=True)
            head = None
    print(f"{len(scores)} plans in {perf_counter() - start:.1f} s with {threads} threads")
    for kind in (known.HOST, known.SSD):
        print_means(kind, scores, bounds)


def a_move(fields: list[str]) -> dict[str, Any]:
    """Make a move of a plan's file from a row."""
    where = {"move": "fetch"} if fields[1] == "fetch" else {"move": "evict", "to": fields[1]}
    return {
        "tensor": int(fields[0]),
        **where,
        "after": int(fields[2]),
        "priority": float(fields[3]),
    }


def bound(point: Point, by_arithmetic: float) -> float:
    """Give the least known score that no plan can beat."""
    model, batch, kind = point
    bounds = known.KNOWN.get((model, batch))
    return min(by_arithmetic, bounds[kind].no_plan_can_beat if bounds else 1.0)


def print_means(kind: str, scores: dict[Point, float], bounds: dict[Point, float]) -> None:
    """Print means of a class: of scores, and of their shares of what no plan can beat."""
    every = [point for point in scores if point[2] == kind]
    main_points = [point for point in every if point[:2] in known.MAIN]
    for name, chosen in (("all", every), ("main", main_points)):
        if chosen:
            of_bound = [scores[point] / bounds[point] for point in chosen]
            own = [scores[point] for point in chosen]
            print(
                f"{kind}, {name} {len(chosen)} points: share of the bound {fmean(of_bound):.4f}"
                f" (least {min(of_bound):.4f}); score {fmean(own):.4f} arithmetic,"
                f" {geometric_mean(own):.4f} geometric"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("plan", "replay", "check"):
        one = verbs.add_parser(verb)
        one.add_argument("--data", type=Path, required=True, help="the folder with `graphs/`")
        if verb == "plan":
            one.add_argument("--out", type=Path, required=True, help="where the plans are written")
            one.add_argument("--tries", type=int, default=TRIES, help="look-aheads for a plan")
            one.add_argument("--threads", type=int, default=2, help="plans made at once")
            one.add_argument("names", nargs="*", metavar="NAME", help="MODEL-BATCH-CLASS")
        if verb == "replay":
            one.add_argument(
                "plans", nargs="+", type=Path, metavar="PLAN", help="a plan's JSON file"
            )
            one.add_argument("--seed", type=int, default=0, help="noise; 0, the default, is none")
    options = parser.parse_args(arguments)
    if not (options.data / "graphs").is_dir():
        parser.error(f"--data {options.data} has no folder graphs/")
    if options.verb == "plan" and min(options.threads, options.tries) < 1:
        parser.error("--threads and --tries must be 1 or more")
    if options.verb == "check":
        return int(check(options.data) > 0)
    if options.verb == "plan":
        plan(options.data, options.out, options.names, options.tries, options.threads)
        return 0
    replay(options.data, options.plans, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
