"""Predicted against measured memory of random small configurations on CPUs.

Each configuration trains two steps in processes of its own, and torch's profiler counts the bytes that the
allocator has given out. Sizes do not depend on the load of the machine, so that it may be busy.
``benchmarks.planning.costmodel --memory`` prints the table.
"""

from __future__ import annotations

import random
import statistics
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.planning.costmodel_cases import Case, digits, text, tokens, vectors
from benchmarks.planning.costmodel_steps import peak_bytes
from benchmarks.support import markdown_table
from experts.balance import moe_layers
from harness.hosts.ranks import run_ranks
from orchestrator.config.settings import Config
from orchestrator.errors import OrchestratorError
from orchestrator.measure.timed_steps import build_step_runner
from orchestrator.measure.tracing.fake_batches import fake_tensor_mode
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.tasks.load import load_task
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.strategies.ddp import STEPS_BEFORE_OVERLAP
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import MIB

SPARE = 0.05
"""A run fits with this share of the memory to spare, or should have been refused."""
_LARGE = 50_257  # words, whose logits are computed in chunks
_LONGEST_S = 60.0
_WORKERS = 2
_STEPS = {"single": 2, "expert_parallel": 2, "data_parallel": STEPS_BEFORE_OVERLAP + 2}
"""The second step has the optimizer's state; DDP begins late."""


@dataclass(frozen=True)
class MemoryRow:
    """A configuration with its predicted and its measured peak."""

    case: Case
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_accepted_over(self) -> bool:
        """Whether a device with too little memory, by as much as counts, would be accepted."""
        return self.error < -SPARE

    @property
    def is_refused(self) -> bool:
        """Whether a device on which the run fits with memory to spare would be refused."""
        return self.error > SPARE / (1 - SPARE)


