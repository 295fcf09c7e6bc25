"""Training on a GPU: no synchronisation in a step, precision, memory, determinism.

Run with ``make gpu``."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runs.records import by_step
from harness.runs.steppers import Events, assert_gradients_equal, gradients
from orchestrator.config.settings import Config
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.load import load_task
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.data.steps import Feed
from orchestrator.train.device.memory import peak_memory, reset_peak
from orchestrator.train.group.world import World
from orchestrator.train.optim.adamw8bit import Table, decode, encode
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker.build import build_feed
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.trainer import Trainer

pytestmark = pytest.mark.gpu

DENSE: dict[str, Any] = {
    "task": "synthetic",
    "experts": 0,
    "width": 128,
    "layers": 4,
    "sequence_length": 128,
    "samples": 512,
}
MOE: dict[str, Any] = {
    "task": "synthetic",
    "experts": 8,
    "expert_hidden_size": (64,),
    "width": 128,
    "layers": 2,
    "sequence_length": 128,
}


def build(**settings: Any) -> tuple[Stepper, Feed, PreparedRun]:
    config = Config.of(**settings)
    prepared = Trainer(config=config, quiet=True).prepare()
    world = World.single_process(prepared.plan.device.value)
    parts = build_parts(config, prepared.plan, prepared.task, world)
    stepper = build_stepper(config, world, parts, prepared.plan.batch_size.value, Events())
    return stepper, build_feed(prepared.resolved.config, prepared.plan, prepared.task, world), prepared


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_dense_step_does_not_synchronise(precision: str) -> None:
    stepper, feed, _ = build(**DENSE, precision=precision, batch_size=16)
    assert_no_synchronisation(stepper, feed)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_an_moe_step_in_bf16_does_not_synchronise(optimizer: str) -> None:
    stepper, feed, _ = build(**MOE, precision="bf16", batch_size=16, optimizer=optimizer)
    assert_no_synchronisation(stepper, feed)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_codes_of_a_gpu_are_those_of_a_cpu(signed: bool) -> None:
    values = torch.randn((7, 3, 200), generator=torch.Generator().manual_seed(0))
    values = values if signed else values.abs()
    cpu, gpu = (Table.of(signed, torch.device(name), values.dtype) for name in ("cpu", "cuda"))
    expected = encode(values, cpu)
    found = encode(values.cuda(), gpu)
    assert torch.equal(found.data.cpu(), expected.data)
    assert torch.equal(found.scale_RB.cpu(), expected.scale_RB)
    assert torch.equal(decode(found, gpu).cpu(), decode(expected, cpu))


def assert_no_synchronisation(stepper: Stepper, feed: Feed) -> None:
    """Torch raises where the host waits for the device. The first steps may wait."""
    batches = feed.steps(0)
    for step in range(3):
        stepper.run(next(batches), step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 8):
            stepper.run(next(batches), step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "fp32"},
        {"compile": "on"},
    ],
)
@pytest.mark.parametrize("task", ["digits", "text"])
def test_training_learns(task: str, settings: dict[str, Any], tmp_path: Path) -> None:
    length = {"epochs": 10} if task == "digits" else {"max_steps": 60}
    config = Config.of(task=task, run_dir=tmp_path / "run", **length, **settings)
    result = Trainer(config=config, quiet=True).fit()
    events = read_events(tmp_path / "run" / "events.jsonl")
    losses = [event["loss"] for event in by_step(events)]
    assert result.status == "completed"
    assert losses[-1] < 0.7 * losses[0]
    assert of_kind(events, "start")[0]["device"].startswith("cuda")
    compile_statuses = [event["status"] for event in of_kind(events, "compile")]
    assert compile_statuses == (["compiled"] if "compile" in settings else [])
    if task == "digits":
        assert result.summary["validation"]["accuracy"] > 0.95


def test_low_precision_stays_near_fp32() -> None:
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        stepper, feed, _ = build(**MOE, precision=precision, tf32="off", batch_size=16)
        batches = islice(feed.steps(0), 20)
        totals = [stepper.run(batch, step) for step, batch in enumerate(batches)]
        losses[precision] = [float(t.loss) / t.count for t in totals]
    for precision in ("bf16", "fp16"):
        assert losses[precision] == pytest.approx(losses["fp32"], rel=2e-2)


def test_activation_checkpointing_saves_memory_and_keeps_gradients() -> None:
    grads = {}
    peak_bytes = {}
    for switch in ("off", "on"):
        gc.collect()
        others_bytes = torch.cuda.memory_allocated()  # left by other tests of this process
        stepper, feed, _ = build(
            **DENSE | {"layers": 12},
            precision="fp32",
            tf32="off",
            batch_size=64,
            activation_checkpointing=switch,
        )
        batches = feed.steps(0)
        stepper.run(next(batches), 0)
        torch.cuda.synchronize()
        reset_peak(stepper.world.device)
        stepper.run(next(batches), 1)
        torch.cuda.synchronize()
        grads[switch] = gradients(stepper.strategy.model)
        peak_bytes[switch] = peak_memory(stepper.world.device)["allocated"] - others_bytes
        del stepper, feed, batches
    assert peak_bytes["on"] < 0.6 * peak_bytes["off"]
    assert_gradients_equal(grads["on"], grads["off"], 2e-6, 1e-7)


@contextmanager
def memory_taken(left_bytes: int) -> Iterator[None]:
    """Take the free memory of the GPU but for ``left_bytes``, and return it to the driver.

    Cached, it would be missing to the code of kernels, which the driver loads when they first run."""
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info()[0]
    obstacle = torch.empty(free_bytes - left_bytes, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del obstacle
        torch.cuda.empty_cache()


@pytest.mark.whole_gpu
def test_a_step_that_runs_out_of_memory_is_repeated_in_halves() -> None:
    """Another tensor takes the memory at step 2: the step is done in halves, with the same loss."""
    torch.cuda.reset_peak_memory_stats()
    undisturbed, feed, _ = build(**DENSE, precision="fp32", batch_size=256)
    batches = islice(feed.steps(0), 2)
    expected = [float(undisturbed.run(batch, step).loss) for step, batch in enumerate(batches)]
    step_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del undisturbed
    torch.cuda.empty_cache()
    stepper, feed, _ = build(**DENSE, precision="fp32", batch_size=256)
    batches = feed.steps(0)
    first = float(stepper.run(next(batches), 0).loss)
    # Half of the memory that a whole step needs.
    with memory_taken(left_bytes=step_bytes // 2):
        second = float(stepper.run(next(batches), 1).loss)
    assert stepper.max_pass_samples < 256
    assert isinstance(stepper.emit, Events)
    assert stepper.emit.of("oom")[0]["step"] == 2
    assert [first, second] == pytest.approx(expected, rel=1e-5)


def test_deterministic_runs_are_equal_to_the_bit() -> None:
    def train() -> list[float]:
        stepper, feed, prepared = build(**MOE, precision="bf16", batch_size=16, deterministic=True)
        with torch_settings(prepared.resolved.config, prepared.plan, stepper.world.device):
            batches = islice(feed.steps(0), 10)
            return [float(stepper.run(batch, step).loss) for step, batch in enumerate(batches)]

    assert train() == train()


class SampleDataset:
    """Data that is read sample by sample."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index)), index % 2


