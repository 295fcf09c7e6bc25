"""The files of cluster/ are those that ``orchestrator launch`` writes; the image is pinned, without root."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from orchestrator.launch.files import TEMPLATES, file_text
from orchestrator.launch.launch import Launch
from orchestrator.types import VERSION

CLUSTER = Path(__file__).resolve().parents[2] / "cluster"


@cache
def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_cluster", CLUSTER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", load_generator().FILES)
def test_committed_files_are_what_launch_writes(name: str) -> None:
    generated = file_text(Launch(load_generator().FILES[name], ()))
    committed = (CLUSTER / name).read_text(encoding="utf-8")
    assert committed == generated, "run 'make cluster-files' and commit cluster/"


def test_every_kind_has_a_file() -> None:
    assert {options.kind for options in load_generator().FILES.values()} == set(TEMPLATES)


def test_the_claim_is_the_one_that_the_manifests_name() -> None:
    claim = yaml.safe_load((CLUSTER / "kuberay" / "claim.yaml").read_text(encoding="utf-8"))
    job = (CLUSTER / "kuberay" / "rayjob.yaml").read_text(encoding="utf-8")
    assert f"claimName: {claim['metadata']['name']}\n" in job
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_image_is_pinned_and_has_no_root_and_no_secrets() -> None:
    text = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
    bases = re.findall(r"^ARG BASE=(\S+)", text, flags=re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE) == ["${BASE}"]
    users = re.findall(r"^USER (\S+)", text, flags=re.MULTILINE)
    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases), "a tag with a full version was needed"
    assert users[-1] not in ("root", "0")
    assert "-c source/constraints.txt" in text
    assert f"expert-orchestrator:{VERSION} " in text, "the tag of the comment is the version"
    assert not re.findall(r"^(?:ENV|ARG) .*(?:TOKEN|KEY|SECRET|PASSWORD)", text, flags=re.MULTILINE)


def test_the_dockerfile_copies_what_exists() -> None:
    text = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY --chown=\S+ (.+) \S+$", text, flags=re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert {"orchestrator", "experts", "constraints.txt"} <= set(names)
    assert all((CLUSTER.parent / name).exists() for name in names)
    # The daemon gets these and nothing else: no checkpoints, no .git, no .env.
    ignored = (CLUSTER.parent / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == set(names)


def test_the_docs_say_how_to_pin_the_base_by_its_digest() -> None:
    text = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"^ARG BASE=(\S+)", text, flags=re.MULTILINE)
    guide = (CLUSTER.parent / "docs" / "clusters.md").read_text(encoding="utf-8")
    for page in (text, guide):
        assert f"--build-arg BASE={base}@sha256:DIGEST" in page


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_accepts_the_dockerfile() -> None:
    result = subprocess.run(
        ["hadolint", str(CLUSTER / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
