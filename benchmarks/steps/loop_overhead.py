"""Steps per second of our loop against a hand-written PyTorch loop of the same model, batch and
precision.

Both get the same data on the device, the same fused AdamW, clipping and schedule; ours runs with
everything a user gets: events, TensorBoard, monitor, phase timers. Rounds alternate.
Accelerate, where it is installed, runs the same steps in the form of its documentation.

The bare loop and Accelerate take PyTorch's cross-entropy of all logits. Against the bare loop with our loss
a ratio is that of the loops alone. Ratios are medians of those of single rounds.

    python -m benchmarks.steps.loop_overhead [--rounds 5] [--out FILE]
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.config.settings import Config
from orchestrator.live.callbacks.callback_values import StepInfo
from orchestrator.live.callbacks.callbacks import Callback, CallbackRunner
from orchestrator.live.trackers.trackers import TrackerThread
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.machine.monitor import Monitor
from orchestrator.tasks import token_loss
from orchestrator.tasks.synthetic import Synthetic
from orchestrator.tasks.task import Task, TensorData
from orchestrator.train.group.world import World
from orchestrator.train.loop.loop import Loop
from orchestrator.train.loop.training import LoopHooks
from orchestrator.train.worker.build import WorkerContext, build_training
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.trainer import Trainer


class Mlp(Task):
    """Three layers over vectors the size of an MNIST image."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(60_000, 784, generator=generator)
        labels = torch.randint(10, (60_000,), generator=generator)
        return TensorData(images, labels)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])


class Gpt2(Synthetic):
    """A decoder of GPT-2 small's size, dense, over random tokens."""

    settings_read = ("experts", "layers", "samples", "sequence_length", "vocabulary", "width")

    def validation_data(self) -> Any:
        return None


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    name: str
    make: Callable[[], Task]
    config: Config
    batch: int
    steps: int
    dtype: torch.dtype | None


WARM_UP = 10
LEARNING_RATE = 3e-4
LOG_EVERY = 50
NEVER = 10**6
BASES = ("bare loop", "bare loop, our loss")
GPT2_SIZES: dict[str, Any] = {
    "width": 768,
    "layers": 12,
    "sequence_length": 1024,
    "vocabulary": 50257,
    "experts": 0,
    "samples": 4096,
}
SMALL_SIZES: dict[str, Any] = {
    "width": 64,
    "layers": 2,
    "sequence_length": 64,
    "vocabulary": 256,
    "experts": 0,
    "samples": 512,
}


def cases(small: bool, precision: str) -> list[Case]:
    dtype = torch.bfloat16 if precision == "bf16" else None
    common: dict[str, Any] = {
        "precision": precision,
        "run_dir": None,
        "epochs": 1000,
        "warmup_steps": 10,
        "learning_rate": LEARNING_RATE,
        "log_every": LOG_EVERY,
    }
    sizes = SMALL_SIZES if small else GPT2_SIZES
    gpt_batch = 4 if small else 16
    gpt = Config.of(task="synthetic", batch_size=gpt_batch, **sizes, **common)
    mlp = Config.of(batch_size=256, **common)
    return [
        Case("GPT-2 small", lambda: Gpt2(gpt), gpt, gpt_batch, 10 if small else 40, dtype),
        Case("3-layer MLP", Mlp, mlp, 256, 60 if small else 2000, dtype),
    ]


def lr_factor(step: int, total: int) -> float:
    """Return warm-up and cosine as a factor of the learning rate."""
    return min(1.0, (step + 1) / 11) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / total)))


