"""Changes the experts of a run between two steps.

At a due step all workers add up their statistics. The main worker decides, and all carry out its decision in
the same order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from experts.balance import gated_layers, moe_layers
from experts.evolution.decisions import due_warmups
from experts.moe.statistics import reduce_statistics
from experts.structure import Change, LayerStructure
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.record.files.log import Log
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.evolution.execution import Execution
from orchestrator.train.evolution.measurements import LayerMeasurement, graph_event, measure_layers
from orchestrator.train.evolution.plan import EvolutionPlan
from orchestrator.train.stepper import Stepper

_OBSERVE_EVERY = 8
"""Steps from one observed step to the next: statistics of all steps would cost several percent."""


class Evolution:
    """Changes experts after the steps at which it is due. All workers call it after every step."""

    def __init__(
        self,
        plan: EvolutionPlan,
        stepper: Stepper,
        log: Log,
        evaluation: Evaluation | None,
        state: EvolutionState,
    ) -> None:
        self._plan = plan
        self._stepper = stepper
        self._world = stepper.world
        self._log = log
        self._state = state
        self._layers = [layer for _, layer in moe_layers(stepper.strategy.model)]
        self._gated = [layer for _, layer in gated_layers(stepper.strategy.model)]
        self._execution = Execution(plan, stepper, log, evaluation, state)
        self._execution.on_change(self._find_warmups)
        self._next_warmed_step: int | None = None
        """The step at which the next twin becomes an expert of its own."""
        self._last_ramp_step = 0
        """The step at which all experts have their whole share."""
        self._idle_until = 0
        """The step after which there is something to do again. The steps before it cost nothing."""
        self._find_warmups()

    def _find_warmups(self) -> None:
        """Find the steps at which warm-ups end. Not in every step: a model may have thousands of experts."""
        experts = [expert for layer in self._layers for expert in layer.structure.experts]
        twins = [expert.warm_step for expert in experts if expert.twin_of is not None]
        self._next_warmed_step = min(twins, default=None)
        self._last_ramp_step = max((expert.warm_step for expert in experts), default=0)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of the experts' parameters."""
        self._execution.on_change(listener)

    def start(self, progress: Progress) -> None:
        """Prepare for the step after ``progress``."""
        self._find_warmups()
        self._set_priors(progress.step)
        self._observe_next(progress)
        self._idle_until = self._next_busy_step(progress)

    def is_due(self, progress: Progress) -> bool:
        """Whether the experts may change after this step."""
        return progress.step >= self._idle_until and bool(self._due(progress))

    def after_step(self, progress: Progress) -> None:
        """Change experts if that is due. The figures of the steps so far are in ``progress``."""
        if progress.step < self._idle_until:
            return
        # Before measuring and saving: both must see the priors of the next step.
        self._set_priors(progress.step)
        due = self._due(progress)
        if due:
            self._run(progress, due)
        self._observe_next(progress)
        self._idle_until = self._next_busy_step(progress)

    def flush(self) -> None:
        """Add up the statistics of all workers, so that a checkpoint or snapshot has them."""
        statistics = [layer.statistics for layer in self._gated if layer.statistics is not None]
        reduce_statistics(statistics, self._world.all_reduce)

    # --- when

    def _due(self, progress: Progress) -> frozenset[str]:
        """Return what is due after a step: "warmup", "sleep", "graph", "balance"."""
        due: set[str] = set()
        step = progress.step
        if self._next_warmed_step is not None and step >= self._next_warmed_step:
            due.add("warmup")
        if self._plan.policy is not None:
            ends_epoch = self._plan.steps_left(progress) == 0
            every = self._plan.sleep_every
            if ends_epoch:
                due.add("graph")
            if (every and step % every == 0) or (not every and ends_epoch):
                due |= {"sleep", "graph"}
        if self._plan.moves and step >= self._state.balance_step:
            due.add("balance")
        return frozenset(due)

    def _set_priors(self, step: int) -> None:
        """Set the gates' priors for the next step, while newborn experts gain their share."""
        if step > self._last_ramp_step:
            return
        for layer in self._gated:
            layer.use_priors(step)

    def _observe_next(self, progress: Progress) -> None:
        """Collect statistics in the next step, if it is one to observe."""
        context = self._stepper.strategy.context
        context.observing = False
        if self._plan.policy is None:
            return
        is_measured = self._is_measured(progress)
        # One step in several, and each that a decision follows.
        context.observing = is_measured or (progress.step + 1) % _OBSERVE_EVERY == 0
        if context.observing:
            for layer in self._gated:
                if layer.statistics is not None:
                    layer.statistics.begin_step(samples=is_measured)

    def _is_measured(self, progress: Progress) -> bool:
        """Whether the layers are measured after the next step, for a decision or a graph."""
        following = progress.step + 1
        every = self._plan.sleep_every
        return self._steps_left(progress) == 1 or bool(every and following % every == 0)

    def _steps_left(self, progress: Progress) -> int | None:
        """Return the steps of the epoch from the next one on; None if the data does not tell."""
        # With none left, the next step is the first of an epoch.
        return self._plan.steps_left(progress) or self._plan.steps_left(Progress())

    def _next_busy_step(self, progress: Progress) -> int:
        """Return the next step after which experts may change, or the step after it is observed."""
        step = progress.step
        if step < self._last_ramp_step or self._stepper.strategy.context.observing:
            return step + 1
        busy = [] if self._next_warmed_step is None else [self._next_warmed_step]
        if self._plan.moves:
            busy.append(self._state.balance_step)
        if self._plan.policy is not None:
            left = self._steps_left(progress)
            if left is None:
                return step + 1
            intervals = [_OBSERVE_EVERY, self._plan.sleep_every or _OBSERVE_EVERY]
            busy += [step + left - 1, *(_before_multiple(step, every) for every in intervals)]
        return max(step + 1, min(busy, default=step + 1))

    # --- what

    def _run(self, progress: Progress, due: frozenset[str]) -> None:
        step = progress.step
        carry_out = self._execution.carry_out
        measured: list[LayerMeasurement] = []
        if "graph" in due:
            self.flush()
            measured = measure_layers(self._gated, self._world, step)
            self._remember_loss(progress)
        carry_out(due_warmups(self._structures, step), step, measured)
        if "sleep" in due:
            carry_out(self._decided(step, measured), step, measured)
        if "balance" in due:
            carry_out(self._balanced(step), step, [])
        if "graph" in due:
            self._log.write(graph_event(step, progress.epoch, self._gated, measured))
        if "sleep" in due:
            for layer in self._gated:
                if layer.statistics is not None:
                    layer.statistics.reset()

    @property
    def _structures(self) -> list[LayerStructure]:
        return [layer.structure for layer in self._layers]

    def _remember_loss(self, progress: Progress) -> None:
        """Append the mean training loss since the last point."""
        state = self._state
        if state.window_epoch != progress.epoch:
            state.window_epoch = progress.epoch
            state.window_loss = 0.0
            state.window_count = 0.0
        count = progress.epoch_count - state.window_count
        if count > 0:
            mean = (progress.epoch_loss - state.window_loss) / count
            state.losses = [*state.losses, mean][-32:]
        state.window_loss = progress.epoch_loss
        state.window_count = progress.epoch_count

    def _decided(self, step: int, measured: Sequence[LayerMeasurement]) -> list[Change]:
        """Return the births, merges and prunes that the main worker decides."""
        assert self._plan.policy is not None
        decided: list[Any] | None = None
        if self._world.is_main:
            views = [layer.view for layer in measured]
            changes = self._plan.policy.decide(views, self._state, step)
            decided = [self._with_host(change).to_json() for change in changes]
        agreed = self._world.broadcast_value(f"evolution {step}", decided)
        return [Change.from_json(entry) for entry in agreed]

    def _with_host(self, change: Change) -> Change:
        """Choose the host of a newborn expert, unless that is done."""
        balancer = self._plan.balancer
        if change.kind != "born" or change.hosts or balancer is None:
            return change
        host = balancer.newborn_host(self._structures, change, self._state)
        return replace(change, hosts=((host,),))

    def _balanced(self, step: int) -> list[Change]:
        """Return the moves and copies that the main worker decides, and set the step of the next decision."""
        balancer = self._plan.balancer
        assert balancer is not None
        decided: dict[str, Any] | None = None
        if self._world.is_main:
            structures = self._structures
            loads = [layer.load_E.tolist() for layer in self._layers]
            last_step = self._plan.last_step
            steps_left = math.inf if last_step is None else last_step - step
            changes = balancer.decide(structures, loads, self._state, steps_left)
            interval = balancer.next_interval(structures, self._state, bool(changes))
            decided = {"changes": [change.to_json() for change in changes], "interval": interval}
        agreed = self._world.broadcast_value(f"balance {step}", decided)
        self._state.balance_interval = agreed["interval"]
        self._state.balance_step = step + agreed["interval"]
        return [Change.from_json(entry) for entry in agreed["changes"]]


def _before_multiple(step: int, every: int) -> int:
    """Return the first step after ``step`` that comes just before a multiple of ``every``."""
    return (step + 1) // every * every + every - 1
