"""Changes the experts of a run between two steps, and records each change.

At a due step all workers add up their statistics. The main worker decides, and all carry out its decision in
the same order. A change that raises the validation loss too much is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from experts.balance import moe_layers
from experts.evolution.decisions import due_warmups
from experts.evolution.views import LayerView
from experts.layer import MoELayer
from experts.statistics import reduce_statistics
from experts.structure import Change, LayerStructure
from experts.surgery.expert_transfer import Slot, StateSpec
from experts.surgery.surgery import LayerBackup, Surgery, change_layer
from orchestrator.record.log import Log
from orchestrator.train.checkpoint.evolution_state import EvolutionState
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.evaluate import Evaluation
from orchestrator.train.evolution.graph import graph_fields
from orchestrator.train.evolution.measurements import LayerMeasurement, measure_layers
from orchestrator.train.step import Stepper

_OBSERVE_EVERY = 8
"""Steps from one observed step to the next: statistics of all steps would cost several percent."""
_VALIDATED = ("born", "merged", "pruned")
"""Changes that are judged. The end of a twin's time changes nothing at that moment."""


class Policy(Protocol):
    """Decides which experts are born, merged and pruned. Only the main worker asks it."""

    def decide(self, layers: Sequence[LayerView], state: EvolutionState, step: int) -> list[Change]: ...

    def why_undo(self, loss_before: float, loss_after: float) -> str | None: ...

    def undone(self, layer_name: str, change: Change, state: EvolutionState, step: int) -> None: ...


class Balancer(Protocol):
    """Decides where experts live, and which have copies. Only the main worker asks it."""

    def decide(
        self, layers: Sequence[LayerStructure], loads: Sequence[Sequence[int]], state: EvolutionState
    ) -> list[Change]: ...

    def next_interval(
        self, layers: Sequence[LayerStructure], state: EvolutionState, changed: bool
    ) -> int: ...

    def newborn_host(
        self, layers: Sequence[LayerStructure], change: Change, state: EvolutionState
    ) -> int: ...


