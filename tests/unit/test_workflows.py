"""The workflows cannot run here: what can be checked of them without running is checked here."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from checkout import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

# An action of another repository, at a commit, with the version that a person knows it by.
PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def workflow_problems(text: str, targets: set[str]) -> Iterator[str]:
    """Everything that is wrong with a workflow, one sentence each."""
    if "Has not been run yet" not in text.split("name:", 1)[0]:
        yield "its head does not say that it has not been run"
    for line in text.splitlines():
        if "uses:" in line and not PINNED.fullmatch(line.strip().removeprefix("- ")):
            yield f"{line.strip()}: not pinned to a commit with its version beside it"
    workflow = yaml.safe_load(text)
    # YAML 1.1 takes the word `on` for true.
    if not {"name", True, "permissions", "jobs"} <= workflow.keys():
        yield "name, on, permissions or jobs is missing"
        return
    if workflow["permissions"] != {"contents": "read"}:
        yield "all its jobs may do more than read"
    for name, job in workflow["jobs"].items():
        yield from (f"{name}: {problem}" for problem in job_problems(job, targets))


def job_problems(job: dict[str, object], targets: set[str]) -> Iterator[str]:
    """Everything that is wrong with one job."""
    if "timeout-minutes" not in job:
        yield "a job that hangs would run for six hours; give it timeout-minutes"
    publishes = "id-token" in job.get("permissions", {})
    if publishes and not ("environment" in job and "ref_type == 'tag'" in job.get("if", "")):
        yield "it may publish without an environment or without a tag"
    if publishes and any("run" in step for step in job["steps"]):
        yield "a job that may publish runs commands, which could publish something else"
    for step in job["steps"]:
        for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
            if target not in targets:
                yield f"the Makefile has no target {target}"


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_keeps_the_rules(path: Path) -> None:
    assert list(workflow_problems(path.read_text(), make_targets())) == []


def test_the_workflows_are_those_that_the_documentation_names() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "wheels.yml"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# Has not been run yet", "# Runs well", "does not say that it has not been run"),
        (r"@[0-9a-f]{40} # v7\.0\.1", "@v7", "not pinned"),
        (r" # v1\.13\.0", "", "not pinned"),
        ("  contents: read", "  contents: write", "may do more than read"),
        ("    timeout-minutes: 10\n", "", "a job that hangs"),
        ("    environment: release\n", "", "without an environment"),
        (" && github.ref_type == 'tag'", "", "without a tag"),
        ("      - uses: pypa", "      - run: ls\n      - uses: pypa", "runs commands"),
        ("make wheel PYTHON", "make wheels PYTHON", "no target wheels"),
    ],
)
def test_each_rule_can_fail(old: str, new: str, words: str) -> None:
    text, count = re.subn(old, new, (ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    assert count
    problems = list(workflow_problems(text, make_targets()))
    assert problems
    assert all(words in problem for problem in problems)


def test_a_workflow_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(yaml.YAMLError):
        list(workflow_problems("# Has not been run yet\nname: [", set()))
