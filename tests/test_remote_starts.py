"""Tests of runs in one process that begin with another remote run: what people see of it."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from orchestrator.config.writer import flat_values
from orchestrator.errors import UserError
from orchestrator.record.files.reading import of_kind, read_events
from tests.test_remote_runs import fit, make_trainer, remote_settings
from tests.test_trainer import settings


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def url() -> str:
    """The address of a run of four steps."""
    url = f"memory://{uuid4().hex}/run1"
    fit(url, max_steps=4, learning_rate=1e-4)
    return url


@pytest.mark.parametrize("name", ["", "/checkpoints/step_00000004"])
def test_people_see_the_address_and_never_the_copy(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = settings(tmp_path / "other", resume=f"{url}{name}", max_steps=6)
    result = make_trainer(config, quiet=False).fit()
    output = " ".join(capsys.readouterr().out.split())
    assert f"resuming with the settings of {url}/config.yaml" in output
    assert ".downloaded-" not in output
    for file in result.run_dir.rglob("*"):
        if file.suffix in (".json", ".yaml", ".jsonl", ".txt", ".html"):
            assert ".downloaded-" not in file.read_text(), file
    assert '"origin": "run run1"' in (result.run_dir / "plan.json").read_text()


def test_a_remote_run_continues_in_another_remote_folder(url: str) -> None:
    result = fit(f"{url}-continued", max_steps=6, resume=url)
    assert [event["step"] for event in of_kind(read_events(result.run_dir / "events.jsonl"), "start")] == [4]


@pytest.mark.parametrize("flag", ["resume", "init_from"])
def test_a_start_that_is_not_there_creates_nothing(tmp_path: Path, flag: str) -> None:
    before = set(tmp_path.rglob("*"))
    missing = f"memory://{uuid4().hex}/run2"
    with pytest.raises(
        UserError, match=f"--{flag.replace('_', '-')} {missing}: there is nothing; give a run"
    ):
        make_trainer(remote_settings(f"{missing}-new", max_steps=2, **{flag: missing})).fit()
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["", "/checkpoints/step_00000004"])
def test_a_plan_has_the_settings_of_a_remote_run_that_it_resumes(url: str, tmp_path: Path, name: str) -> None:
    before = set(tmp_path.rglob("*"))
    prepared = make_trainer(settings(tmp_path / "other", resume=f"{url}{name}", max_steps=6)).prepare()
    assert flat_values(prepared.resolved.config)["learning_rate"] == 1e-4
    assert prepared.resolved.origins["learning_rate"] == "run run1"
    assert set(tmp_path.rglob("*")) == before


def test_a_plan_of_a_remote_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = f"memory://{uuid4().hex}/run2"
    with pytest.raises(UserError, match=f"--resume {missing}: there is nothing; give a run"):
        make_trainer(settings(tmp_path / "other", resume=missing)).prepare()
