"""Carries out changes of experts, judges them, and records each as an event.

A change that raises the validation loss too much is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.moe.layer import MoELayer
from experts.moe.routed import RoutedExperts
from experts.structure import Change
from experts.surgery.expert_transfer import Slot, StateSpec
from experts.surgery.surgery import LayerBackup, Surgery, change_layer
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.errors import UserError
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.train.device.short_weights import is_shortened
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.evolution.measurements import LayerMeasurement
from orchestrator.train.evolution.plan import EvolutionPlan
from orchestrator.train.group.world import World
from orchestrator.train.optim.adamw8bit import BLOCK, AdamW8bit
from orchestrator.train.optim.shards import full_tensor
from orchestrator.train.stepper import Stepper

_JUDGED = ("born", "merged", "pruned")
"""Changes that are judged. The end of a twin's time changes nothing at that moment."""


@dataclass(frozen=True)
class _Effect:
    """The effect of a change on the losses and on the layer's output; None where it was not measured."""

    seconds: float
    loss_before: float | None = None
    loss_after: float | None = None
    output_change: float | None = None


class Execution:
    """Carries out the changes of a run. All workers call it with the same changes in the same order."""

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
        self._log = log
        self._evaluation = evaluation
        self._state = state
        self._layers = [layer for _, layer in moe_layers(stepper.strategy.model)]
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of the experts' parameters."""
        self._listeners.append(listener)

    def carry_out(self, changes: Sequence[Change], step: int, measured: Sequence[LayerMeasurement]) -> None:
        """Carry out changes one after the other. After an undone one, the layer has no further change."""
        is_judged = any(change.kind in _JUDGED for change in changes)
        loss = self._validation_loss() if is_judged else None
        closed: set[int] = set()
        for change in changes:
            if change.layer in closed:
                continue
            if change.kind not in _JUDGED:
                began_s = perf_counter()
                self._change(change, step)
                self._record(change, step, _Effect(perf_counter() - began_s))
                continue
            sample_PD = measured[change.layer].sample_PD if measured else None
            loss, is_undone = self._try(change, step, sample_PD, loss)
            closed |= {change.layer} if is_undone else set()

    def _try(
        self, change: Change, step: int, sample_PD: Tensor | None, loss_before: float | None
    ) -> tuple[float | None, bool]:
        """Carry out a change, and undo it if it hurts.

        Return the loss afterwards, and whether the change is undone."""
        began_s = perf_counter()
        layer = self._layers[change.layer]
        assert isinstance(layer, MoELayer), "only moves change a router that is not ours"
        model = self._stepper.strategy.model
        output_before = _output(model, layer, sample_PD)
        backup = self._change(change, step)
        output_change = _relative_change(output_before, _output(model, layer, sample_PD))
        loss_after = self._validation_loss()
        seconds = perf_counter() - began_s
        self._record(change, step, _Effect(seconds, loss_before, loss_after, output_change))
        reason = self._why_undo(change, step, loss_before, loss_after)
        if reason is None:
            return loss_after, False
        self._undo(replace(change, reason=reason), step, backup, (loss_after, loss_before))
        return loss_before, True

    def _change(self, change: Change, step: int) -> LayerBackup:
        layer = self._layers[change.layer]
        optimizer = self._stepper.optimizer.inner
        spec = state_spec(layer, optimizer, self._stepper.world)
        surgery = Surgery(optimizer, spec, self._plan.seed, step)
        backup = change_layer(self._stepper.strategy.model, layer, change, surgery)
        self._take_over()
        return backup

    def _take_over(self) -> None:
        """Notify every part that holds the experts' parameters or their number."""
        self._stepper.experts_changed()
        for listener in self._listeners:
            listener()

    def _validation_loss(self) -> float | None:
        return None if self._evaluation is None else self._evaluation()["loss"]

    def _why_undo(self, change: Change, step: int, before: float | None, after: float | None) -> str | None:
        """Return why the main worker undoes a change; None if it lasts."""
        policy = self._plan.policy
        if policy is None or before is None or after is None:
            return None
        # One worker decides: the losses of two could differ in the last digit.
        world = self._stepper.world
        reason = policy.why_undo(before, after) if world.is_main else None
        return world.broadcast_value(f"undo {step} {change.layer} {change.kind} {change.ids[0]}", reason)

    def _undo(
        self, change: Change, step: int, backup: LayerBackup, losses: tuple[float | None, float | None]
    ) -> None:
        """Put everything back as it was."""
        began_s = perf_counter()
        backup.restore(step)
        self._take_over()
        if self._plan.policy is not None and self._stepper.world.is_main:
            name = self._layers[change.layer].structure.name
            self._plan.policy.undone(name, change, self._state, step)
        self._record(change, step, _Effect(perf_counter() - began_s, *losses), kind="undone")

    def _record(
        self, change: Change, step: int, effect: _Effect, kind: kinds.ChangeKind | None = None
    ) -> None:
        structure = self._layers[change.layer].structure
        present = set(structure.ids)
        self._log.write(
            kinds.ExpertChange(
                step=step,
                change=kind or change.kind,
                layer=change.layer,
                layer_name=structure.name,
                ids=tuple(change.ids),
                parents=tuple(change.parents),
                hosts=tuple(structure.expert(i).hosts if i in present else () for i in change.ids),
                splits=tuple(structure.expert(i).split if i in present else () for i in change.ids),
                reason=change.reason,
                loss_before=effect.loss_before,
                loss_after=effect.loss_after,
                output_change=effect.output_change,
                seconds=effect.seconds,
                experts=len(structure.experts),
            )
        )


