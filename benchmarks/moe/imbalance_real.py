"""Steps on real processes under forced loads, for ``benchmarks.moe.imbalance --real``.

Each host is a process with one MoE layer, whose gate chooses experts by a given distribution.
Three variants of a case alternate in blocks of steps: experts that stay, experts that the balancer of a run
moves and copies, and even loads (force-balanced). Then the layer runs with one and two expert groups."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.model import initialise, place, place_structure
from experts.moe.gate import Gate
from experts.moe.layer import MoELayer
from experts.placement.placement import HostFacts
from experts.rebalance.costs import Cluster
from experts.rebalance.decisions import layer_imbalance
from experts.rebalance.replicas import replica_placement
from experts.structure import LayerStructure
from experts.types import Routing
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.config.settings import Config
from orchestrator.record.files.log import SilentLog
from orchestrator.tasks.task import Loss, Task, TensorData
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.device.clock import PhaseClock
from orchestrator.train.device.precision import Precision
from orchestrator.train.evolution.balancer import FIRST_INTERVAL, HostBalancer, layer_costs
from orchestrator.train.evolution.engine import Evolution
from orchestrator.train.evolution.plan import EvolutionPlan
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.optim.named_optimizers import build_named_optimizer
from orchestrator.train.optim.optimizer import ScheduledOptimizer, warmup_schedule
from orchestrator.train.stepper import Stepper
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy
from orchestrator.train.worker.build_evolution import CHANGE_SECONDS

WIDTH = 256
HIDDEN = 384
TOP_K = 1
SPEED = 6e10  # FLOPs per second of a core, for the balancer
BANDWIDTH = 1e9
UPDATE_BANDWIDTH = 4e9
ADAMW_BYTES = 16  # a weight in fp32, its gradient and two averages
BLOCK = 5
"""Steps of one variant before the next one: noise of the machine hits all alike."""

Loads = Sequence[np.ndarray]
"""The shares of the tokens that the experts get, step by step."""


class ForcedGate(Gate):
    """A gate that chooses experts by given shares, whatever it is shown. Its weights stay in use."""

    shares: np.ndarray
    seed: int = 0

    def forward(
        self, x_TD: Tensor, previous_E: Tensor, noise_TD: Tensor | None = None, replay: Any = None
    ) -> Routing:
        routing = super().forward(x_TD, previous_E, noise_TD, replay)
        edges_E = np.round(np.cumsum(self.shares) * len(x_TD)).astype(np.int64)
        expert_T = np.searchsorted(edges_E, np.arange(len(x_TD)), side="right")
        expert_T = np.random.default_rng(self.seed).permutation(expert_T.clip(max=len(self.shares) - 1))
        experts_TK = torch.from_numpy(expert_T).unsqueeze(1)
        counts_E = torch.bincount(experts_TK.flatten(), minlength=len(self.shares))
        return replace(routing, experts_TK=experts_TK, counts_E=counts_E)


class ForcedLayer(Task):
    """One layer with a forced gate. A sample is a token."""

    units_per_sample = WIDTH

    def __init__(self, num_experts: int, tokens: int) -> None:
        self.num_experts = num_experts
        self.tokens = tokens

    def build_model(self) -> nn.Module:
        layer = MoELayer(WIDTH, [HIDDEN] * self.num_experts, TOP_K)
        layer.gate = ForcedGate(WIDTH, self.num_experts, TOP_K)
        model = nn.Sequential(layer)
        initialise(model, 0)
        return model

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(1)
        return TensorData(*torch.randn(2, self.tokens, WIDTH, generator=generator))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        x_TD, target_TD = batch
        output_TD, routing = model(x_TD)
        total = (output_TD - target_TD).square().sum()
        return Loss(total, target_TD.numel(), loads=(routing.counts_E,))


@dataclass
class Figures:
    """Figures of the steps of one variant on one host."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    """Sent by all hosts."""
    change_seconds: list[float] = field(default_factory=list)
    """Of all changes after a step."""
    quiet_seconds: list[float] = field(default_factory=list)
    """Of a decision that changes nothing."""
    num_changes: int = 0


class Variant:
    """One way to place the experts: it trains a model of its own."""

    def __init__(self, world: World, tokens: int, loads: Loads, balances: bool, replicas: int = 1) -> None:
        num_experts = len(loads[0])
        task = ForcedLayer(num_experts, tokens * world.size)
        self.world = world
        self.loads = loads
        self.figures = Figures()
        self.step = 0
        model = task.build_model()
        group = world.size // replicas
        host_of = [expert % group for expert in range(num_experts)]
        if replicas > 1:
            layers = [LayerStructure.initial("0", [HIDDEN] * num_experts, host_of)]
            place_structure(model, replica_placement(layers, world.size, replicas), world.rank, world.size)
        else:
            place(model, [host_of], world.rank)
        ((_, self.layer),) = moe_layers(model)
        hosts = (HostFacts(SPEED),) * world.size
        self.cluster = Cluster(hosts, BANDWIDTH, UPDATE_BANDWIDTH, CHANGE_SECONDS)
        self.feed = open_feed(
            task.train_data(),
            world,
            global_batch=tokens * world.size,
            micro_batch=tokens,
            seed=0,
            loader=LoaderOptions(),
        )
        adamw = build_named_optimizer(model, Config.of().optim, fused=True)
        self.stepper = Stepper(
            world=world,
            strategy=ExpertParallelStrategy(model, task, world, 1, None),
            optimizer=ScheduledOptimizer(adamw, warmup_schedule("constant", 0, 10_000)),
            precision=Precision("fp32", world.device),
            micro_batch=tokens,
            seed=0,
            clip_norm=1.0,
            clock=PhaseClock(),
            emit=SilentLog().write,
        )
        self.evolution = self._evolution() if balances else None
        self.progress = Progress()

    def _evolution(self) -> Evolution:
        balancer = HostBalancer([layer_costs(self.layer, ADAMW_BYTES)], self.cluster)
        plan = EvolutionPlan(0, lambda _: 1, balancer=balancer, moves=True)
        state = EvolutionState(balance_interval=FIRST_INTERVAL)
        return Evolution(plan, self.stepper, SilentLog(), None, state)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._run_step()

    def _run_step(self) -> None:
        gate = self.layer.gate
        assert isinstance(gate, ForcedGate)
        gate.shares = self.loads[self.step]
        gate.seed = self.step * self.world.size + self.world.rank
        batch = next(iter(self.feed.steps(self.step)))
        self.world.barrier()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        totals = self.stepper.run(batch, self.step)
        self.figures.seconds.append(time.perf_counter() - began_s)
        self.figures.cpu_seconds.append(time.process_time() - began_cpu_s)
        assert totals.exchange_stats is not None
        self.figures.bytes.append(float(totals.exchange_stats[0]))
        self.step += 1
        loads = self.layer.load_E.tolist()
        structure = self.layer.structure
        self.figures.imbalances.append(
            layer_imbalance(structure, loads, layer_costs(self.layer, ADAMW_BYTES), self.cluster)
        )
        if self.evolution is not None:
            self._change(structure)

    def _change(self, before: LayerStructure) -> None:
        assert self.evolution is not None
        self.progress.step = self.step
        if not self.evolution.is_due(self.progress):
            return
        began_s = time.perf_counter()
        self.evolution.after_step(self.progress)
        seconds = time.perf_counter() - began_s
        has_changed = self.layer.structure != before
        (self.figures.change_seconds if has_changed else self.figures.quiet_seconds).append(seconds)
        self.figures.num_changes += has_changed


# --- processes

Job = Callable[[World, int, Any], list[Figures]]


def alternating_variants(world: World, tokens: int, loads: Loads) -> list[Figures]:
    """Run the variants of a case in blocks of steps: experts that stay, balanced experts, even loads."""
    even = [np.full_like(loads[0], 1 / len(loads[0]))] * len(loads)
    stay, balanced = (Variant(world, tokens, loads, balances) for balances in (False, True))
    variants = [stay, balanced, Variant(world, tokens, even, False)]
    for begin in range(0, len(loads), BLOCK):
        for variant in variants:
            variant.run(min(BLOCK, len(loads) - begin))
    return [variant.figures for variant in variants]


def replica_variants(world: World, tokens: int, loads: Loads) -> list[Figures]:
    """Run a few steps with one and with two expert groups."""
    variants = [Variant(world, tokens, loads, False, replicas) for replicas in (1, 2)]
    for variant in variants:
        variant.run(len(loads))
    return [variant.figures for variant in variants]


def run_on_hosts(job: Job, hosts: int, tokens: int, cases: Sequence[Loads]) -> list[list[list[Figures]]]:
    """Run cases on new processes, with so many tokens a step on each.

    Return the figures by case, variant and host."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        arguments = (hosts, folder, job, tokens, list(cases), queue)
        processes = [context.Process(target=_host_main, args=(rank, *arguments)) for rank in range(hosts)]
        for process in processes:
            process.start()
        found = queue.get(timeout=600)
        for process in processes:
            process.join()
    return [[[Figures(**host) for host in variant] for variant in case] for case in found]