def test_data_that_is_read_sample_by_sample_reaches_the_gpu() -> None:
    trainer = Trainer(
        torch.nn.Linear(4, 2),
        data=SampleDataset(),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        config=Config.of(epochs=2, batch_size=8, loader_workers=2, trackers=()),
        quiet=True,
    )
    prepared = trainer.prepare()
    feed = build_feed(trainer.resolved.config, prepared.plan, prepared.task, World.single_process("cuda:0"))
    assert prepared.plan.loader_workers.value == 2
    seen: list[float] = []
    for batch in feed.steps(0):
        for micro_batch in batch.micro_batches:
            inputs, _ = micro_batch.fetch()
            assert inputs.device.type == "cuda"
            seen += inputs[:, 0].tolist()
    assert sorted(seen) == list(range(64))


def test_the_facts_of_a_model_are_traced_for_the_gpu() -> None:
    prepared = Trainer(task=load_task(Config.of(**MOE)), config=Config.of(**MOE), quiet=True).prepare()
    assert prepared.facts.method.startswith("traced for cuda in bf16")


def test_buffers_that_nobody_closed_leave_their_pages_to_the_next() -> None:
    for _ in range(8):
        buffers = PinnedBuffers(torch.device("cuda", 0))
        buffers.prepare(2**24)
        assert buffers.next_buffer(2**24).is_pinned()
        del buffers
        gc.collect()


def test_buffers_of_snapshots_are_pinned_and_grow() -> None:
    buffers = PinnedBuffers(torch.device("cuda", 0))
    data = torch.arange(10_000_000, device="cuda", dtype=torch.int32)
    buffers.prepare(4096)
    small = buffers.next_buffer(4096)
    buffers.prepare(data.nbytes)
    for _ in range(2):
        buffer = buffers.next_buffer(data.nbytes)
        assert buffer.is_pinned()
        view = buffer[: data.nbytes].view(torch.int32)
        view.copy_(data, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(view, data.cpu())
    assert not small.is_pinned()
    assert small.sum() == 0, "a replaced buffer can still be read"