def batches(data: TensorData, batch: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield shuffled batches of tensors that are on the device already, as a careful hand-written
    loop does.
    """
    while True:
        order = torch.randperm(len(data), device=data.tensors[0].device)
        for begin in range(0, len(data) - batch + 1, batch):
            index = order[begin : begin + batch]
            yield tuple(tensor.index_select(0, index) for tensor in data.tensors)


@contextmanager
def whole_logits() -> Iterator[None]:
    """Compute the loss of tokens by PyTorch's own functions, from the logits of all of them."""
    with patch.object(token_loss, "LARGE_LOGITS", 2**62):
        yield


def loss_of(task: Task, model: nn.Module, batch: Any) -> Tensor:
    result = task.loss(model, batch)
    return result if isinstance(result, Tensor) else result.sum / result.count


def synchronized_time(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@whole_logits()
def bare(case: Case, device: torch.device) -> float:
    """Return the steps per second of the hand-written loop."""
    return bare_with_our_loss(case, device)


def bare_with_our_loss(case: Case, device: torch.device) -> float:
    """Return the steps per second of the hand-written loop around the loss of our tasks."""
    task = case.make()
    model = task.build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    feed = batches(task.train_data().to(device), case.batch)
    begun = 0.0
    for step in range(WARM_UP + case.steps):
        if step == WARM_UP:
            begun = synchronized_time(device)
        batch = next(feed)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * lr_factor(step, case.steps)
        with torch.autocast(device.type, dtype=case.dtype or torch.bfloat16, enabled=case.dtype is not None):
            loss = loss_of(task, model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % LOG_EVERY == 0:
            loss.item()
    return case.steps / (synchronized_time(device) - begun)


class Empty(Callback):
    """A callback that is called at each step and does nothing."""

    def on_step(self, step: StepInfo) -> None:
        pass


def ours(case: Case, device: torch.device, num_callbacks: int = 0) -> float:
    """Return the steps per second of our loop, built as ``orchestrator train`` does, without the
    last checkpoint.
    """
    task = case.make()
    config = case.config.but(max_steps=WARM_UP + case.steps)
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    times: dict[int, float] = {}

    def record_time(step: int) -> None:
        if step in (WARM_UP, WARM_UP + case.steps):
            times[step] = synchronized_time(device)

    with (
        tempfile.TemporaryDirectory() as folder,
        torch_settings(prepared.resolved.config, prepared.plan, device),
    ):
        run_dir = Path(folder)
        trackers = TrackerThread(("tensorboard",), run_dir, "bench", {}, on_warning=print)
        callbacks = CallbackRunner([Empty() for _ in range(num_callbacks)])
        log = EventLog(run_dir / "events.jsonl", [trackers, callbacks])
        callbacks.bind(run_dir, prepared.resolved.config, log.write)
        world = World.single_process(prepared.plan.device.value)
        training = build_training(WorkerContext(prepared, world, run_dir, log))
        # a hand-written loop saves nothing either
        training.checkpoints.save = lambda progress: None  # noqa: ARG005
        training.checkpoints.durable_step = WARM_UP + case.steps
        gpus = tuple(gpu.uuid or gpu.index for gpu in prepared.inventory.gpus)
        with Monitor(gpus) as monitor:
            Loop(training, LoopHooks(after_step=record_time, monitor=monitor.newest)).run()
        training.close()
        trackers.close()
        log.close()
    return case.steps / (times[WARM_UP + case.steps] - times[WARM_UP])


def without_graph(case: Case, device: torch.device) -> float:
    """Return the steps per second of our loop where Python launches each kernel."""
    return ours(replace(case, config=case.config.but(cuda_graph="off")), device)


def under_ray(case: Case, device: torch.device) -> float:  # noqa: ARG001
    """Return the steps per second of one worker of Ray Train, in a process of its own.

    A user starts it with ``--parallel-strategy data_parallel --workers 1``. The rate is that of its
    summary, which leaves out the first steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = case.config.but(
            max_steps=WARM_UP + case.steps,
            parallel_strategy="data_parallel",
            workers=1,
            ray_address="local",
            run_dir=Path(folder) / "run",
            checkpoint_every=NEVER,
        )
        summary = Trainer(task=case.make(), config=config, quiet=True).fit().summary
        return summary["samples_per_second"] / case.batch


@whole_logits()
def accelerate(case: Case, device: torch.device) -> float:
    """Return the steps per second of a loop in the form of Accelerate's documentation."""
    from accelerate import Accelerator

    task = case.make()
    mixed = "bf16" if case.dtype else "no"
    accelerator = Accelerator(mixed_precision=mixed, cpu=device.type == "cpu")
    unwrapped = task.build_model()
    adamw = torch.optim.AdamW(unwrapped.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    model, optimizer = accelerator.prepare(unwrapped, adamw)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer.optimizer, lambda step: lr_factor(step, case.steps)
    )
    feed = batches(task.train_data().to(device), case.batch)
    begun = 0.0
    for step in range(WARM_UP + case.steps):
        if step == WARM_UP:
            begun = synchronized_time(device)
        with accelerator.accumulate(model), accelerator.autocast():
            loss = loss_of(task, model, next(feed))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if (step + 1) % LOG_EVERY == 0:
            loss.item()
    return case.steps / (synchronized_time(device) - begun)


def contestants() -> dict[str, Callable[[Case, torch.device], float]]:
    named: dict[str, Callable[[Case, torch.device], float]] = {
        BASES[0]: bare,
        BASES[1]: bare_with_our_loss,
        "orchestrator": ours,
        "orchestrator, --cuda-graph off": without_graph,
        "orchestrator, two callbacks": partial(ours, num_callbacks=2),
    }
    if importlib.util.find_spec("accelerate"):
        named["accelerate"] = accelerate
    return named | {"orchestrator, one worker of Ray Train": under_ray}


def measure(case: Case, device: torch.device, rounds: int, names: Sequence[str]) -> list[list[str]]:
    """Return the rows of one model. The loops of these names alternate."""
    loops = {name: run for name, run in contestants().items() if name in names or not names}
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, run in loops.items():
            speeds[name].append(run(case, device))
            print(f"{case.name}, {name}: {speeds[name][-1]:.2f} steps/s", flush=True)
    rows = []
    for name, values in speeds.items():
        spread = f"{min(values):.2f}–{max(values):.2f}"
        ratios = [f"{paired_ratio(values, speeds[base]):.3f}" for base in BASES]
        rows.append([case.name, name, f"{statistics.median(values):.2f}", spread, *ratios])
    return rows


def paired_ratio(values: Sequence[float], bases: Sequence[float]) -> float:
    """Return the median of the ratios of single rounds."""
    return statistics.median(value / base for value, base in zip(values, bases, strict=True))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small shapes, for a machine without a GPU")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--cases", type=int, default=2, help="only the first so many models")
    parser.add_argument("--loops", nargs="*", default=[], help="only these loops, and always both bare ones")
    arguments = parser.parse_args()
    names = [*BASES, *arguments.loops] if arguments.loops else []
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    chosen = cases(arguments.small, arguments.precision)[: arguments.cases]
    rows = [row for case in chosen for row in measure(case, device, arguments.rounds, names)]
    columns = ["model", "loop", "steps/s (median)", "range", *(f"against {base}" for base in BASES)]
    text = header("The loop against a bare one", arguments) + markdown_table(columns, rows)
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
