"""--reproducible with shards, optimizers and evaluations: no bit depends on the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.hosts.ranks import run_ranks
from harness.runs.combinations import Validated
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.metric import Metric
from orchestrator.config.settings import Config
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.task import Loss, Task
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.evaluation.metric_states import MetricStates
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.optim import named_optimizers
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.strategies import host_mesh, reproducible_shards
from orchestrator.train.strategies.reproducible_shards import ShardedReproducibleStrategy
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer

STEPS = 6
SETTINGS: dict[str, Any] = {
    "reproducible": True,
    "epochs": 10,
    "batch_size": 4,
    "global_batch_size": 18,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "clip_norm": 0.01,  # always clips: the norm shows in the weights
    "log_every": 1,
    "evaluate_every": 3,
    "checkpoint_every": 3,
    "trackers": (),
    "monitor_gpu": False,
    "gpu_mode": "cpu",
    "plots": "off",
}
"""41 samples: the last step of an epoch has two micro-batches, of 4 samples and of 1."""
OF_WORKERS = ("parallel_strategy", "sharding")


class Spread(Metric):
    """A metric with a sum in fp32, and rows of which the order shows."""

    total: Tensor
    rows: Any

    def __init__(self) -> None:
        super().__init__("min")
        self.add_state("total", torch.zeros(3))
        self.add_state("rows", reduce="gather")

    def update(self, values_B: Tensor) -> None:
        self.total = self.total + torch.stack([values_B.sum(), values_B.square().sum(), values_B.exp().sum()])
        self.rows.append(values_B)

    def compute(self) -> Tensor:
        place_N = torch.arange(1, len(self.rows) + 1)
        return self.total.sum() + (self.rows.double() / place_N).sum()


@dataclass(frozen=True)
class Measured(Validated):
    """The tiny model with a metric that is a sum, and one that has a state."""

    @property
    def metrics(self) -> Mapping[str, Metric]:  # type: ignore[override]
        return {"spread": Spread(), "margin": Metric("max")}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        with torch.no_grad():
            values = model(batch[0])[0].flatten()
        metrics: dict[str, Any] = {"margin": values.sum()}
        if not model.training:
            metrics["spread"] = (values,)
        return Loss(found.sum, found.count, metrics, found.loads)


TASK = Measured(((8, 8, 12, 8, 8, 7, 20), (8, 12, 8)), samples=41, dtype=torch.float32, tokens=5)


@dataclass(frozen=True)
class State:
    """Everything that a run leaves: its tensors, and the events of steps and evaluations."""

    tensors: Mapping[str, Tensor]
    losses: tuple[tuple[float, float], ...]
    """Loss and norm of the gradient of each step."""
    evaluations: tuple[tuple[float, Mapping[str, float]], ...]

    @classmethod
    def of(cls, run_dir: Path) -> State:
        loaded, _ = CheckpointStore(run_dir / "checkpoints", repair=False).newest_good()
        assert loaded is not None
        events = read_events(run_dir / "events.jsonl")
        return cls(
            {f"{kind}/{name}": t for kind, of in loaded.contents.tensors.items() for name, t in of.items()},
            tuple((event["loss"], event["grad_norm"]) for event in of_kind(events, "step")),
            tuple((event["loss"], event["metrics"]) for event in of_kind(events, "evaluate")),
        )

    def differences(self, other: State) -> list[str]:
        names = sorted(self.tensors.keys() | other.tensors.keys())
        found = [name for name in names if not _same_bits(self.tensors.get(name), other.tensors.get(name))]
        found += ["losses"] if self.losses != other.losses else []
        return found + (["evaluations"] if self.evaluations != other.evaluations else [])


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


def train(world: World, task: Task | None, settings: Mapping[str, Any], run_dir: Path, steps: int) -> None:
    """Train until a step, from the checkpoint that there may be."""
    resume = {"resume": "auto"} if run_dir.exists() else {}
    own = {"max_steps": steps, "run_dir": run_dir, "workers": world.size}
    config = Config.of(**{**settings, **resume, **own})
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    log: Log = SilentLog()
    world.barrier()  # the folder exists from here on
    if world.is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        log = EventLog(run_dir / "events.jsonl")
    with closing(log):
        run_worker(prepared, world, run_dir, log, Supervision())


Cases = Mapping[str, tuple[Task | None, Mapping[str, Any]]]


def train_cases(rank: int, size: int, store: str, cases: Cases, folder: Path, steps: int, fault: str) -> None:
    """Train each case in a folder of its own, with a planted fault if one is named."""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            FAULTS[fault](patch)
        for number, (name, (task, settings)) in enumerate(cases.items()):
            path = file_store(f"{store}-{number}", size)
            with process_group_world(path, rank, size, torch.device("cpu"), "gloo", 60) as world:
                train(world, task, settings, folder / name, steps)


def one_process(cases: Cases, folder: Path, steps: int = STEPS) -> None:
    """Train each case in one process. Settings of workers do not apply there."""
    for name, (task, settings) in cases.items():
        own = {key: value for key, value in settings.items() if key not in OF_WORKERS}
        train(World.single_process(), task, own, folder / name, steps)


# --- planted faults


def _sum_in_fp32(patch: pytest.MonkeyPatch) -> None:
    """Add up the gradients of a round before they are rounded."""

    def scatter(self: Any, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        summed = torch.empty_like(output_tensor)
        self._group.reduce_scatter(summed, input_tensor).wait()
        self._output = output_tensor
        self._multiples = self._to_multiples(summed)

    patch.setattr(host_mesh.ScatterExactly, "__call__", scatter)


def _norm_by_shard(patch: pytest.MonkeyPatch) -> None:
    """Add up the squares of each shard in floating point."""

    def square(gradients: list[Tensor], device: torch.device, group: Any = None) -> Tensor:
        total = sum((g.square().sum() for g in gradients), torch.zeros((), device=device)).double()
        group.all_reduce(total.reshape(1)).wait()
        return total

    patch.setattr(reproducible_shards, "exact_square", square)


def _torch_adamw(patch: pytest.MonkeyPatch) -> None:
    """Update shards by torch's kernel."""
    patch.setattr(AdamW, "_is_own", lambda *_: False)