def _host_main(
    rank: int,
    hosts: int,
    folder: str,
    job: Job,
    tokens: int,
    cases: list[Loads],
    queue: Any,
) -> None:
    torch.set_num_threads(1)
    found: list[Any] = []
    for number, loads in enumerate(cases):
        store = file_store(str(Path(folder) / f"case-{number}"), hosts)
        # A group for each case: the names of decisions are used once in a group.
        with process_group_world(store, rank, hosts, torch.device("cpu"), "gloo", 120) as world:
            by_host = world.gather_values([asdict(figures) for figures in job(world, tokens, loads)])
            found.append([list(variant) for variant in zip(*by_host, strict=True)])
    if rank == 0:
        queue.put(found)


# --- tables

COLUMNS = [
    "loads",
    "max/mean without",
    "max/mean with",
    "steps until ≤ 1.05",
    "throughput without",
    "throughput with",
    "by CPU time: without",
    "by CPU time: with",
    "ms per step, even",
    "changes",
    "ms moving, in all",
    "share of the time",
    "ms of a decision without change",
]
NOTE = """Each host computes {tokens} tokens a step; {experts} experts of {hidden} × {width}, top-1, fp32, one
thread per host. The variants alternate every {block} steps. Throughput is the share of that of even loads
(force-balanced): the ratio of the median steps of two blocks that follow each other. Shown are the median
of all such pairs and, in brackets, the quartiles; CPU time is that of the busiest host. The first half of the
steps is left out, and with it the warm-up of the processes. Max/mean is of the second half too. "Until" is
the first of ten steps that are balanced in the mean.

"""


