"""The result of `compare.py` as JSON and as a page of Markdown."""

from __future__ import annotations

from typing import Any

from compare_cases import GIB, shown

RESULTS = "benches/results"


def markdown(result: dict[str, Any]) -> str:
    """Write the page: how it was measured, the yardstick, the rows, what could not be measured."""
    parts = [
        "# The tensor store against fio and peers",
        _conditions(result),
        "## The yardstick",
        _yardstick(result["fio"]),
        "## Rows",
        (
            "*ratio* is the median of the ratios to the fio pass that ran directly before, in "
            "brackets the least and the greatest; *CPU* is CPU seconds per GiB, and behind it "
            "those of fio. GB are 10^9 bytes."
        ),
        _rows([row for row in result["rows"] if row["reason"] is None]),
    ]
    missing = [row for row in result["rows"] if row["reason"] is not None]
    if missing:
        reasons = {f"- {row['label']}, {row['engine']}: {row['reason']}": None for row in missing}
        parts += ["## Not measured", "\n".join(reasons)]
    notes = {
        f"- {row['label']}, {row['engine']}, {shown(row['tensor_bytes'])}: {row['note']}": None
        for row in result["rows"]
        if row["note"] is not None
    }
    parts += ["## How", "\n".join([_how(result), *notes])]
    return "\n\n".join(parts) + "\n"


def _conditions(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        (
            f"`{result['command']}`, {result['date']}, {result['elapsed_s']:.0f} s, "
            f"{result['written_bytes']['total'] / 1e9:.1f} GB written "
            f"(ssdtrain {result['written_bytes']['ssdtrain'] / 1e9:.1f}, "
            f"fio {result['written_bytes']['fio'] / 1e9:.1f}, "
            f"peers {result['written_bytes']['peers'] / 1e9:.1f})."
        ),
        "",
        (
            f"- {machine['cpu']}, {machine['core_count']} cores, "
            f"{machine['memory_bytes'] / GIB:.1f} GiB, {machine['kernel']}"
        ),
        f"- file system: {machine['file_system']}",
        (
            f"- huge pages: `{machine['huge_pages']}`; {machine['huge_share']:.0%} of the sources "
            "called huge lie on them"
        ),
        (
            f"- ssdtrain {machine['ssdtrain']}, torch {machine['torch']}, "
            f"Python {machine['python']}, {machine['fio']}, {machine['libc']}"
        ),
        *(f"- {name} {version}" for name, version in machine["peers"].items()),
        f"- cores busy with other processes: {machine['other_cores_busy']:.2f} on average",
    ]
    if result["quick"]:
        lines += ["", "**A quick run: sizes are divided, and its rates mean nothing.**"]
    return "\n".join(lines)


def _yardstick(fio: dict[str, Any]) -> str:
    lines = [
        (
            f"`GLIBC_TUNABLES={fio['tunables']} {fio['command']}`, on a file that was written "
            f"before. Best of {fio['repeat_count']} passes each; the best setting of each "
            "direction is run beside every row."
        ),
        "",
        "| setting | write GB/s | read GB/s |",
        "|---|--:|--:|",
    ]
    settings = {(one["block"], one["depth"]): None for one in fio["calibration"]}
    for block, depth in settings:
        cells = []
        for direction in ("write", "read"):
            (found,) = (
                one
                for one in fio["calibration"]
                if (one["block"], one["depth"], one["direction"]) == (block, depth, direction)
            )
            rate = f"{found['bytes_per_s'] / 1e9:.2f}"
            cells.append(f"**{rate}** (chosen)" if found["chosen"] else rate)
        lines.append(f"| bs={block} iodepth={depth} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _rows(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| store | engine | depth | dirs | memory | tensor | direction | GB/s | ratio | CPU |",
        "|---|---|--:|--:|---|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        least, greatest = row["ratio_range"]
        cells = [
            row["label"],
            row["engine"],
            "-" if row["depth"] is None else str(row["depth"]),
            str(row["directory_count"]),
            row["pages"],
            shown(row["tensor_bytes"]),
            row["direction"],
            f"{row['bytes_per_s'] / 1e9:.2f}",
            f"{row['ratio_to_fio']:.2f} ({least:.2f}-{greatest:.2f})",
            f"{row['cpu_s_per_gib']:.3f} / {row['fio_cpu_s_per_gib']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _how(result: dict[str, Any]) -> str:
    how = result["how"]
    return "\n".join(
        [
            (
                f"- A pass moves {shown(how['pass_bytes'])} (a peer's {shown(how['peer_bytes'])}), "
                f"{how['run_count']} times per row. fio and the store take turns on the same "
                "blocks: fio opens the store's own spill files. Beside a peer it has a file of its "
                "own in the same directory."
            ),
            (
                "- Steady state: a first pass over fresh blocks, and its reading back, are not "
                "timed; the bytes of that pass are compared."
            ),
            (
                f"- Sources are {shown(how['source_bytes'])} of random bytes, which a pass goes "
                "over again and again. *huge*: parts of one torch tensor on huge pages. *4 KiB*: "
                "the same on small pages, as torch's own tensors below 2 MiB lie."
            ),
            (
                f"- At most {shown(how['write_window_bytes'])} of writes and "
                f"{shown(how['read_window_bytes'])} of reads wait at once, nor more than "
                f"{how['window_count_max']} tensors; what was read is dropped as the window moves "
                "on, so that the arena's memory stays resident, as in training."
            ),
            (
                "- *TensorStore* is the public class, its Python included; *_core.Store* takes "
                "addresses, and alone has a depth to choose."
            ),
            "- Two directories lie on the same file system here.",
            (
                "- CPU: of the whole process with its I/O threads during the pass; fio's as it "
                "reports it, during its job."
            ),
            (
                "- Peers that use the page cache: the timed write ends with fsync, and the cache "
                "is dropped before a read. DeepSpeed reads into buffers that are resident."
            ),
        ]
    )