@torch.no_grad()
def _output(model: nn.Module, layer: MoELayer, sample_PD: Tensor | None) -> Tensor | None:
    """Return the layer's output for tokens that all workers have. All must call it: shards are gathered."""
    if sample_PD is None or not len(sample_PD):
        return None
    was_training = layer.training
    layer.eval()
    parameters = _computed_with(model, layer)
    dtype = parameters["shared.up.weight" if layer.shared is not None else "gate.weight_ED"].dtype
    output, _ = torch.func.functional_call(layer, parameters, (sample_PD.to(dtype),))
    layer.train(was_training)
    return output


def _computed_with(model: nn.Module, layer: MoELayer) -> dict[str, Tensor]:
    """Return the parameters of a layer outside of its bank, which casts its own: whole, and those that are
    stored in bf16 in fp32."""
    dense = {name: p.detach() for name, p in layer.named_parameters() if not name.startswith("bank.")}
    whole = {name: full_tensor(parameter) for name, parameter in dense.items()}
    return {name: tensor.float() for name, tensor in whole.items()} if is_shortened(model) else whole


def _relative_change(before: Tensor | None, after: Tensor | None) -> float | None:
    if before is None or after is None:
        return None
    return float((after - before).norm() / before.norm().clamp(min=1e-12))


# --- the form of the optimizer's state, which all workers must know alike


def state_spec(layer: RoutedExperts, optimizer: torch.optim.Optimizer, world: World) -> StateSpec:
    """Return the optimizer state of a layer's experts. A host without any learns it from the others.

    Raises UserError on all hosts if the optimizer of some has other parameter groups."""
    number_of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    groups = {role: number_of.get(id(stack)) for _, role, stack in layer.bank.stacks()}
    frozen = {
        role: _name_of(stack.dtype) for _, role, stack in layer.bank.stacks() if not stack.requires_grad
    }
    own: dict[str, Any] | None = None
    if layer.bank.held:
        trained = {role: stack for _, role, stack in layer.bank.stacks() if stack.requires_grad}
        own = _described(trained, optimizer) | {"frozen": frozen, "groups": groups}
    gathered = world.gather_values([own, len(optimizer.param_groups)])
    _check_groups([num_groups for _, num_groups in gathered])
    described = [entry for entry, _ in gathered if entry is not None]
    return _spec(max(described, key=lambda entry: len(entry["slots"]))) if described else StateSpec()


def _check_groups(numbers: Sequence[int]) -> None:
    if len(set(numbers)) > 1:
        raise UserError(
            f"the optimizer has {' and '.join(map(str, sorted(set(numbers))))} parameter groups on different "
            "hosts, so that experts cannot change hosts; let build_optimizer return the same groups whatever "
            "parameters it gets, some of them empty, or use --evolution off --rebalance off"
        )


def _described(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the form of trained stacks, one for each role, and of the optimizer's state, as plain values."""
    if not trained:
        return {"slots": [], "values": {}, "dtype": None}
    roles_of: dict[tuple[str, str, bool, bool, int], list[str]] = {}
    values: dict[str, Any] = {}
    for role, stack in trained.items():
        for name, value in optimizer.state.get(stack, {}).items():
            if isinstance(value, Tensor):
                block = BLOCK if isinstance(optimizer, AdamW8bit) and name in optimizer.row_slots else 1
                slot = (name, _name_of(value.dtype), value.ndim == 0, value.device.type == "cpu", block)
                roles_of.setdefault(slot, []).append(role)
            else:
                values[name] = value
    slots = [[*slot, roles] for slot, roles in roles_of.items()]
    dtype = next(iter(trained.values())).dtype
    return {"slots": slots, "values": values, "dtype": _name_of(dtype)}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec(fields: dict[str, Any]) -> StateSpec:
    slots = [
        Slot(name, getattr(torch, dtype), is_scalar, on_host, tuple(roles), block)
        for name, dtype, is_scalar, on_host, block, roles in fields["slots"]
    ]
    dtype = getattr(torch, fields["dtype"]) if fields["dtype"] else None
    frozen = {role: getattr(torch, name) for role, name in fields["frozen"].items()}
    return StateSpec(tuple(slots), dtype, fields["values"], frozen, fields["groups"])
