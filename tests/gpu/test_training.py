"""What must hold on a GPU. Run there with ``make gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.config.settings import Config
from orchestrator.record.events import by_step, of_kind, read_events
from orchestrator.tasks.load import load_task
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.parts.memory import peak_memory, reset_peak
from orchestrator.train.parts.world import World
from orchestrator.train.worker.build import build_feed
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.trainer import Trainer
from tests.support.steppers import Events, assert_gradients_equal, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DENSE: dict[str, Any] = {
    "task": "synthetic",
    "experts": 0,
    "width": 128,
    "layers": 4,
    "context_length": 128,
    "samples": 512,
}
MOE: dict[str, Any] = {
    "task": "synthetic",
    "experts": 8,
    "expert_hidden_size": (64,),
    "width": 128,
    "layers": 2,
    "context_length": 128,
}


def assembled(**settings: Any) -> tuple[Any, Any, Any]:
    config = Config.of(**settings)
    prepared = Trainer(config=config, quiet=True).prepare()
    world = World.single_process(prepared.plan.device.value)
    parts = build_parts(config, prepared.plan, prepared.task, world)
    stepper = build_stepper(config, world, parts, prepared.plan.batch_size.value, Events())
    return stepper, build_feed(prepared.plan, prepared.task, world, 0), prepared


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_dense_step_does_not_synchronize(precision: str) -> None:
    stepper, feed, _ = assembled(**DENSE, precision=precision, batch_size=16)
    no_synchronization(stepper, feed)


def test_an_moe_step_in_bf16_does_not_synchronize() -> None:
    stepper, feed, _ = assembled(**MOE, precision="bf16", batch_size=16)
    no_synchronization(stepper, feed)


def no_synchronization(stepper: Any, feed: Any) -> None:
    steps = feed.steps(0)
    for step in range(3):
        stepper.run(next(steps), step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 8):
            stepper.run(next(steps), step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"precision": "fp16"}, {"precision": "fp32"}, {"compile": "on"}]
)
@pytest.mark.parametrize("task", ["digits", "text"])
def test_training_learns(task: str, settings: dict[str, Any], tmp_path: Path) -> None:
    length = {"epochs": 10} if task == "digits" else {"max_steps": 60}
    result = Trainer(
        config=Config.of(task=task, run_dir=tmp_path / "run", **length, **settings), quiet=True
    ).fit()
    events = read_events(tmp_path / "run" / "events.jsonl")
    losses = [event["loss"] for event in by_step(events)]
    assert result.status == "completed"
    assert losses[-1] < 0.7 * losses[0]
    assert of_kind(events, "start")[0]["device"].startswith("cuda")
    assert [event["status"] for event in of_kind(events, "compile")] == (
        ["compiled"] if "compile" in settings else []
    )
    if task == "digits":
        assert result.summary["validation"]["accuracy"] > 0.95


def test_low_precision_stays_near_fp32() -> None:
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        stepper, feed, _ = assembled(**MOE, precision=precision, tf32="off", batch_size=16)
        totals = [stepper.run(micros, step) for step, micros in zip(range(20), feed.steps(0), strict=False)]
        losses[precision] = [float(t.loss) / t.count for t in totals]
    for precision in ("bf16", "fp16"):
        assert losses[precision] == pytest.approx(losses["fp32"], rel=2e-2)


def test_recomputing_saves_memory_and_keeps_gradients() -> None:
    found = {}
    for switch in ("off", "on"):
        stepper, feed, _ = assembled(
            **DENSE | {"layers": 12},
            precision="fp32",
            tf32="off",
            batch_size=64,
            activation_checkpointing=switch,
        )
        steps = feed.steps(0)
        stepper.run(next(steps), 0)
        torch.cuda.synchronize()
        reset_peak(stepper.world.device)
        stepper.run(next(steps), 1)
        torch.cuda.synchronize()
        found[switch] = gradients(stepper.strategy.model), peak_memory(stepper.world.device)["allocated"]
        del stepper
    assert found["on"][1] < 0.6 * found["off"][1]
    assert_gradients_equal(found["on"][0], found["off"][0], 2e-6, 1e-7)


def test_a_real_out_of_memory_is_survived() -> None:
    """A guest takes the memory away at step 2: the step is done in halves, with the same loss."""
    torch.cuda.reset_peak_memory_stats()
    plain, feed, _ = assembled(**DENSE, precision="fp32", batch_size=256)
    expected = [
        float(plain.run(micros, step).loss) for step, micros in zip(range(2), feed.steps(0), strict=False)
    ]
    needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del plain
    torch.cuda.empty_cache()
    stepper, feed, _ = assembled(**DENSE, precision="fp32", batch_size=256)
    steps = feed.steps(0)
    first = float(stepper.run(next(steps), 0).loss)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    guest = torch.empty(
        free - needed // 2, dtype=torch.uint8, device="cuda"
    )  # half of what a whole step takes is left
    second = float(stepper.run(next(steps), 1).loss)
    assert stepper.max_pass_samples < 256
    assert stepper.emit.of("oom")[0]["step"] == 2
    assert [first, second] == pytest.approx(expected, rel=1e-5)
    del guest


def test_deterministic_mode_is_bitwise() -> None:
    def run() -> list[float]:
        stepper, feed, prepared = assembled(**MOE, precision="bf16", batch_size=16, deterministic=True)
        with torch_settings(prepared.resolved.config, prepared.plan, stepper.world.device):
            return [float(stepper.run(m, s).loss) for s, m in zip(range(10), feed.steps(0), strict=False)]

    assert run() == run()


def test_data_that_is_read_sample_by_sample_is_pinned_and_moved() -> None:
    class Samples:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((4,), float(index)), index % 2

    model = torch.nn.Linear(4, 2)
    config = Config.of(epochs=2, batch_size=8, loader_workers=2, trackers=())
    trainer = Trainer(
        model,
        data=Samples(),
        loss=lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
        config=config,
        quiet=True,
    )
    prepared = trainer.prepare()
    feed = build_feed(prepared.plan, prepared.task, World.single_process("cuda:0"), 0)
    assert prepared.plan.loader_workers.value == 2
    seen = sorted(
        int(v)
        for step in feed.steps(0)
        for micro in step.micro_batches
        for v in micro.fetch()[0][:, 0].tolist()
    )
    assert seen == list(range(64))


def test_load_task_on_gpu_traces_for_cuda() -> None:
    prepared = Trainer(task=load_task(Config.of(**MOE)), config=Config.of(**MOE), quiet=True).prepare()
    assert prepared.facts.method.startswith("traced for cuda in bf16")


def test_the_memory_of_copies_is_pinned_and_grows() -> None:
    rooms, data = (
        PinnedBuffers(torch.device("cuda", 0)),
        torch.arange(10_000_000, device="cuda", dtype=torch.int32),
    )
    rooms.prepare(4096)
    small = rooms.next_buffer(4096)
    rooms.prepare(data.nbytes)
    for room in (rooms.next_buffer(data.nbytes), rooms.next_buffer(data.nbytes)):
        assert room.is_pinned()
        place = room[: data.nbytes].view(torch.int32)
        place.copy_(data, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(place, data.cpu())
    assert not small.is_pinned()
    assert small.sum() == 0, "it can be read still"
