"""CPU time that evolution adds to a step while nothing changes, as a share of the rest of the step.

One model trains in one process with one thread. The calls that a run with evolution makes after each step
and the statistics of every eighth step are timed within the steps: the difference of steps with and without
them is smaller than the noise of a machine with other jobs.

    python -m benchmarks.steps.evolution_cost [--blocks 40] [--out FILE]
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.balance import moe_layers
from experts.evolution.rules import EvolutionRules
from experts.moe.gate import Gate
from experts.moe.statistics import ExpertStatistics
from experts.types import Routing
from orchestrator.checkpoint.evolution_state import EvolutionState
from orchestrator.checkpoint.progress import Progress
from orchestrator.config.settings import Config
from orchestrator.record.files.log import SilentLog
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Task
from orchestrator.tasks.text import Text
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.device.clock import PhaseClock
from orchestrator.train.device.precision import Precision
from orchestrator.train.evolution.engine import Evolution
from orchestrator.train.evolution.plan import EvolutionPlan, RulesPolicy
from orchestrator.train.group.world import World
from orchestrator.train.optim.named_optimizers import build_named_optimizer
from orchestrator.train.optim.optimizer import ScheduledOptimizer, warmup_schedule
from orchestrator.train.stepper import Stepper
from orchestrator.train.strategies.base import Strategy

BLOCK = 8
"""Steps of a block: one of them is observed."""
NEVER = 10**9
WARM_UP_BLOCKS = 3


@dataclass(frozen=True)
class Case:
    name: str
    task: type[Any]
    batch: int
    settings: dict[str, Any]


SMALL = {"sequence_length": 64}
CASES = (
    Case("digits, 2 layers of 4 experts, width 64, 64 samples", Digits, 64, {}),
    Case("text, 2 layers of 8 experts, width 128, 8 × 64 tokens", Text, 8, SMALL),
    Case(
        "text, 2 layers of 32 experts, width 256, 8 × 64 tokens",
        Text,
        8,
        SMALL | {"experts": 32, "width": 256},
    ),
)


class TimedStatistics(ExpertStatistics):
    """Statistics that measure their own CPU time."""

    seconds = 0.0

    def observe(self, x_TD: Tensor, routing: Routing, gate: Gate, position_T: Tensor) -> None:
        begin_s = time.thread_time()
        super().observe(x_TD, routing, gate, position_T)
        TimedStatistics.seconds += time.thread_time() - begin_s


class Training:
    """A model that trains with or without the statistics of evolution."""

    def __init__(self, case: Case) -> None:
        config = Config.of(**case.settings)
        task: Task = case.task(config)
        world = World.single_process()
        model = task.build_model()
        self._layers = [layer for _, layer in moe_layers(model)]
        for layer in self._layers:
            layer.statistics = TimedStatistics(len(layer.load_E), layer.bank.width)
        optimizer = build_named_optimizer(model, config.optim, fused=True)
        self._feed = open_feed(
            task.train_data(),
            world,
            global_batch=case.batch,
            micro_batch=case.batch,
            seed=0,
            loader=LoaderOptions(),
        )
        self._stepper = Stepper(
            world=world,
            strategy=Strategy(model, task),
            optimizer=ScheduledOptimizer(optimizer, warmup_schedule("constant", 0, NEVER)),
            precision=Precision("fp32", world.device),
            micro_batch=case.batch,
            seed=0,
            clip_norm=1.0,
            clock=PhaseClock(),
            emit=lambda *_, **__: None,
        )
        rules = EvolutionRules(min_experts=1, max_experts=NEVER)
        plan = EvolutionPlan(0, lambda _: NEVER, NEVER, RulesPolicy(rules))
        self._evolution = Evolution(plan, self._stepper, SilentLog(), None, EvolutionState())
        self._progress = Progress()
        self._batches = self._all_batches()

    def _all_batches(self) -> Any:
        for epoch in count():
            yield from self._feed.steps(epoch)

    def block_seconds(self) -> tuple[float, float]:
        """Run a block of steps, and return the CPU time of evolution and that of the rest.

        Fetching the batches is not counted."""
        batches = [next(self._batches) for _ in range(BLOCK)]
        TimedStatistics.seconds = 0.0
        calls_s = 0.0
        begin_s = time.thread_time()
        for batch in batches:
            self._stepper.run(batch, self._progress.step)
            self._progress.step += 1
            call_s = time.thread_time()
            self._evolution.after_step(self._progress)
            calls_s += time.thread_time() - call_s
        all_s = time.thread_time() - begin_s
        evolution_s = TimedStatistics.seconds + calls_s
        return evolution_s, all_s - evolution_s


def row(case: Case, num_blocks: int) -> list[object]:
    training = Training(case)
    blocks = [training.block_seconds() for _ in range(WARM_UP_BLOCKS + num_blocks)][WARM_UP_BLOCKS:]
    step_s = [rest_s / BLOCK for _, rest_s in blocks]
    shares = [evolution_s / rest_s for evolution_s, rest_s in blocks]
    low, median, high = np.quantile(shares, [0.25, 0.5, 0.75])
    return [case.name, f"{1000 * float(np.median(step_s)):.1f}", f"{median:.2%} ({low:.2%} to {high:.2%})"]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=40, help="blocks of 8 steps for each model")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many models")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(case, arguments.blocks) for case in CASES[: arguments.cases]]
    columns = ["model", "ms of CPU time per step", "evolution adds"]
    title = header("The cost of evolution while nothing changes", arguments)
    note = "CPU time in blocks of 8 steps, one of which is observed: median of the blocks, and quartiles.\n\n"
    publish(title + note + markdown_table(columns, rows), arguments.out)


if __name__ == "__main__":
    main()
