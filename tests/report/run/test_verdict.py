import dataclasses
import re

import pytest

from orchestrator.report.run.read import read_run_record
from orchestrator.report.run.verdict import MIN_STEPS, verdict
from orchestrator.types import GIB
from tests.support.fake_run import PHASES_PARALLEL, FakeRun, run_events, write_events, write_run

TALKING = {"data": 0.03, "forward": 0.2, "backward": 0.25, "communication": 0.48, "optimizer": 0.04}
WAITING = {"data": 0.5, "forward": 0.2, "backward": 0.25, "optimizer": 0.03}


def verdict_of(tmp_path, **fields):
    return verdict(read_run_record(write_run(tmp_path, FakeRun(**fields))))


def advice_names(found, *flags):
    text = " ".join(found.advice)
    return [flag for flag in flags if flag in text]


@pytest.mark.parametrize(
    ("fields", "bound_by", "flag"),
    [
        ({"phases": WAITING}, "data", "--loader-workers"),
        ({"ooms": 2}, "memory", "--activation-checkpointing on"),
        ({"gpu": True, "peak_bytes": 122 * GIB}, "memory", "--batch-size"),
        ({}, "compute", "--compile"),
        ({"gpu": True}, "compute", "--compile"),
        ({"gpu": True, "utilization": 20.0, "step_s": 0.01}, "host", "--compile"),
        ({"experts": 8, "skew": 2.0}, "imbalance", "--balance-loss"),
        ({"evaluate_s": 4.0}, "evaluation", "--evaluate-every"),
        ({"checkpoint_s": 2.0}, "checkpoint", "--checkpoint-every"),
        ({"workers": 2, "phases": TALKING}, "communication", "--accumulation-steps"),
        (
            {"workers": 2, "experts": 4, "hosted": True, "exchange": 0.3, "sizes": (64,)},
            "communication",
            "larger --batch-size",
        ),
        (
            {"gpu": True, "workers": 2, "experts": 4, "hosted": True, "exchange": 0.3, "sizes": (64,)},
            "communication",
            "--exchange-chunks",
        ),
        (
            {"workers": 2, "experts": 4, "hosted": True, "exchange": 0.2, "sizes": (64,), "skew": 0.0},
            "compute",
            "--compile",
        ),
        ({"workers": 3, "experts": 5, "hosted": True, "skew": 0.0}, "imbalance", "fewer --workers"),
        (
            {"workers": 2, "experts": 8, "hosted": True, "skew": 1.0, "sizes": (64,)},
            "imbalance",
            "--balance-bias 0.001",
        ),
        (
            {"workers": 2, "experts": 5, "hosted": True, "skew": 0.0, "method": "round_robin"},
            "imbalance",
            "--placement auto",
        ),
        ({"workers": 2, "recover_at": 70}, "recovery", "--checkpoint-every 5"),
        (
            {"workers": 2, "recover_at": 70, "experts": 4, "hosted": True, "sizes": (64,), "skew": 0.0},
            "recovery",
            "--snapshot-every 5",
        ),
        (
            {"workers": 2, "recover_at": 70, "recovery_s": 0.2, "phases": PHASES_PARALLEL},
            "compute",
            "--compile",
        ),
        ({"steps": MIN_STEPS - 1, "epochs": 1}, "unknown", "--max-steps"),
        ({"steps": 0, "ends": "failed"}, "unknown", "--max-steps"),
    ],
)
def test_each_cause_is_found_and_answered(tmp_path, fields, bound_by, flag):
    found = verdict_of(tmp_path, **fields)
    assert found.bound_by == bound_by
    assert flag in " ".join(found.advice)
    assert found.evidence
    assert 1 <= len(found.advice) <= 3