def random_cases(count: int, seed: int) -> list[Case]:
    """Return configurations of all tasks and strategies that the plan accepts."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        case = _draw_case(draw)
        if _is_accepted(case):
            cases.append(case)
    return cases


def _draw_case(draw: random.Random) -> Case:
    strategy = draw.choices(("single", "data_parallel", "expert_parallel"), (4, 1, 2))[0]
    settings = _draw_model(draw, strategy == "expert_parallel")
    settings["optimizer"] = draw.choice(("adamw", "adamw", "adamw8bit", "muon", "sgd"))
    batch = draw.choice((2, 12) if settings.get("vocabulary") == _LARGE else (2, 5, 16, 48))
    if draw.random() < 0.25:
        settings["accumulation_steps"] = 2
    if draw.random() < 0.3 and settings.get("layers", 1) > 1:
        settings["activation_checkpointing"] = "on"
    elif settings.get("experts") and draw.random() < 0.2:
        settings["recompute_experts"] = True
    if draw.random() < 0.1:
        settings["weight_precision"] = "bf16"
    if draw.random() < 0.1:
        settings["ema_decay"] = 0.9
    if strategy != "single" and draw.random() < 0.3:
        settings["sharding"] = draw.choice(("zero2", "zero3"))
    return Case(settings, batch, 1 if strategy == "single" else _WORKERS, strategy)


def _draw_model(draw: random.Random, with_experts: bool) -> dict[str, Any]:
    experts = draw.choice((4, 6, 8)) if with_experts or draw.random() < 0.4 else 0
    sizes: dict[str, Any] = {"experts": experts, "width": draw.choice((48, 96, 128, 192))}
    if experts:
        sizes |= {"expert_hidden_size": draw.choice((64, 160, 320)), "top_k": draw.choice((1, 2))}
    sizes["layers"] = draw.choice((1, 2, 3, 6))
    kind = draw.choice(("text", "digits", "tokens", "large vocabulary", "vectors"))
    if kind == "text":
        return text(**sizes, sequence_length=draw.choice((32, 96)))
    if kind == "digits":
        return digits(**sizes, evolution="off")
    if kind == "vectors":
        return vectors(**sizes)
    if kind == "tokens":
        return tokens(**sizes, sequence_length=draw.choice((24, 64)), vocabulary=draw.choice((300, 5000)))
    return tokens(**sizes | {"layers": 2, "width": 64}, sequence_length=100, vocabulary=_LARGE)


def _is_accepted(case: Case) -> bool:
    try:
        _choose_plan(case)
    except OrchestratorError:
        return False
    return True


def _choose_plan(case: Case) -> tuple[Config, Plan, Any]:
    config = case.config(on_gpu=False)
    task = load_task(config)
    facts = model_facts(task, "cpu", "fp32", short_weights=config.device.short_weights)
    return config, plan(config, inventory(), facts), task


def rows(cases: Sequence[Case]) -> Iterator[MemoryRow]:
    """Plan and measure the configurations one after another."""
    for case in cases:
        found = run_ranks(_measure, case.workers, case, timeout=_LONGEST_S)
        predicted = max(each[0] for each in found)
        yield MemoryRow(case, predicted, max(each[1] for each in found))


def _measure(rank: int, size: int, store: str, case: Case) -> tuple[float, float]:
    """Return the planned bytes, and the most that this worker had at once in two steps."""
    torch.set_num_threads(1)
    config, chosen, task = _choose_plan(case)
    cpu = torch.device("cpu")
    with torch_settings(config, chosen, cpu):
        if size == 1:
            return chosen.memory.total, _peak(case, config, chosen, task, World.single_process())
        with process_group_world(file_store(store, size), rank, size, cpu, "gloo", _LONGEST_S) as world:
            return chosen.memory.total, _peak(case, config, chosen, task, world)


def _peak(case: Case, config: Config, chosen: Plan, task: Any, world: World) -> float:
    host_of = None
    if case.strategy == "expert_parallel":
        with fake_tensor_mode():
            layers = moe_layers(task.build_model())
        host_of = [[expert % world.size for expert in range(len(layer.load_E))] for _, layer in layers]
    data = task.train_data()
    task.train_data = lambda: data  # made before: it is no part of a step
    # The profiler sees what operations hold within them, but not what other threads free, as gloo's do.
    profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    live = _LivePeak()
    with profiled if world.size == 1 else live:
        run = build_step_runner(config, chosen, task, world, case.batch, host_of)
        for step in range(_STEPS[case.strategy]):
            run(step)
    return peak_bytes(profiled) if world.size == 1 else live.peak


class _LivePeak(TorchDispatchMode):
    """Finds the most bytes that tensors have after an operation. A storage may change its size meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        alive = (reference() for reference in self._storages.values())
        sizes = {each._cdata: each.nbytes() for each in alive if each is not None}
        self._storages = {key: self._storages[key] for key in sizes}
        self.peak = max(self.peak, float(sum(sizes.values())))
        return result


def memory_table(found: Sequence[MemoryRow]) -> str:
    """Return the rows, and the errors of all."""
    columns = ["configuration", "where", "planned MiB", "measured MiB", "error"]
    lines = [
        (
            row.case.name,
            row.case.where,
            f"{row.predicted / MIB:.2f}",
            f"{row.measured / MIB:.2f}",
            f"{row.error:+.1%}",
        )
        for row in found
    ]
    return markdown_table(columns, lines) + "\n" + _summary(found)


def _summary(found: Sequence[MemoryRow]) -> str:
    columns = [
        "where",
        "configurations",
        "median",
        "p95",
        "worst",
        "accepted but over",
        "refused though it fits",
    ]
    places = sorted({row.case.where for row in found})
    groups = [
        ("all", list(found)),
        *((place, [r for r in found if r.case.where == place]) for place in places),
    ]
    return markdown_table(columns, [_errors(name, group) for name, group in groups])


def _errors(name: str, group: Sequence[MemoryRow]) -> list[object]:
    sizes = sorted(abs(row.error) for row in group)
    p95 = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    figures = [f"{value:.1%}" for value in (statistics.median(sizes), p95, sizes[-1])]
    over = sum(row.is_accepted_over for row in group)
    return [name, len(group), *figures, over, sum(row.is_refused for row in group)]
