"""Uneven experts are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_run import events_record, run_record
from orchestrator.report.run.findings.verdict import MIN_STEPS, uneven_experts_finding
from orchestrator.report.run.sections import verdict_cards
from orchestrator.report.run.text import performance_summary


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
    page = verdict_cards(record)
    assert page.index(">learning<") < page.index("bound by compute") < page.index("Experts are used unevenly")
    summary = performance_summary(record)
    places = [summary.index(f"\n{name}\n") for name in ("Learning", "Bound by", "Uneven experts", "Quality")]
    assert places == sorted(places)
