"""Removes each defence of docs/correctness.md from a copy of the package, and runs its tests.

``make mutations`` calls it. A defence is guarded if the tests that docs/correctness.md names for it
pass with it and fail without it. The exit code is 1 if one can be removed unnoticed, or if the text
that it stands on is no longer found.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from checkout import ROOT, TESTS

SOURCES = ROOT / "python" / "ssdtrain"
PASSED, FAILED = 0, 1
"""Exit codes of pytest; all others say that it could not judge."""


DROPPED_GRAPH = (
    "test_lifetime::test_a_graph_dropped_without_backward_leaves_nothing_and_needs_no_collector"
)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A defence, the text that makes it, what it would be without, and who notices."""

    defence: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Names such as ``test_module::test_name``, as the documentation gives them."""


MUTATIONS = (
    Mutation(
        defence="version at pack",
        module="activations/writeback",
        old="            and record.version == version\n",
        new="",
        tests=(
            "test_offload::test_a_tensor_saved_before_and_after_an_in_place_change_is_two_versions",
        ),
    ),
    Mutation(
        defence="version at the end of the write",
        module="activations/saved_tensor",
        old="return same_version and self.is_whole()",
        new="return self.is_whole()",
        tests=(
            "test_in_place::test_what_changes_under_its_write_is_not_taken_from_the_disk",
            "test_in_place::test_a_change_that_another_counter_sees_gives_plain_bits",
        ),
    ),
    Mutation(
        defence="version at unpack",
        module="activations/saved_tensor",
        old="if version not in (NO_VERSION, counter._version):",
        new="if version not in (NO_VERSION, version):",
        tests=(
            "test_offload::test_a_change_in_place_after_the_save_is_refused",
            "test_in_place::test_every_way_to_change_a_saved_tensor_is_refused",
            "test_in_place::test_a_change_of_every_kind_of_tensor_is_refused",
        ),
    ),
    Mutation(
        defence="version of what is kept",
        module="activations/hooks",
        old="            check_version(kept, packed.version,",
        new="            check_version(kept, kept._version,",
        tests=("test_in_place::test_a_change_of_every_kind_of_tensor_is_refused",),
    ),
    Mutation(
        defence="one counter for all who saved it",
        module="activations/saved_tensor",
        old="        counted = self.counter.detach()\n",
        new="        counted = self.counter.clone()\n",
        tests=(
            "test_offload::test_a_backward_that_changes_what_another_node_saved_is_refused",
            "test_offload::test_a_change_in_place_before_a_double_backward_is_refused",
        ),
    ),
    Mutation(
        defence="a tensor of its own for each unpack",
        module="activations/hooks",
        old="            return kept.detach()",
        new="            return kept",
        tests=("test_in_place::test_every_unpack_gives_a_tensor_of_its_own",),
    ),
    Mutation(
        defence="memory that moved",
        module="activations/saved_tensor",
        old=" and self._address() == self.handle.address",
        new="",
        tests=("test_hostile::test_memory_that_moves_under_its_write_is_not_freed",),
    ),
    Mutation(
        defence="the gate",
        module="activations/hooks",
        old="            self._writeback.write_later(record)",
        new="            self._writeback._begin_write(record)",
        tests=("test_offload::test_noise_that_is_saved_before_it_is_filled_comes_back_filled",),
    ),
    Mutation(
        defence="identity with a look at life",
        module="activations/writeback",
        old="            and record.storage() is storage\n",
        new="",
        tests=(
            "test_in_place::test_a_new_storage_in_the_place_of_a_freed_one_is_not_taken_for_it",
        ),
    ),
    Mutation(
        defence="identity with the version counter",
        module="activations/writeback",
        old="            and record.root() is root_of(tensor)\n",
        new="",
        tests=("test_in_place::test_data_that_counts_for_itself_is_not_taken_for_its_tensor",),
    ),
    Mutation(
        defence="parts that count apart stay",
        module="activations/saved_tensor",
        old="    return root_of(tensor).nbytes < storage_bytes",
        new="    return False",
        tests=(
            "test_in_place::test_a_part_that_changes_under_the_write_of_another_is_no_corruption",
        ),
    ),
    Mutation(
        defence="memory of others stays",
        module="activations/eligibility",
        old="    return not storage.resizable() and not owns(storage.data_ptr())",
        new="    return False",
        tests=("test_in_place::test_arrays_that_a_loader_fills_anew_give_plain_bits",),
    ),
    Mutation(
        defence="storage offset",
        module="geometry",
        old="self.offset: int = int(tensor.storage_offset()) * tensor.itemsize",
        new="self.offset = 0",
        tests=("test_offload::test_backward_sees_the_geometry_that_was_saved",),
    ),
    Mutation(
        defence="strides",
        module="geometry",
        old=".data.set_(storage, offset, self.size, self.stride)",
        new=".data.set_(storage, offset, self.size)",
        tests=("test_offload::test_backward_sees_the_geometry_that_was_saved",),
    ),
    Mutation(
        defence="provenance: the base of a view",
        module="activations/eligibility",
        old="    if base is not None and (",
        new="    if base is None and (",
        tests=("test_offload::test_parameters_and_what_is_made_of_them_are_never_written",),
    ),
    Mutation(
        defence="provenance: the walk to the parameter",
        module="activations/eligibility",
        old="    for _ in range(DERIVATION_DEPTH_MAX):",
        new="    for _ in range(0):",
        tests=("test_offload::test_weights_cast_by_autocast_are_never_written",),
    ),
    Mutation(
        defence="live memory before the disk",
        module="activations/writeback",
        old="        if storage is None or storage.nbytes() < record.start + record.nbytes:",
        new="        if storage is None or record.nbytes:",
        tests=(
            "test_in_place::test_an_unseen_change_of_memory_that_is_held_gives_plain_bits",
            "test_offload::test_running_statistics_give_plain_gradients",
        ),
    ),
    Mutation(
        defence="lifetime by handle",
        module="activations/prefetch",
        old="        entry = weakref.ref(saved)",
        new="        entry = lambda: saved",
        tests=(DROPPED_GRAPH,),
    ),
    Mutation(
        defence="never the tensor itself",
        module="activations/saved_tensor",
        old="        self.tensor = tensor.detach()\n        self.version = tensor._version",
        new="        self.tensor = tensor\n        self.version = tensor._version",
        tests=(DROPPED_GRAPH,),
    ),
    Mutation(
        defence="what a refused backward left is dropped",
        module="activations/failed_backward",
        old="    if not _lowest or current_backward() != -1:",
        new="    if _lowest:",
        tests=(
            "test_in_place::test_a_process_that_met_a_refusal_ends_well",
            "test_in_place::test_the_block_ends_with_what_a_refused_backward_left",
        ),
    ),
    Mutation(
        defence="checkpoint recognition",
        module="activations/hooks",
        old="        return backward == -1 or not _is_recompute()",
        new="        return True",
        tests=("test_checkpoint::test_what_a_reentrant_checkpoint_computes_again_is_not_written",),
    ),
    Mutation(
        defence="no lock while waiting for a read",
        module="activations/hooks",
        old="            found = self._wait(packed, found)",
        new="            with self._lock:\n                found = self._wait(packed, found)",
        tests=("test_threads::test_forwards_go_on_while_a_backward_waits_for_the_disk",),
    ),
    Mutation(
        defence="a forked child owns nothing",
        module="activations/hooks",
        old="        self._is_forked = True\n        self._lock = threading.RLock()\n",
        new="",
        tests=(
            "test_lifetime::test_a_forked_child_neither_reads_nor_closes_the_store_of_its_parent",
        ),
    ),
    Mutation(
        defence="verify",
        module="open_store",
        old="        verify=config.verify,",
        new="        verify=False,",
        tests=(
            "test_lifetime::test_every_flipped_bit_is_caught",
            "test_in_place::test_verify_refuses_bytes_that_changed_unseen_under_their_write",
        ),
    ),
    Mutation(
        defence="what a plain tensor is",
        module="activations/eligibility",
        old=" and dispatch_keys(tensor) == PLAIN_KEYS",
        new="",
        tests=("test_offload::test_backward_sees_the_geometry_that_was_saved",),
    ),
    Mutation(
        defence="what is larger than its parameter",
        module="activations/eligibility",
        old="    return tensor.untyped_storage().nbytes() <= leaf.numel() * tensor.itemsize",
        new="    return True",
        tests=("test_weights::test_a_row_of_a_weight_repeated_for_a_batch_is_an_activation",),
    ),
    Mutation(
        defence="weights without history",
        module="activations/eligibility",
        old="return torch.is_grad_enabled() and storage_users(tensor) > FRESH_USERS_MAX",
        new="return False",
        tests=("test_distributed::test_weights_in_shards_are_not_written_and_get_equal_gradients",),
    ),
    Mutation(
        defence="shared counters below autograd",
        module="activations/hooks",
        old="        if is_below_autograd():",
        new="        if False:",
        tests=("test_checkpoint::test_a_change_of_what_a_policy_keeps_is_refused",),
    ),
    Mutation(
        defence="hooks that the compiler does not trace",
        module="activations/hooks",
        old="        if is_dynamo_compiling() or tracer():\n            # Traced",
        new="        if False:\n            # Traced",
        tests=("test_compile::test_compiled_autograd_gives_equal_bits",),
    ),
)


def anchor_error(mutation: Mutation) -> str | None:
    """Say what is wrong with the text that a mutation replaces, if anything is."""
    count = (SOURCES / f"{mutation.module}.py").read_text().count(mutation.old)
    if count == 1:
        return None
    return f"{mutation.module}.py has the text of {mutation.defence!r} {count} times, not once"


@contextmanager
def copied_package() -> Iterator[Path]:
    """Copy what is installed, the compiled part with it; yield the folder to import it from."""
    spec = importlib.util.find_spec("ssdtrain")
    if spec is None or spec.origin is None:
        sys.exit("ssdtrain is not installed for this Python; `make mutations` installs it")
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(spec.origin).parent, Path(folder, "ssdtrain"), ignore=ignored)
        yield Path(folder)


def node(test: str) -> str:
    """Return what pytest calls a test that the documentation calls ``test_module::test_name``."""
    module, _, name = test.partition("::")
    (path,) = TESTS.glob(f"*/{module}.py")
    return f"{path}::{name}"


def outcome(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests against the package in ``folder``; return pytest's exit code and last words."""
    nodes = [node(test) for test in tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "--timeout=120", *nodes]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(ROOT)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def unnoticed(mutation: Mutation, folder: Path) -> list[str]:
    """Return what is wrong: tests that pass, or cannot judge, without the defence."""
    path = folder / "ssdtrain" / f"{mutation.module}.py"
    whole = path.read_text()
    if whole.count(mutation.old) != 1:
        return [f"the installed {path.name} lacks its text; run `make mutations`"]
    path.write_text(whole.replace(mutation.old, mutation.new))
    try:
        found = {test: outcome(folder, [test]) for test in mutation.tests}
    finally:
        path.write_text(whole)
    return [
        f"{test} passes without it" if code == PASSED else f"{test} does not run\n{words}"
        for test, (code, words) in found.items()
        if code != FAILED
    ]


def main() -> None:
    """Judge every defence, or those whose names contain a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only defences that contain one of these")
    words = parser.parse_args().words
    chosen = [one for one in MUTATIONS if not words or any(word in one.defence for word in words)]
    errors = [error for one in chosen if (error := anchor_error(one)) is not None]
    if errors or not chosen:
        sys.exit("\n".join(errors) or f"no defence contains {words}")
    with copied_package() as folder:
        named = sorted({test for one in chosen for test in one.tests})
        code, last_words = outcome(folder, named)
        if code != PASSED:
            sys.exit(f"with every defence in place the tests do not pass:\n{last_words}")
        sys.stdout.write(f"with every defence in place {len(named)} tests pass\n")
        bad_count = 0
        for one in chosen:
            problems = unnoticed(one, folder)
            bad_count += bool(problems)
            seen = "; ".join(problems) or "noticed by " + ", ".join(one.tests)
            sys.stdout.write(f"without {one.defence}: {seen}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - bad_count} of {len(chosen)} defences are guarded\n")
    sys.exit(1 if bad_count else 0)


if __name__ == "__main__":
    main()
