"""A sweep with ASHA stops trials that are worse than others, and says so. Nothing is trained: the scores are
given."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import TrialScheduler

from orchestrator.config.settings import Config
from orchestrator.config.sweep.space_parser import parse_space
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.record.files.ledger import TrialRow
from orchestrator.runtime.sweep import run as run_module
from orchestrator.runtime.sweep.run import SweepRun
from orchestrator.trainer import Trainer

SCORES = {1: 10.0, 2: 1.0, 3: 20.0}
SLICES = 8


class GivenTuner:
    """Tune, whose trials have the scores of ``SCORES``."""

    def __init__(self, _: Any, tune_config: Any, run_config: Any) -> None:
        self.scheduler: TrialScheduler | None = tune_config.scheduler
        (self.recorder,) = run_config.callbacks
        if self.scheduler is not None:
            self.scheduler.set_search_properties(tune_config.metric, tune_config.mode)

    def fit(self) -> None:
        for number, score in SCORES.items():
            trial: Any = SimpleNamespace(trial_id=f"{number}", num_failures=0)
            row = asdict(TrialRow(number, {"batch_size": number}, "completed", samples_per_second=score))
            for part in range(1, SLICES + 1):
                report = {"training_iteration": part, "score": score, "row": row, "ended": part == SLICES}
                trial.last_result = report
                if self._decision(trial, report) != TrialScheduler.CONTINUE:
                    break
            self.recorder.on_trial_complete(0, [], trial)

    def _decision(self, trial: Any, report: dict[str, Any]) -> str:
        if self.scheduler is None:
            return TrialScheduler.CONTINUE
        nothing: Any = None
        if report["training_iteration"] == 1:
            self.scheduler.on_trial_add(nothing, trial)
        return self.scheduler.on_trial_result(nothing, trial, report)


@pytest.mark.parametrize("asha", [True, False])
def test_trials_that_are_worse_than_others_are_stopped(monkeypatch: pytest.MonkeyPatch, asha: bool) -> None:
    monkeypatch.setattr(run_module, "Tuner", GivenTuner)
    for name in ("with_parameters", "with_resources"):
        monkeypatch.setattr(run_module, name, lambda trainable, *_, **__: trainable)
    rows: list[TrialRow] = []
    ledger: Any = SimpleNamespace(add=rows.append)
    screen: Any = SimpleNamespace(trial_done=lambda _: None)
    devices: Any = SimpleNamespace(
        inventory=None, cluster=None, on_gpu=False, cores=1, workers_or_refusal=lambda *_: 1
    )
    sweep = Sweep(parse_space(["batch-size=1,2,3"]), asha=asha)
    SweepRun(sweep, Trainer(config=Config()).prepare(), devices, ledger, (), screen, lambda: False).run()
    assert [row.status for row in rows] == ["completed", "stopped" if asha else "completed", "completed"]
    assert ("others were better" in rows[1].reason) == asha