def test_evidence_carries_the_numbers(tmp_path):
    assert (
        verdict_of(tmp_path / "a", phases=WAITING)
        .evidence[0]
        .startswith("50% of a step waits for data (40 ms per step")
    )
    assert "20%" in verdict_of(tmp_path / "b", gpu=True, utilization=20.0, step_s=0.01).evidence[0]
    assert "ran out of memory" in verdict_of(tmp_path / "c", ooms=2).evidence[0]


def test_several_workers_are_told_apart(tmp_path):
    found = verdict_of(tmp_path / "a", workers=4, phases=TALKING, gpu=True)
    assert found.evidence[0] == "48% of a step of 4 workers is communication (38.4 ms per step)"
    lost = verdict_of(tmp_path / "b", workers=2, recover_at=70)
    assert "of the run was spent on 1 recovery (12.3 s each) after losing a worker" in lost.evidence[0]
    assert "10 steps were done twice" in lost.advice[1]


def test_hosts_that_wait_are_told_with_their_figures(tmp_path):
    waiting = verdict_of(
        tmp_path / "a", workers=2, experts=4, hosted=True, exchange=0.3, sizes=(64,), skew=0.0
    )
    assert waiting.evidence == (
        "30% of a step waits for the exchange of rows between 2 hosts (24 ms per step, 32.0 MiB)",
    )
    uneven = verdict_of(tmp_path / "b", workers=3, experts=5, hosted=True, skew=0.0)
    assert re.fullmatch(
        r"the slowest host of a layer takes 1\.[34]\d times the mean of the 3 hosts \(predicted 1\.41\)",
        uneven.evidence[0],
    )
    both = verdict_of(tmp_path / "c", workers=3, experts=5, hosted=True, exchange=0.3, phases=TALKING)
    assert both.bound_by == "communication"
    assert [line.split()[0] for line in both.evidence] == ["30%", "48%", "also"]
    assert len(both.advice) == 3


def test_a_placement_that_is_asked_for_already_is_not_advised(tmp_path):
    """A run that is taken up keeps the placement it began with, and calls it a given one."""
    folder = write_run(tmp_path, FakeRun(workers=2, experts=5, hosted=True, skew=0.0, method="round_robin"))
    for asked, advised in (("auto", False), ("round_robin", True), ("mine.json", True)):
        (folder / "config.yaml").write_text(f"parallel: {{placement: {asked}}}\n")
        assert ("--placement auto" in " ".join(verdict(read_run_record(folder)).advice)) is advised


def test_a_bias_that_is_on_already_is_not_advised(tmp_path):
    folder = write_run(tmp_path, FakeRun(workers=2, experts=8, hosted=True, skew=1.0, sizes=(64,)))
    assert "--balance-bias" in " ".join(verdict(read_run_record(folder)).advice)
    (folder / "config.yaml").write_text("moe: {balance_bias: 0.001}\n")
    found = verdict(read_run_record(folder))
    assert found.bound_by == "imbalance"
    assert advice_names(found, "--balance-bias", "--balance-loss") == ["--balance-loss"]


def test_a_checkpoint_in_the_background_holds_nothing_up(tmp_path):
    assert verdict_of(tmp_path, workers=2, checkpoint_s=2.0).bound_by == "compute"


def test_what_else_was_found_is_told_beside_the_verdict(tmp_path):
    found = verdict_of(tmp_path, phases=WAITING, experts=8, skew=2.0)
    assert found.bound_by == "data"
    assert any(line.startswith("also imbalance:") for line in found.evidence)


def test_memory_shortage_counts_even_in_a_short_run(tmp_path):
    assert verdict_of(tmp_path, steps=2, epochs=1, ooms=1).bound_by == "memory"


def test_a_gpu_with_long_steps_is_not_held_up_by_the_host(tmp_path):
    assert verdict_of(tmp_path, gpu=True, utilization=20.0, step_s=0.5).bound_by != "host"


def test_a_cpu_run_is_never_told_about_its_gpu(tmp_path):
    found = verdict_of(tmp_path, step_s=0.001, evaluate_s=0.0, checkpoint_s=0.0)
    assert found.bound_by == "compute"
    assert not any("GPU is busy" in line for line in found.evidence)


