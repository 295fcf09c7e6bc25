"""Tests of a run that continues: settings of its folder and changed ones, other data, another model."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from harness.runs.blob_trainers import blobs, cross_entropy, events_of, settings, trainer
from harness.runs.records import by_step
from orchestrator import Config, Trainer
from orchestrator.errors import UserError
from orchestrator.record.files.reading import of_kind


def test_another_batch_size_on_resume_moves_the_end_of_the_schedule(tmp_path: Path) -> None:
    trainer(settings(tmp_path, epochs=2, batch_size=16, max_steps=4), blobs(64)).fit()
    later = settings(tmp_path, epochs=2, batch_size=8, resume="auto", max_steps=None)
    trainer(later, blobs(64)).fit()
    events = events_of(tmp_path)
    steps = by_step(events)
    assert len(steps) == 4 + 8
    assert of_kind(events, "start")[-1]["total_steps"] == 12
    assert steps[-1]["lr"] < 0.2 * max(step["lr"] for step in steps)


def test_resume_never_chooses_a_run_by_the_name_of_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(settings(tmp_path, run_dir=None, epochs=1)).fit()
    (run,) = (tmp_path / "results").iterdir()
    other = trainer(settings(tmp_path, run_dir=None, epochs=2, resume="auto"), blobs(64, seed=7))
    with pytest.raises(UserError, match=rf"named folder.*the newest of this task: .*{run.name}"):
        other.fit()
    assert list((tmp_path / "results").iterdir()) == [run]


def test_a_resumed_trainer_keeps_the_settings_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(settings(tmp_path, learning_rate=1e-4, schedule="constant", warmup_steps=0, max_steps=2)).fit()
    later = Config.of(run_dir=tmp_path / "run", resume="auto", max_steps=4, trackers=())
    Trainer(nn.Linear(4, 3), data=blobs(64), loss=cross_entropy, config=later).fit()
    events = events_of(tmp_path)
    assert [step["lr"] for step in by_step(events)] == [1e-4] * 4
    output = capsys.readouterr().out
    assert f"resuming with the settings of {tmp_path / 'run' / 'config.yaml'}" in output.replace("\n", "")
    assert "resumed at step 2" in output
    (event,) = of_kind(events, "settings")
    assert [change["name"] for change in event["changes"]] == ["max_steps", "training samples"]
    assert [change["origin"] for change in event["changes"]] == ["Config", "the task's data"]


def test_other_data_of_the_same_size_is_told(tmp_path: Path) -> None:
    trainer(settings(tmp_path, epochs=1)).fit()
    trainer(settings(tmp_path, epochs=2, resume="auto"), blobs(32, seed=1)).fit()
    (event,) = of_kind(events_of(tmp_path), "settings")
    assert [change["name"] for change in event["changes"]] == [
        "epochs",
        "the hash of the first training samples",
    ]


def test_a_given_default_wins_over_the_folder(tmp_path: Path) -> None:
    trainer(settings(tmp_path, learning_rate=1e-4, epochs=1)).fit()
    default = 3e-3
    trainer(settings(tmp_path, learning_rate=default, epochs=2, resume="auto")).fit()
    (event,) = of_kind(events_of(tmp_path), "settings")
    changed = {change["name"]: (change["before"], change["now"]) for change in event["changes"]}
    assert changed == {"epochs": (1, 2), "learning_rate": (1e-4, default)}


def test_another_model_is_refused_by_its_structure(tmp_path: Path) -> None:
    trainer(settings(tmp_path, epochs=1)).fit()
    files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    wider = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    with pytest.raises(UserError, match=r"has another model \(15 parameters before, 67 now\)"):
        trainer(settings(tmp_path, epochs=2, resume="auto"), model=wider).fit()
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")} == files


def test_a_setting_kept_without_its_secret_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "abracadabra")
    trainer(settings(tmp_path, epochs=1, placement="/data/abracadabra.json")).fit()
    with pytest.raises(
        UserError, match="keeps placement without the secret in it; give it again, as --placement"
    ):
        trainer(settings(tmp_path, epochs=2, resume="auto")).fit()
    trainer(settings(tmp_path, epochs=2, resume="auto", placement="/data/abracadabra.json")).fit()
    assert not (tmp_path / "run" / "config.002.yaml").exists()
