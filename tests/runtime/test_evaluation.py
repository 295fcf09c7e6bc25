"""Evaluation of checkpoints on the workers of a cluster, end to end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from harness.hosts.cluster import RayCluster
from harness.lm.language_models import save_sums, save_tiny_model
from harness.runs.cli_runs import complete, complete_run, living_actors
from orchestrator.record.files.reading import of_kind, read_events

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SEVEN_EXPERTS = shlex.split(
    "--experts 7 --expert-hidden-size 8 16 8 8 16 8 8 --max-steps 4 --eval-batch-size 17"
)


@pytest.mark.extended
def test_three_workers_agree_with_the_training_in_one_process(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    """Of 359 samples, the last batch of three workers has two; one worker has none."""
    run_dir = tmp_path / "run"
    complete_run(None, run_dir, *SEVEN_EXPERTS)
    (expected,) = of_kind(read_events(run_dir / "events.jsonl"), "evaluate")
    result_file = run_dir / "checkpoints" / "step_00000004.validation.json"
    for strategy in ("data_parallel", "expert_parallel"):
        flags = ["--workers", "3", "--parallel-strategy", strategy]
        output = complete(shared_cluster, tmp_path, ["evaluate", "run", *flags])
        result = json.loads(result_file.read_text())
        assert (result["strategy"], result["workers"], result["samples"]) == (strategy, 3, 359)
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
        assert "step 4  validation loss" in output
        assert living_actors(shared_cluster) == []
        assert [path.name for path in result_file.parent.iterdir() if path.name.startswith(".")] == []
    _damage(run_dir)
    output = complete(shared_cluster, tmp_path, ["evaluate", "run", "--workers", "2"], code=4)
    assert "run/checkpoints/step_00000004 is damaged: " in output
    assert "Traceback" not in output


@pytest.mark.extended
def test_workers_continue_prompts_as_one_process_does(shared_cluster: RayCluster, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    data = save_sums(tmp_path / "sums.jsonl")
    task = ["--task", "lm", "--model", str(model), "--data", str(data), "--sequence-length", "96"]
    run_dir = tmp_path / "run"
    flags = [
        "--run-dir",
        "run",
        "--max-steps",
        "4",
        "--learning-rate",
        "0.01",
        "--trackers",
        "--no-monitor-gpu",
    ]
    complete(None, tmp_path, ["train", *task, *flags])
    evaluate = [
        "evaluate",
        "run",
        "--prompts",
        "what is the sum of 1 and 2?",
        "hello",
        "--max-new-tokens",
        "8",
    ]
    results = []
    for flags in (["--workers", "1"], ["--workers", "2", "--parallel-strategy", "expert_parallel"]):
        complete(shared_cluster, tmp_path, [*evaluate, *flags])
        results.append(json.loads((run_dir / "checkpoints" / "step_00000004.validation.json").read_text()))
    assert [result["workers"] for result in results] == [1, 2]
    assert len(results[0]["generations"]) == 2
    assert results[0]["generations"] == results[1]["generations"]


def _damage(run_dir: Path) -> None:
    (file,) = (run_dir / "checkpoints" / "step_00000004").glob("model_*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.extended
def test_an_evaluation_that_loses_a_worker_begins_again_once(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    kills = tmp_path / "kills"
    kills.mkdir()
    task = ["--task", "harness.faults.killed_evaluation:KilledDigits", "--data-dir", str(kills)]
    complete_run(None, run_dir, *task, "--max-steps", "2")
    (expected,) = of_kind(read_events(run_dir / "events.jsonl"), "evaluate")
    result_file = run_dir / "checkpoints" / "step_00000002.validation.json"
    evaluate = ["evaluate", "run", "--workers", "2"]
    (kills / "once").touch()
    output = complete(shared_cluster, tmp_path, evaluate)
    # Either the killed worker is named, or the peer that lost contact with it: Ray reports one of them first.
    assert ": the evaluation begins again" in output
    assert json.loads(result_file.read_text())["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    result_file.unlink()
    (kills / "always").touch()
    output = complete(shared_cluster, tmp_path, evaluate, code=4)
    assert "the checkpoint is as it was: start the evaluation again" in output
    assert not result_file.exists()
    assert living_actors(shared_cluster) == []
