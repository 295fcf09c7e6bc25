"""A dense model on hosts that can be replaced, whole on each or in shards, equals one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.lm.language_models import save_sums, save_tiny_model
from harness.runs.bits import Leg, Run, checkpoints_of, first_difference, newest_state, run_all, sha256_of
from harness.runs.exact_runs import COMMON, DATA, EXACT
from harness.runs.records import by_step
from harness.runs.steppers import DoubleDigits, DoubleText
from orchestrator.checkpoint.files import load
from orchestrator.config.settings import Config
from orchestrator.record.files.reading import read_events
from orchestrator.tasks.task import TensorData, WindowData

LIVE = {"parallel_strategy": "data_parallel", "recovery": "live"}
DENSE = Config.of(experts=0, width=12, layers=2, sequence_length=16)
SAMPLES = 41
STEPS = 6
SIZES = {"global_batch_size": 18, "batch_size": 3}
"""Three micro-batches on two hosts, two on three; the last step of an epoch has 5 samples: fewer than the
micro-batches of three hosts hold, and on some of them none in the last."""


class FewDigits(DoubleDigits):
    def train_data(self) -> TensorData:
        images, labels = super().train_data().tensors
        return TensorData(images[:SAMPLES], labels[:SAMPLES])

    validation_data = train_data


class FewWindows(DoubleText):
    def train_data(self) -> WindowData:
        data = super().train_data()
        return WindowData(data.tokens[: SAMPLES * data.context + 1], data.context)

    validation_data = train_data


def losses_of(run: Run) -> list[float]:
    return [event["loss"] for event in by_step(read_events(run.folder / "events.jsonl"))]


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    checkpoints = checkpoints_of(run.folder)
    return dict(load(checkpoints[max(checkpoints)]).tensors["model"])


def assert_close(run: Run, one: Run, loss: float = 1e-12, weights: float = 1e-9) -> None:
    assert losses_of(run) == pytest.approx(losses_of(one), rel=loss), run.folder.name
    expected = weights_of(one)
    found = weights_of(run)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=weights, atol=weights)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", [FewDigits, pytest.param(FewWindows, marks=pytest.mark.extended)])
def test_hosts_equal_one_process_in_fp64(task: type[FewDigits | FewWindows], tmp_path: Path) -> None:
    """Whole and in shards, with accumulation and a short last batch; each run goes on under another
    division of the work."""
    variants = {
        "whole": [Leg(2, 3, LIVE), Leg(3, STEPS, LIVE)],
        "zero2": [Leg(3, 3, LIVE | {"sharding": "zero2"}), Leg(2, STEPS, LIVE)],
        "zero3": [Leg(2, 3, DATA), Leg(3, STEPS, LIVE | {"sharding": "zero3"})],
        "ends in one process": [Leg(3, 4, LIVE | {"sharding": "zero3"}), Leg(1, STEPS)],
        "ends under Ray Train": [Leg(1, 2), Leg(2, 4, LIVE), Leg(3, STEPS, DATA | {"sharding": "zero2"})],
    }
    settings = COMMON | {"deterministic": True, "clip_norm": 0.5} | SIZES
    runs = {
        name: Run(tmp_path / name.replace(" ", "-"), task(DENSE), settings, legs)
        for name, legs in ({"one": [Leg(1, STEPS)]} | variants).items()
    }
    run_all(list(runs.values()))
    for name in variants:
        assert_close(runs[name], runs["one"])


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_reproducible_hosts_have_the_bits_of_one_process(tmp_path: Path) -> None:
    legs = {
        "whole": [Leg(2, 3, LIVE), Leg(3, STEPS, LIVE)],
        "shards": [Leg(3, 3, LIVE | {"sharding": "zero3"}), Leg(2, STEPS, LIVE | {"sharding": "zero2"})],
    }
    one = Run(tmp_path / "one", FewDigits(DENSE), EXACT, [Leg(1, STEPS)])
    runs = {name: Run(tmp_path / name, FewDigits(DENSE), EXACT, each) for name, each in legs.items()}
    run_all([one, *runs.values()])
    assert {name: first_difference(run.folder, one.folder) for name, run in runs.items()} == dict.fromkeys(
        legs
    )
    assert len({sha256_of(newest_state(run.folder)) for run in (one, *runs.values())}) == 1


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_dense_language_model_on_hosts_equals_one_process(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", num_experts=0)
    data = str(save_sums(tmp_path / "sums.jsonl", 24))
    settings = COMMON | {
        "task": "lm",
        "model": str(model),
        "data": [data],
        "sequence_length": 96,
        "deterministic": True,
        "global_batch_size": 6,
    }
    one = Run(tmp_path / "one", None, settings, [Leg(1, 4)])
    whole = Run(tmp_path / "whole", None, settings, [Leg(3, 2, LIVE), Leg(2, 4, LIVE)])
    shards = Run(tmp_path / "shards", None, settings, [Leg(2, 4, LIVE | {"sharding": "zero3"})])
    lora = settings | {"lora": 3}
    one_lora = Run(tmp_path / "one-lora", None, lora, [Leg(1, 4)])
    shards_lora = Run(tmp_path / "shards-lora", None, lora, [Leg(2, 4, LIVE | {"sharding": "zero3"})])
    run_all([one, whole, shards, one_lora, shards_lora])
    for run, expected in ((whole, one), (shards, one), (shards_lora, one_lora)):
        assert losses_of(run) == pytest.approx(losses_of(expected), rel=1e-5)