@dataclass(frozen=True)
class EvolutionPlan:
    """When experts may change, and by whose decision."""

    seed: int
    steps_left: Callable[[Progress], int]
    """Returns the steps that are left of an epoch."""
    sleep_every: int = 0
    """Steps between two decisions on births, merges and prunes; 0: at the end of each epoch."""
    policy: Policy | None = None
    balancer: Balancer | None = None
    moves: bool = False
    """Whether experts move and are copied; else the balancer only places newborn ones."""


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
        self._evaluation = evaluation
        self._state = state
        self._model = stepper.strategy.model
        self._layers = [layer for _, layer in moe_layers(self._model)]
        self._listeners: list[Callable[[], None]] = []
        self._next_warmed_step: int | None = None
        """The step at which the next twin ends its time as one."""
        self._last_ramp_step = 0
        """The step at which all experts have their whole share."""
        self._find_warmups()

    def _find_warmups(self) -> None:
        """Find the steps at which warm-ups end. Not in every step: a model may have thousands of experts."""
        experts = [expert for layer in self._layers for expert in layer.structure.experts]
        twins = [expert.warm_step for expert in experts if expert.twin_of is not None]
        self._next_warmed_step = min(twins, default=None)
        self._last_ramp_step = max((expert.warm_step for expert in experts), default=0)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of the experts' parameters."""
        self._listeners.append(listener)

    def start(self, progress: Progress) -> None:
        """Prepare for the step after ``progress``."""
        self._find_warmups()
        self._set_priors(progress.step)
        self._observe_next(progress)

    def is_due(self, progress: Progress) -> bool:
        """Whether the experts may change after this step."""
        return bool(self._due(progress))

    def after_step(self, progress: Progress) -> None:
        """Change experts if that is due. The figures of the steps so far are in ``progress``."""
        # First: what is measured and saved now is what the next step trains.
        self._set_priors(progress.step)
        due = self._due(progress)
        if due:
            self._run(progress, due)
        self._observe_next(progress)

    def flush(self) -> None:
        """Add up the statistics of all workers, so that a checkpoint or snapshot has them."""
        statistics = [layer.statistics for layer in self._layers if layer.statistics is not None]
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
        for layer in self._layers:
            layer.use_priors(step)

    def _observe_next(self, progress: Progress) -> None:
        """Collect statistics in the next step, if it is one to observe."""
        context = self._stepper.strategy.context
        context.observing = self._plan.policy is not None and self._is_observed(progress)
        if context.observing:
            for layer in self._layers:
                if layer.statistics is not None:
                    layer.statistics.begin_step()

    def _is_observed(self, progress: Progress) -> bool:
        """Whether the next step is observed: one in several, and each that a decision follows."""
        following = progress.step + 1
        # With none left, the next step is the first of an epoch.
        left = self._plan.steps_left(progress) or self._plan.steps_left(Progress())
        ends_epoch = left == 1
        every = self._plan.sleep_every
        sleeps = following % every == 0 if every else False
        return following % _OBSERVE_EVERY == 0 or ends_epoch or sleeps

    # --- what

    def _run(self, progress: Progress, due: frozenset[str]) -> None:
        point = _Point(progress.step, progress.epoch)
        measured: list[LayerMeasurement] = []
        if "graph" in due:
            self.flush()
            measured = measure_layers(self._layers, self._world, progress.step)
            self._remember_loss(progress)
        warmups = list(due_warmups([layer.structure for layer in self._layers], progress.step))
        self._carry_out(warmups, point, measured)
        if "sleep" in due:
            self._carry_out(self._decided(point, measured), point, measured)
        if "balance" in due:
            self._carry_out(self._balanced(point), point, [])
        if "graph" in due:
            self._log.write("expert_graph", **graph_fields(point.step, point.epoch, self._layers, measured))
        if "sleep" in due:
            for layer in self._layers:
                if layer.statistics is not None:
                    layer.statistics.reset()

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

    def _decided(self, point: _Point, measured: Sequence[LayerMeasurement]) -> list[Change]:
        """Return the changes that the main worker decides."""
        assert self._plan.policy is not None
        fields: list[Any] | None = None
        if self._world.is_main:
            views = [layer.view for layer in measured]
            changes = self._plan.policy.decide(views, self._state, point.step)
            fields = [self._with_host(change).to_json() for change in changes]
        return self._agreed(f"evolution {point.step}", fields)

    def _with_host(self, change: Change) -> Change:
        """Choose the host of a newborn expert, unless that is done."""
        balancer = self._plan.balancer
        if change.kind != "born" or change.hosts or balancer is None:
            return change
        host = balancer.newborn_host([layer.structure for layer in self._layers], change, self._state)
        return replace(change, hosts=((host,),))

    def _balanced(self, point: _Point) -> list[Change]:
        """Return the moves and copies that the main worker decides, and set the step of the next decision."""
        balancer = self._plan.balancer
        assert balancer is not None
        decided: dict[str, Any] | None = None
        if self._world.is_main:
            structures = [layer.structure for layer in self._layers]
            loads = [layer.load_E.tolist() for layer in self._layers]
            changes = balancer.decide(structures, loads, self._state)
            interval = balancer.next_interval(structures, self._state, bool(changes))
            decided = {"changes": [change.to_json() for change in changes], "interval": interval}
        agreed = self._world.broadcast_value(f"balance {point.step}", decided)
        self._state.balance_interval = agreed["interval"]
        self._state.balance_step = point.step + agreed["interval"]
        return [Change.from_json(entry) for entry in agreed["changes"]]

    def _agreed(self, name: str, fields: list[Any] | None) -> list[Change]:
        return [Change.from_json(entry) for entry in self._world.broadcast_value(name, fields)]

    # --- how

    def _carry_out(
        self, changes: Sequence[Change], point: _Point, measured: Sequence[LayerMeasurement]
    ) -> None:
        """Carry out changes one after the other. After an undone one, the layer has no further change."""
        if not changes:
            return
        loss = self._validation_loss() if any(change.kind in _VALIDATED for change in changes) else None
        closed: set[int] = set()
        for change in changes:
            if change.layer not in closed:
                loss, undone = self._carry_out_one(change, point, measured, loss)
                closed |= {change.layer} if undone else set()

    def _carry_out_one(
        self,
        change: Change,
        point: _Point,
        measured: Sequence[LayerMeasurement],
        loss_before: float | None,
    ) -> tuple[float | None, bool]:
        """Carry out a change, and undo it if it hurts.

        Return the loss afterwards, and whether the change is undone."""
        began_s = perf_counter()
        layer = self._layers[change.layer]
        sample_PD = measured[change.layer].sample_PD if measured and change.kind in _VALIDATED else None
        output_before = _output(layer, sample_PD)
        spec = self._state_spec(layer)
        surgery = Surgery(self._stepper.optimizer.inner, spec, self._plan.seed, point.step)
        backup = change_layer(self._model, layer, change, surgery)
        self._take_over()
        output_change = _relative_change(output_before, _output(layer, sample_PD))
        loss_after = self._validation_loss() if change.kind in _VALIDATED else None
        losses = (loss_before, loss_after) if change.kind in _VALIDATED else (None, None)
        self._record(change, point, losses, output_change, perf_counter() - began_s)
        reason = self._why_undo(loss_before, loss_after)
        if reason is None:
            return loss_after if change.kind in _VALIDATED else loss_before, False
        self._undo(change, point, backup, reason, (loss_after, loss_before))
        return loss_before, True

    def _why_undo(self, before: float | None, after: float | None) -> str | None:
        policy = self._plan.policy
        if policy is None or before is None or after is None:
            return None
        return policy.why_undo(before, after)

    def _undo(
        self,
        change: Change,
        point: _Point,
        backup: LayerBackup,
        reason: str,
        losses: tuple[float | None, float | None],
    ) -> None:
        """Put everything back as it was."""
        began_s = perf_counter()
        backup.restore(point.step)
        self._take_over()
        if self._plan.policy is not None:
            name = self._layers[change.layer].structure.name
            self._plan.policy.undone(name, change, self._state, point.step)
        undone = replace(change, reason=reason)
        self._record(undone, point, losses, None, perf_counter() - began_s, kind="undone")

    def _take_over(self) -> None:
        """Tell everyone who knows the experts' parameters, or their number."""
        self._find_warmups()
        self._stepper.experts_changed()
        for listener in self._listeners:
            listener()

    def _validation_loss(self) -> float | None:
        if self._evaluation is None:
            return None
        return self._evaluation()["loss"]

    def _state_spec(self, layer: MoELayer) -> StateSpec:
        """Return the optimizer state of a layer's experts. A host without any learns it from the others."""
        optimizer = self._stepper.optimizer.inner
        number_of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
        groups = {role: number_of.get(id(stack)) for _, role, stack in layer.bank.stacks()}
        own: dict[str, Any] | None = None
        for _, _, stack in layer.bank.stacks():
            own = own or _describe_state(stack, optimizer.state.get(stack, {})) | {"groups": groups}
        described = [entry for entry in self._world.gather_values(own) if entry is not None]
        return _spec(max(described, key=lambda entry: len(entry["slots"]))) if described else StateSpec()

    def _record(
        self,
        change: Change,
        point: _Point,
        losses: tuple[float | None, float | None],
        output_change: float | None,
        seconds: float,
        kind: str | None = None,
    ) -> None:
        structure = self._layers[change.layer].structure
        present = set(structure.ids)
        self._log.write(
            "expert",
            step=point.step,
            change=kind or change.kind,
            layer=change.layer,
            layer_name=structure.name,
            ids=list(change.ids),
            parents=list(change.parents),
            hosts=[list(structure.expert(i).hosts) if i in present else [] for i in change.ids],
            splits=[list(structure.expert(i).split) if i in present else [] for i in change.ids],
            reason=change.reason,
            loss_before=losses[0],
            loss_after=losses[1],
            output_change=output_change,
            seconds=seconds,
            experts=len(structure.experts),
        )