def test_nothing_is_advised_that_is_on_already(tmp_path):
    found = verdict_of(tmp_path / "a", gpu=True, compiled="compiled")
    assert advice_names(found, "--compile", "--precision bf16", "--batch-size") == ["--batch-size"]
    fallen = verdict_of(tmp_path / "b", gpu=True, compiled="failed")
    assert "--compile" in advice_names(fallen, "--compile")


def test_a_gpu_run_in_fp32_is_pointed_to_bf16(tmp_path):
    folder = write_run(tmp_path, FakeRun(gpu=True))
    events = [
        event | {"precision": "fp32"} if event["event"] == "start" else event
        for event in run_events(FakeRun(gpu=True))
    ]
    write_events(folder, events)
    assert "--precision bf16" in " ".join(verdict(read_run_record(folder)).advice)


def test_without_phases_and_monitor_nothing_is_claimed(tmp_path):
    events = [event for event in run_events(FakeRun()) if event["event"] not in ("phases", "monitor")]
    found = verdict(read_run_record(write_events(tmp_path, events)))
    assert found.bound_by == "unknown"
    assert "--profile" in " ".join(found.advice)


def test_loader_workers_stay_within_the_cores(tmp_path):
    assert "--loader-workers 2:" in verdict_of(tmp_path, phases=WAITING).advice[0]


def test_a_verdict_is_a_frozen_value(tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict_of(tmp_path).bound_by = "data"  # type: ignore[misc]


def test_idle_experts_count_where_no_expert_can_be_far_above_its_share(tmp_path):
    """With two of four experts per token none can receive more than twice its share."""
    events = [
        event | {"loads": [[95, 1, 90, 90]]} if event["event"] == "load" else event
        for event in run_events(FakeRun(experts=4))
    ]
    found = verdict(read_run_record(write_events(tmp_path, events)))
    assert found.bound_by == "imbalance"
    assert found.evidence[0] == "1 of 4 experts of layer 0 receive almost no tokens"


def test_parts_of_the_exchange_are_advised_where_something_can_be_hidden_behind_them(tmp_path):
    """A GPU computes while NCCL moves rows; on CPUs the same cores do both, and gloo holds the GPU up."""
    fields = {"workers": 2, "experts": 4, "hosted": True, "exchange": 0.3, "sizes": (64,)}
    assert "--exchange-chunks" not in " ".join(verdict_of(tmp_path / "cpu", **fields).advice)
    events = [
        event | ({"backend": "gloo"} if event["event"] == "start" else {})
        for event in run_events(FakeRun(gpu=True, **fields))
    ]
    through_the_host = " ".join(verdict(read_run_record(write_events(tmp_path / "gloo", events))).advice)
    assert "--exchange-chunks" not in through_the_host
    assert "--backend nccl" in through_the_host


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ("parallel: {placement: round_robin}", "--placement auto"),
        ("parallel: {placement: mine.json}", "--placement auto"),
        ("{parallel: {placement: auto}, run: {auto: false}}", "leave out --no-auto"),
        ("{parallel: {placement: auto}, run: {auto: true}}", ""),
    ],
)
def test_hosts_that_wait_in_the_exchange_for_an_uneven_one_are_to_be_placed_by_cost(
    tmp_path, settings, advised
):
    fields = {
        "workers": 2,
        "experts": 5,
        "hosted": True,
        "skew": 0.0,
        "exchange": 0.4,
        "method": "round_robin",
    }
    folder = write_run(tmp_path, FakeRun(**fields))
    (folder / "config.yaml").write_text(settings + "\n")
    found = verdict(read_run_record(folder))
    assert found.bound_by == "communication"
    assert advised in found.advice[0]
    assert ("places experts by their cost" in found.advice[0]) is bool(advised)