def row(name: str, case: list[list[Figures]]) -> list[object]:
    """Return the figures of a case: of experts that stay, balanced experts, and even loads."""
    stay, balanced, even = case
    shares = [_shares(even, variant, _wall_seconds) for variant in (stay, balanced)]
    cpu_shares = [_shares(even, variant, _cpu_seconds) for variant in (stay, balanced)]
    main = balanced[0]
    return [
        name,
        f"{statistics.mean(_late(stay[0].imbalances)):.2f}",
        f"{statistics.mean(_late(main.imbalances)):.3f}",
        _steps_until_balanced(main.imbalances),
        *map(_with_quartiles, (*shares, *cpu_shares)),
        f"{1000 * statistics.median(_late(_wall_seconds(even))):.0f}",
        main.num_changes,
        f"{1000 * sum(main.change_seconds):.0f}",
        f"{sum(main.change_seconds) / sum(main.seconds):.1%}",
        f"{1000 * statistics.median(main.quiet_seconds):.1f}" if main.quiet_seconds else "–",
    ]


def _shares(even: list[Figures], variant: list[Figures], seconds: Callable[..., list[float]]) -> list[float]:
    """Return the throughput as a share of that of even loads, in each block of the second half."""
    even_blocks = _block_medians(seconds(even))
    blocks = _block_medians(seconds(variant))
    return _late([even_s / s for even_s, s in zip(even_blocks, blocks, strict=True)])


def _block_medians(seconds: Sequence[float]) -> list[float]:
    return [statistics.median(seconds[begin : begin + BLOCK]) for begin in range(0, len(seconds), BLOCK)]


def _with_quartiles(shares: Sequence[float]) -> str:
    low, median, high = np.quantile(shares, [0.25, 0.5, 0.75])
    return f"{median:.0%} ({low:.0%} to {high:.0%})"


def _wall_seconds(hosts: list[Figures]) -> list[float]:
    return [max(step) for step in zip(*(host.seconds for host in hosts), strict=True)]


def _cpu_seconds(hosts: list[Figures]) -> list[float]:
    return [max(step) for step in zip(*(host.cpu_seconds for host in hosts), strict=True)]


def _late(values: list[float]) -> list[float]:
    return values[len(values) // 2 :]


def _steps_until_balanced(imbalances: Sequence[float], limit: float = 1.05) -> object:
    for step in range(len(imbalances) - 9):
        if statistics.mean(imbalances[step : step + 10]) <= limit:
            return step
    return "never"


def bytes_row(case: list[list[Figures]]) -> list[object]:
    """Return the bytes per step of all hosts with one and with two groups, and their ratio."""
    one, two = (statistics.median(variant[0].bytes) for variant in case)
    return [f"{one / 1e6:.2f}", f"{two / 1e6:.2f}", f"{two / one:.2f}"]