@dataclass(frozen=True)
class _Point:
    """The point of a run at which experts change."""

    step: int
    epoch: int


def _describe_state(stack: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """Return the form of an optimizer's state of a stack, as plain values."""
    slots = [
        [name, _name_of(value.dtype), value.ndim == 0, value.device.type == "cpu"]
        for name, value in state.items()
        if isinstance(value, Tensor)
    ]
    values = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    dtype = _name_of(stack.dtype)
    return {"slots": slots, "values": values, "dtype": dtype, "is_trained": stack.requires_grad}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec(fields: dict[str, Any]) -> StateSpec:
    slots = [Slot(name, getattr(torch, dtype), *places) for name, dtype, *places in fields["slots"]]
    dtype = getattr(torch, fields["dtype"])
    return StateSpec(tuple(slots), dtype, fields["values"], fields["is_trained"], fields["groups"])


@torch.no_grad()
def _output(layer: MoELayer, sample_PD: Tensor | None) -> Tensor | None:
    """Return the layer's output for tokens that all workers have."""
    if sample_PD is None or not len(sample_PD):
        return None
    was_training = layer.training
    layer.eval()
    dense = layer.shared.up.weight if layer.shared is not None else layer.gate.weight_ED
    output, _ = layer(sample_PD.to(dense.dtype))
    layer.train(was_training)
    return output


def _relative_change(before: Tensor | None, after: Tensor | None) -> float | None:
    if before is None or after is None:
        return None
    return float((after - before).norm() / before.norm().clamp(min=1e-12))
