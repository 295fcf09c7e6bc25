"""Steps per second with callbacks, a heavy metric and an average of the weights, against none of them.

All variants train in this process and take turns, a block of steps each, so that a slow moment of the
machine meets all of them. A block ends with an evaluation. The table has the medians of the blocks, and
of their ratios to the plain block of the same round.

    python -m benchmarks.steps.hooks [--gpu] [--rounds 40] [--out FILE]

Shapes: B samples of a batch, C classes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.config.settings import Config
from orchestrator.live.callbacks.callback_values import EvaluationInfo, StepInfo
from orchestrator.live.callbacks.callbacks import Callback, CallbackRunner
from orchestrator.record.files.event_log import EventLog
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.metrics import AUC
from orchestrator.tasks.task import Loss, Task, TensorData
from orchestrator.train.group.world import World
from orchestrator.train.loop.loop import Loop
from orchestrator.train.worker.build import WorkerContext, build_training
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.trainer import Trainer

NUM_CLASSES = 100
NUM_INPUTS = 256
NEVER = 10**6


@dataclass(frozen=True)
class Sizes:
    """The model, and the length of a block."""

    width: int
    layers: int
    batch: int
    steps: int
    """Steps of a block, and from one evaluation to the next."""
    samples: int = 16_384
    validation_samples: int = 4_096


CPU_SIZES = Sizes(width=256, layers=3, batch=64, steps=50)
GPU_SIZES = Sizes(width=4096, layers=8, batch=512, steps=200)
SMALL_SIZES = Sizes(width=16, layers=1, batch=8, steps=2, samples=64, validation_samples=32)


class Classifier(Task):
    """A stack of linear layers over random vectors, with or without a metric that sorts every score."""

    def __init__(self, sizes: Sizes, with_metric: bool) -> None:
        self._sizes = sizes
        self._with_metric = with_metric
        self.metrics = {"auc": AUC()} if with_metric else {}

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        width = self._sizes.width
        layers: list[nn.Module] = [nn.Linear(NUM_INPUTS, width), nn.ReLU()]
        for _ in range(self._sizes.layers - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))

    def train_data(self) -> TensorData:
        return _random_data(self._sizes.samples, seed=0)

    def validation_data(self) -> TensorData:
        return _random_data(self._sizes.validation_samples, seed=1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels_B = batch
        logits_BC = model(inputs)
        total = F.cross_entropy(logits_BC, labels_B, reduction="sum")
        if not self._with_metric:
            return Loss(total, len(labels_B))
        return Loss(total, len(labels_B), {"auc": (logits_BC, F.one_hot(labels_B, NUM_CLASSES))})


def _random_data(count: int, seed: int) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    inputs: Tensor = torch.randn(count, NUM_INPUTS, generator=generator)
    return TensorData(inputs, torch.randint(NUM_CLASSES, (count,), generator=generator))


class Empty(Callback):
    """A callback that looks at every step and evaluation, and does nothing."""

    def on_step(self, step: StepInfo) -> None:
        pass

    def on_evaluate(self, evaluation: EvaluationInfo) -> None:
        pass


@dataclass(frozen=True)
class Variant:
    """A way to train the same steps."""

    name: str
    num_callbacks: int = 0
    with_metric: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


AVERAGE = {"ema_decay": 0.999}
VARIANTS = (
    Variant("none of them"),
    Variant("two empty callbacks", num_callbacks=2),
    Variant("a metric that sorts all scores", with_metric=True),
    Variant("an average of the weights", settings=AVERAGE),
    Variant("all three", num_callbacks=2, with_metric=True, settings=AVERAGE),
)


def prepare(variant: Variant, sizes: Sizes, on_gpu: bool, run_dir: Path, rounds: int) -> PreparedRun:
    config = Config.of(
        run_dir=run_dir,
        gpu_mode="single_gpu" if on_gpu else "cpu",
        max_steps=(rounds + 2) * sizes.steps,
        batch_size=sizes.batch,
        evaluate_every=sizes.steps,
        checkpoint_every=NEVER,
        epochs=NEVER,
        trackers=(),
        monitor_gpu=False,
        **variant.settings,
    )
    task = Classifier(sizes, variant.with_metric)
    return Trainer(task=task, config=config, quiet=True).prepare()


@contextmanager
def open_loop(variant: Variant, prepared: PreparedRun) -> Iterator[Loop]:
    """Build the training of a variant."""
    config = prepared.resolved.config
    run_dir = config.run.run_dir
    assert run_dir is not None
    run_dir.mkdir(parents=True)
    callbacks = CallbackRunner([Empty() for _ in range(variant.num_callbacks)])
    log = EventLog(run_dir / "events.jsonl", [callbacks])
    callbacks.bind(run_dir, config, log.write)
    world = World.single_process(prepared.plan.device.value)
    training = build_training(WorkerContext(prepared, world, run_dir, log))
    loop = Loop(training)
    try:
        yield loop
    finally:
        loop.close()
        training.close()
        log.close()


def block_seconds(loop: Loop, num_steps: int) -> float:
    """Train a block, and return its time."""
    device = loop.stepper.world.device
    begun_s = perf_counter()
    loop.run_steps(num_steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - begun_s


def measure(sizes: Sizes, on_gpu: bool, rounds: int) -> list[list[float]]:
    """Return the seconds of each round's blocks, in the order of ``VARIANTS``."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        runs = [
            prepare(variant, sizes, on_gpu, Path(folder) / str(number), rounds)
            for number, variant in enumerate(VARIANTS)
        ]
        first = runs[0]
        device = torch.device(first.plan.device.value)
        stack.enter_context(torch_settings(first.resolved.config, first.plan, device))
        loops = [
            stack.enter_context(open_loop(variant, run)) for variant, run in zip(VARIANTS, runs, strict=True)
        ]
        for loop in loops:  # the first block is a warm-up
            block_seconds(loop, sizes.steps)
        seconds = []
        for number in range(rounds):
            # Each round begins with another variant: who follows whom must not matter.
            order = [(number + offset) % len(loops) for offset in range(len(loops))]
            taken = {index: block_seconds(loops[index], sizes.steps) for index in order}
            seconds.append([taken[index] for index in range(len(loops))])
        return seconds


def rows_of(seconds: list[list[float]], steps: int) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    for index, variant in enumerate(VARIANTS):
        speed = steps / statistics.median(blocks[index] for blocks in seconds)
        # Of the speeds: more is faster.
        ratios = sorted(blocks[0] / blocks[index] for blocks in seconds)
        quarter = len(ratios) // 4
        spread = f"{ratios[quarter]:.3f}–{ratios[-1 - quarter]:.3f}"
        rows.append([variant.name, f"{speed:.1f}", f"{statistics.median(ratios):.3f}", spread])
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--gpu", action="store_true", help="a larger model, on the first GPU")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    arguments = parser.parse_args()
    sizes = GPU_SIZES if arguments.gpu else CPU_SIZES
    if arguments.small:
        sizes = SMALL_SIZES
    seconds = measure(sizes, arguments.gpu, arguments.rounds)
    table = markdown_table(
        ["with", "steps/s", "against none", "half of the rounds"], rows_of(seconds, sizes.steps)
    )
    text = (
        f"{sizes.layers} layers of width {sizes.width}, batch {sizes.batch}; blocks of {sizes.steps} steps "
        f"with an evaluation of {sizes.validation_samples:,} samples at their end.\n\n"
    )
    publish(header("Callbacks, metrics and averages in the loop", arguments) + text + table, arguments.out)


if __name__ == "__main__":
    main()
