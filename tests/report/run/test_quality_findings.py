"""Overfitting is seen where it is, and noise is not taken for it. Uneven experts are told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.record.files.events import Event
from orchestrator.report.run.quality_findings import overfitting_finding, uneven_experts_finding
from orchestrator.report.run.read import RunRecord
from orchestrator.report.run.sections import verdict_boxes
from orchestrator.report.run.text import performance_summary
from orchestrator.report.run.verdict import MIN_STEPS
from tests.support.fakes.fake_events import FakeRun, run_events
from tests.support.fakes.fake_run import events_record, run_record

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
    return events_record(folder, run_of(*args, **fields))


def test_overfitting_is_told_with_its_step_its_extent_and_a_cure(tmp_path: Path) -> None:
    final = {"step": 40, "weights": "best", "reason": "the best validation loss"}
    record = record_of(tmp_path, FALLING, OVERFITTED, final=final)
    finding = overfitting_finding(record)
    assert finding is not None
    assert finding.evidence == (
        "validation loss was best at step 40 (0.2), then rose by 40.0% "
        "(to 0.28, the median of 6 evaluations)",
        "the training loss fell from 0.25 to 0.1 meanwhile",
    )
    advice = " ".join(finding.advice)
    assert "--epochs 4: the final weights are the best ones already" in advice
    assert "--early-stopping-patience 3" in advice
    assert "weight decay" in advice
    assert "The model overfits" in verdict_boxes(record)
    assert "Overfitting" in performance_summary(record)


def test_a_falling_accuracy_counts_as_well(tmp_path: Path) -> None:
    accuracy = [0.80, 0.90, 0.95, 0.96, 0.955, 0.95, 0.945, 0.94, 0.935, 0.93]
    record = record_of(tmp_path, FALLING, [0.3] * 10, accuracy, best_by="accuracy:max")
    finding = overfitting_finding(record)
    assert finding is not None
    assert finding.evidence[0].startswith("validation accuracy was best at step 40 (0.96), then fell by 1.8%")


def test_weights_that_are_not_the_best_are_told(tmp_path: Path) -> None:
    final = {"step": 100, "weights": "last", "reason": "set by --keep-last"}
    finding = overfitting_finding(record_of(tmp_path, FALLING, OVERFITTED, final=final))
    assert finding is not None
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
    assert overfitting_finding(record_of(tmp_path, training, validation)) is None


def test_noise_is_seldom_taken_for_overfitting(tmp_path: Path) -> None:
    """A plateau with noise: the best of the evaluations is chance, and those after it are worse."""
    draw = random.Random(0)
    num_found = 0
    for number in range(200):
        validation = [0.2 * (1 + draw.gauss(0, 0.1)) for _ in range(10)]
        num_found += overfitting_finding(record_of(tmp_path / str(number), FALLING, validation)) is not None
    assert num_found <= 10


def test_overfitting_is_seen_through_noise(tmp_path: Path) -> None:
    draw = random.Random(0)
    num_found = 0
    for number in range(200):
        validation = [loss * (1 + draw.gauss(0, 0.05)) for loss in OVERFITTED]
        num_found += overfitting_finding(record_of(tmp_path / str(number), FALLING, validation)) is not None
    assert num_found >= 140


def test_an_expert_with_far_more_than_its_share_is_told(tmp_path: Path) -> None:
    finding = uneven_experts_finding(run_record(tmp_path, FakeRun(experts=8, skew=2.0)))
    assert finding is not None
    assert finding.evidence[0].startswith("the busiest expert of layer ")
    assert finding.advice[0].startswith("--balance-loss ")
    assert any("--top-k" in line for line in finding.advice)


def test_idle_experts_count_if_no_expert_can_exceed_its_share_by_much(tmp_path: Path) -> None:
    """With two of four experts per token no expert can receive more than twice its share."""
    events = [
        event | {"loads": [[95, 1, 90, 90]]} if event["event"] == "load" else event
        for event in run_events(FakeRun(experts=4))
    ]
    finding = uneven_experts_finding(events_record(tmp_path, events))
    assert finding is not None
    assert finding.evidence[0] == "1 of 4 experts of layer 0 receive almost no tokens"


@pytest.mark.parametrize(
    "fields",
    [{"experts": 8, "skew": 0.0}, {"experts": 8, "skew": 2.0, "steps": MIN_STEPS - 1, "epochs": 1}, {}],
)
def test_even_experts_and_short_runs_are_no_finding(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert uneven_experts_finding(run_record(tmp_path, FakeRun(**fields))) is None


@pytest.mark.parametrize(
    ("taken", "advised"),
    [
        (("balance_loss",), ["--balance-loss"]),
        (("balance_bias",), ["--balance-bias"]),
        (("balance_loss", "top_k"), ["--balance-loss", "a"]),
        ((), ["no"]),
    ],
)
def test_uneven_experts_get_advice_that_the_run_can_take(
    tmp_path: Path, taken: tuple[str, ...], advised: list[str]
) -> None:
    finding = uneven_experts_finding(run_record(tmp_path, FakeRun(experts=8, skew=2.0, taken=taken)))
    assert finding is not None
    assert [line.split()[0] for line in finding.advice] == advised
    assert "--experts" not in " ".join(finding.advice)


def test_page_and_summary_tell_uneven_experts_beside_the_verdict(tmp_path: Path) -> None:
    record = run_record(tmp_path, FakeRun(experts=8, skew=2.0))
    page = verdict_boxes(record)
    assert page.index("Experts are used unevenly") < page.index("bound by compute")
    summary = performance_summary(record)
    assert summary.index("\nUneven experts\n") < summary.index("\nBound by\n")
