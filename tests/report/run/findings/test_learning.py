"""The verdict on learning: each course of a loss is told by its name, and noise is taken for none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.fake_run import events_record
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.report.run.figures.read import RunRecord
from orchestrator.report.run.findings.finding import Finding
from orchestrator.report.run.findings.learning import MIN_EVALUATIONS, MIN_STEPS, learning_finding
from orchestrator.report.run.sections import verdict_cards
from orchestrator.report.run.text import performance_summary

STEPS_PER_EPOCH = 10
FALLING = [1.0 / (epoch + 1) for epoch in range(10)]
OVERFITTED = [0.50, 0.30, 0.22, 0.20, 0.21, 0.24, 0.27, 0.29, 0.32, 0.34]


def run_of(
    training: Sequence[float],
    validation: Sequence[float],
    accuracy: Sequence[float] | None = None,
    best_by: str = "loss:min",
    final: dict[str, Any] | None = None,
) -> list[Event]:
    """Return the events of a run with these losses, one per epoch."""
    events: list[Event] = [{"event": "start", "best_by": best_by, "step": 0}]
    step = 0
    for epoch, (loss, validation_loss) in enumerate(zip(training, validation, strict=True)):
        begin = epoch * STEPS_PER_EPOCH
        events += [
            {"event": "step", "step": begin + i + 1, "epoch": epoch, "loss": loss}
            for i in range(STEPS_PER_EPOCH)
        ]
        metrics = {"accuracy": accuracy[epoch]} if accuracy else {}
        step = begin + STEPS_PER_EPOCH
        events.append(
            {"event": "evaluate", "step": step, "epoch": epoch, "loss": validation_loss, "metrics": metrics}
        )
    events.append({"event": "end", "status": "completed", "reason": "done", "steps": step})
    return [*events, {"event": "final", **final}] if final else events


def record_of(folder: Path, *args: Any, **fields: Any) -> RunRecord:
    """Return the record of a run that takes the settings of the optimizer."""
    record = events_record(folder, run_of(*args, **fields))
    record.plan["model"] = {"settings": ["learning_rate", "schedule", "warmup_steps", "weight_decay"]}
    return record


def kind_of(*args: Any, **fields: Any) -> str:
    return learning_finding(record_of(*args, **fields)).kind


def test_overfitting_is_told_with_its_step_its_extent_and_a_cure(tmp_path: Path) -> None:
    final = {"step": 40, "weights": "best", "reason": "the best validation loss"}
    record = record_of(tmp_path, FALLING, OVERFITTED, final=final)
    finding = learning_finding(record)
    assert finding.kind == "overfitting"
    assert finding.evidence == (
        "validation loss was best at step 40 (0.2), then rose by 40.0% "
        "(to 0.28, the median of 6 evaluations)",
        "the training loss fell from 0.25 to 0.1 meanwhile",
    )
    advice = " ".join(finding.advice)
    assert "--epochs 4: the kept weights are the best ones already" in advice
    assert "--early-stopping-patience 3" in advice
    assert "weight decay" in advice
    assert "The model overfits" in verdict_cards(record)
    assert "overfitting: The model overfits" in performance_summary(record)


def test_a_falling_accuracy_counts_as_well(tmp_path: Path) -> None:
    accuracy = [0.80, 0.90, 0.95, 0.96, 0.955, 0.95, 0.945, 0.94, 0.935, 0.93]
    record = record_of(tmp_path, FALLING, [0.3] * 10, accuracy, best_by="accuracy:max")
    finding = learning_finding(record)
    assert finding.kind == "overfitting"
    assert finding.evidence[0].startswith("validation accuracy was best at step 40 (0.96), then fell by 1.8%")


def test_weights_that_are_not_the_best_are_told(tmp_path: Path) -> None:
    final = {"step": 100, "weights": "last", "reason": "set by --keep-last"}
    finding = learning_finding(record_of(tmp_path, FALLING, OVERFITTED, final=final))
    assert finding.kind == "overfitting"
    assert "leave out --keep-last" in finding.advice[0]


@pytest.mark.parametrize(
    ("training", "validation"),
    [
        (FALLING, [0.5, 0.3, 0.25, 0.22, 0.21, 0.205, 0.202, 0.201, 0.2, 0.199]),
        (FALLING, [0.5, 0.3, 0.25, 0.22, 0.21, 0.205, 0.202, 0.2, 0.3, 0.199]),
        (FALLING, [0.5, 0.3, 0.25, 0.22, 0.21, 0.205, 0.202, 0.2, 0.19, 0.3]),
        ([1.0] * 10, OVERFITTED),
        (FALLING[:4], OVERFITTED[2:6]),
    ],
    ids=["falling", "an outlier", "worse once, at the end", "training does not fall", "few evaluations"],
)
def test_other_runs_are_not_called_overfitted(
    tmp_path: Path, training: list[float], validation: list[float]
) -> None:
    assert learning_finding(record_of(tmp_path, training, validation)).kind != "overfitting"


@pytest.mark.extended
def test_noise_is_seldom_taken_for_overfitting(tmp_path: Path) -> None:
    """A plateau with noise: the best of the evaluations is chance, and those after it are worse."""
    draw = random.Random(0)
    num_found = 0
    for number in range(200):
        validation = [0.2 * (1 + draw.gauss(0, 0.1)) for _ in range(10)]
        num_found += kind_of(tmp_path / str(number), FALLING, validation) == "overfitting"
    assert num_found <= 10


@pytest.mark.extended
def test_overfitting_is_seen_through_noise(tmp_path: Path) -> None:
    draw = random.Random(0)
    num_found = 0
    for number in range(200):
        validation = [loss * (1 + draw.gauss(0, 0.05)) for loss in OVERFITTED]
        num_found += kind_of(tmp_path / str(number), FALLING, validation) == "overfitting"
    assert num_found >= 140


def test_a_steady_rise_is_overfitting_although_an_early_evaluation_was_lower(
    tmp_path: Path,
) -> None:
    early = [0.15, 0.17, 0.21, 0.1, 0.14, 0.09, 0.05, 0.15, 0.1, 0.1, 0.11, 0.17, 0.14, 0.039, 0.13, 0.11]
    validation = [*early, *(0.065 + 0.0025 * index for index in range(20))]
    training = [1 / (1 + epoch) for epoch in range(len(validation))]
    finding = learning_finding(record_of(tmp_path, training, validation))
    assert finding.kind == "overfitting"
    assert finding.evidence[0] == (
        "validation loss rose by 61% (± 0%) over the last 18 evaluations, to 0.1125; "
        "validation loss was best at step 140 (0.039)"
    )


def test_a_validation_loss_that_rises_with_the_training_loss_is_no_overfitting(tmp_path: Path) -> None:
    finding = learning_finding(record_of(tmp_path, [1.0] * 10, OVERFITTED))
    assert finding.kind == "rising"
    assert finding.advice[0] == "a lower --learning-rate"


def noisy(course: Sequence[float], deviation: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [loss * (1 + draw.gauss(0, deviation)) for loss in course]


HALVED = [2.0 * 0.9**epoch for epoch in range(20)]
SETTLED = [0.5 + 1.5 * 0.5**epoch for epoch in range(20)]


@pytest.mark.extended(but_first=3)
@pytest.mark.parametrize(
    ("course", "deviation", "kind"),
    [
        (HALVED, 0.01, "still falling"),
        (HALVED, 0.05, "still falling"),
        (SETTLED, 0.001, "levelled off"),
        (SETTLED, 0.03, "levelled off"),
        (SETTLED, 0.3, "no trend"),
        ([2.3] * 20, 0.003, "not learning"),
        ([*SETTLED[:12], *(0.5 + 0.3 * index for index in range(8))], 0.02, "diverged"),
        ([*SETTLED[:12], *[1.8] * 8], 0.02, "diverged"),
    ],
)
def test_each_course_of_the_losses_has_its_name(
    tmp_path: Path, course: list[float], deviation: float, kind: str
) -> None:
    """The margins are those of 97.5 %, above and below: about one run of twenty is misjudged."""
    kinds = [
        kind_of(
            tmp_path / str(seed),
            noisy(course, min(0.02, deviation), seed),
            noisy(course, deviation, 1000 + seed),
        )
        for seed in range(50)
    ]
    assert kinds.count(kind) >= 45


@pytest.mark.extended
def test_a_plateau_is_seldom_called_falling(tmp_path: Path) -> None:
    kinds = [kind_of(tmp_path / str(seed), FALLING * 2, noisy([0.5] * 20, 0.05, seed)) for seed in range(200)]
    assert kinds.count("still falling") <= 10
    assert kinds.count("overfitting") <= 10


def test_a_training_loss_alone_is_judged(tmp_path: Path) -> None:
    """With few evaluations the finding says that overfitting was not looked for."""
    steps = [{"event": "step", "step": step, "loss": 2.0 * 0.99**step} for step in range(1, MIN_STEPS + 1)]
    finding = learning_finding(events_record(tmp_path, steps))
    assert finding.kind == "still falling"
    assert finding.evidence[0].startswith("training loss fell by ")
    assert finding.evidence[1] == f"0 evaluations: overfitting shows from {MIN_EVALUATIONS} on"


@pytest.mark.parametrize("num_steps", [0, 1, MIN_STEPS - 1])
def test_a_short_run_is_not_judged(tmp_path: Path, num_steps: int) -> None:
    steps = [{"event": "step", "step": step + 1, "loss": 1.0} for step in range(num_steps)]
    finding = learning_finding(events_record(tmp_path, steps))
    assert finding.kind == "too short"
    assert f"a verdict needs {MIN_STEPS} steps or {MIN_EVALUATIONS} evaluations" in finding.evidence[0]


def test_a_loss_that_is_no_number_at_the_end_has_diverged(tmp_path: Path) -> None:
    def verdict(*losses: Any) -> Finding:
        fields = {"event": "step", "seconds": 0.1, "samples": 1, "units": 1}
        steps = [{**fields, "step": place + 1, "loss": loss} for place, loss in enumerate(losses)]
        return learning_finding(events_record(tmp_path, steps))

    assert verdict(1.0, "nan").kind == "diverged"
    assert verdict(1.0, "nan").evidence == ("nan or infinite: the loss of 1 step, first at step 2",)
    # One that was skipped on the way did no harm.
    assert verdict(1.0, "nan", 0.9).kind == "too short"


def test_a_loss_of_almost_nothing_no_longer_falls(tmp_path: Path) -> None:
    """From 1e-3 to 1e-5 is a large part of the loss, and no part of what was learnt."""
    course = [2.0, 0.5, 0.1, *(10 ** -(3 + 0.2 * index) for index in range(10))]
    assert kind_of(tmp_path, course, course) == "levelled off"


def test_an_optimizer_of_the_task_is_not_advised_with_our_flags(tmp_path: Path) -> None:
    record = record_of(tmp_path, [1.0] * 10, OVERFITTED)
    record.plan["model"] = {"settings": []}
    assert learning_finding(record).advice[0] == "a lower learning rate"


@pytest.mark.parametrize(
    ("run", "advice"),
    [
        ({"max_steps": 200}, "--max-steps 400 (was 200): a longer run"),
        ({"epochs": 20, "max_steps": None}, "--epochs 40 (was 20): a longer run"),
    ],
)
def test_a_falling_loss_is_advised_the_setting_that_ended_the_run(
    tmp_path: Path, run: dict[str, Any], advice: str
) -> None:
    record = record_of(tmp_path, HALVED, HALVED)
    record.config["run"] = run
    assert learning_finding(record).advice == (advice,)


def test_a_stopped_run_whose_loss_falls_is_advised_to_resume(tmp_path: Path) -> None:
    events = [event for event in run_of(HALVED, HALVED) if event["event"] != "end"]
    events[0]["total_steps"] = 1000
    assert learning_finding(events_record(tmp_path, events)).advice == (
        "resume the run: it ended at step 200 of 1000",
    )


def test_a_loss_that_levels_off_where_it_began_is_advised_a_higher_learning_rate(tmp_path: Path) -> None:
    course = [2.3, 2.25, 2.22, *[2.2] * 12]
    record = record_of(tmp_path, course, noisy(course, 0.001))
    finding = learning_finding(record)
    assert finding.kind == "levelled off"
    assert finding.advice[0] == "a higher --learning-rate: the training loss fell by 4% in all"


@pytest.mark.extended
def test_the_beginning_of_a_long_record_is_that_of_its_first_steps(tmp_path: Path) -> None:
    """The record of a long run leaves steps out: the first five that are left are no beginning."""
    fields = {"event": "step", "seconds": 0.1, "samples": 1, "units": 1}
    losses = [2.3 + 7.7 * 0.9**step for step in range(30_000)]
    steps = [{**fields, "step": place + 1, "loss": loss} for place, loss in enumerate(losses)]
    record = events_record(tmp_path, steps)
    assert len(record.steps) < len(steps)
    assert learning_finding(record).kind == "levelled off"
