"""The hosted workflow runs the command of ``.ci/run``, with pinned actions and without rights to write."""

from __future__ import annotations

import re
import stat
from typing import Any

import pytest
import yaml

from release.build import ROOT
from release.dependencies import project

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / name).read_text(encoding="utf-8"))


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_the_tests_are_those_of_ci_run() -> None:
    job = read("workflows/ci.yml")["jobs"]["test"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR, ".ci/run must be executable"


def test_two_pythons_are_tested_the_oldest_among_them() -> None:
    pythons = read("workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert len(pythons) == 2
    assert f">={pythons[0]}" == project()["requires-python"]
    known = {line.rpartition(" :: ")[2] for line in project()["classifiers"]}
    assert set(pythons) <= known


def test_make_targets_of_the_workflow_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [step["run"] for step in steps_of(read("workflows/ci.yml")) if "run" in step]
    made = [word for command in commands if command.startswith("make ") for word in command.split()[1:]]
    targets = [word for word in made if re.fullmatch(r"[a-z-]+", word)]
    assert targets
    missing = [target for target in targets if f"\n{target}:" not in makefile]
    assert missing == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_rights_are_few(path: Any) -> None:
    workflow = read(f"workflows/{path.name}")
    used = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert [name for name in used if not re.search(r"@[0-9a-f]{40}$", name)] == []
    assert workflow["permissions"] == {"contents": "read"}
    checkouts = [step for step in steps_of(workflow) if "actions/checkout" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_issue_forms_name_pages_and_commands_that_exist() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    texts = [form.read_text(encoding="utf-8") for form in forms]
    pages = {page for text in texts for page in re.findall(r"docs/[\w-]+\.md", text)}
    assert pages
    assert [page for page in pages if not (ROOT / page).is_file()] == []
    for form in forms:
        if form.name != "config.yml":
            assert {"name", "description", "body"} <= set(read(f"ISSUE_TEMPLATE/{form.name}"))