def _torch_sgd(patch: pytest.MonkeyPatch) -> None:
    """Update stacks by torch's kernel."""

    def build(groups: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)

    patch.setattr(named_optimizers, "ElementwiseSGD", build)


def _dummies_count(patch: pytest.MonkeyPatch) -> None:
    """Add the gradients of dummy samples of workers that have none."""

    def on_scatter(self: Any, parameter_ids: set[int], gradients: Tensor) -> Tensor:
        for stack in self._sharded_stacks:
            if id(stack) in parameter_ids:
                self._scatter(stack)
        extra = 1e-3 if self._in_dummy_pass else 0.0
        return self.sums.to_multiples(gradients + extra)

    patch.setattr(ShardedReproducibleStrategy, "_on_scatter", on_scatter)


def _sums_of_workers(patch: pytest.MonkeyPatch) -> None:
    """Add up the figures of an evaluation by worker."""
    patch.setattr(Evaluation, "_num_parts", lambda *_: 0)


def _states_of_workers(patch: pytest.MonkeyPatch) -> None:
    """Add up the states of metrics by worker."""
    original = MetricStates.__init__

    def start(self: Any, declared: Any, device: Any, exactly: bool = False) -> None:
        del exactly
        original(self, declared, device)

    patch.setattr(MetricStates, "__init__", start)


FAULTS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "sum in fp32": _sum_in_fp32,
    "norm by shard": _norm_by_shard,
    "torch's AdamW": _torch_adamw,
    "torch's SGD": _torch_sgd,
    "dummies count": _dummies_count,
    "sums of workers": _sums_of_workers,
    "states of workers": _states_of_workers,
}


# --- the cases

DATA: dict[str, Any] = {"parallel_strategy": "data_parallel"}
EXPERTS: dict[str, Any] = {"parallel_strategy": "expert_parallel"}
CASES: Mapping[str, Mapping[str, Any]] = {
    "data-zero2": {**DATA, "sharding": "zero2", "ema_decay": 0.9, "evaluate_ema": True},
    "data-zero3-sgd": {**DATA, "sharding": "zero3", "optimizer": "sgd"},
    "data-zero3-fp16": {**DATA, "sharding": "zero3", "precision": "fp16", "activation_checkpointing": "on"},
    "experts-zero2": {**EXPERTS, "sharding": "zero2", "ema_decay": 0.9},
    "experts-zero3-sgd-bf16": {**EXPERTS, "sharding": "zero3", "optimizer": "sgd", "precision": "bf16"},
    "experts-sgd": {**EXPERTS, "optimizer": "sgd", "ema_decay": 0.9},
    "data-8bit": {**DATA, "optimizer": "adamw8bit"},
    "experts-8bit": {**EXPERTS, "optimizer": "adamw8bit"},
    "data-muon": {**DATA, "optimizer": "muon"},
    "experts-muon": {**EXPERTS, "optimizer": "muon"},
    "data-zero2-8bit": {**DATA, "sharding": "zero2", "optimizer": "adamw8bit"},
    "data-zero3-muon": {**DATA, "sharding": "zero3", "optimizer": "muon"},
    "experts-zero3-8bit": {**EXPERTS, "sharding": "zero3", "optimizer": "adamw8bit"},
    "experts-zero2-muon": {**EXPERTS, "sharding": "zero2", "optimizer": "muon"},
}


def cases_of(names: list[str]) -> Cases:
    return {name: (TASK, {**SETTINGS, **CASES[name]}) for name in names}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[State, State]]:
    """The states of each case: of one process, and of 2 workers whose run goes on on 3 workers."""
    folder = tmp_path_factory.mktemp("reproducible")
    cases = cases_of(list(CASES))
    one_process(cases, folder / "one")
    run_ranks(train_cases, 2, cases, folder / "workers", STEPS // 2, "", timeout=600)
    run_ranks(train_cases, 3, cases, folder / "workers", STEPS, "", timeout=600)
    return lambda name: (State.of(folder / "one" / name), State.of(folder / "workers" / name))


@pytest.mark.extended
@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_the_workers(name: str, outcomes: Callable[[str], tuple[State, State]]) -> None:
    one, workers = outcomes(name)
    assert len(one.losses) == STEPS
    assert one.differences(workers) == []


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of a run in one process, which planted faults are compared with."""
    folder = tmp_path_factory.mktemp("short")
    one_process(cases_of(["data-zero2", "experts-sgd"]), folder, steps=STEPS // 2)
    return folder


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("sum in fp32", "data-zero2"),
        ("norm by shard", "data-zero2"),
        ("torch's AdamW", "data-zero2"),
        ("torch's SGD", "experts-sgd"),
        ("dummies count", "data-zero2"),
        ("sums of workers", "data-zero2"),
        ("states of workers", "data-zero2"),
    ],
)
def test_a_planted_fault_shows(fault: str, name: str, short_runs: Path, tmp_path: Path) -> None:
    run_ranks(train_cases, 3, cases_of([name]), tmp_path, STEPS // 2, fault, timeout=250)
    assert State.of(short_runs / name).differences(State.of(tmp_path / name)) != []
