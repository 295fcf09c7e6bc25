"""Runs to compare: fake ones whose settings, seeds and results a test chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from harness.fakes.fake_events import FakeRun
from harness.fakes.fake_run import write_run
from orchestrator.report.comparison.runs import ComparedRun, read_runs


def write_named(folder: Path, run: FakeRun, **settings: Any) -> Path:
    """Write a run, with settings such as ``run_seed=1`` (the setting ``run.seed``) in its config."""
    write_run(folder, run)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["run"]["name"] = folder.name
    for name, value in settings.items():
        section, _, setting = name.partition("_")
        config.setdefault(section, {})[setting] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def set_accuracy(folder: Path, accuracy: float) -> None:
    """Give every evaluation of a run the same accuracy."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        if event["event"] == "evaluate":
            event["metrics"] = {"accuracy": accuracy}
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def runs_in(*folders: Path) -> list[ComparedRun]:
    return read_runs([(folder, folder) for folder in folders])
