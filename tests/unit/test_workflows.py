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
