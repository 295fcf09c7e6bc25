"""The main worker's decision to undo a change is that of all workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from experts.balance import moe_layers
from experts.evolution.views import LayerView
from experts.model import structure_of
from experts.structure import Change
from harness.hosts.ranks import run_ranks
from harness.moe.evolving import ListLog, ScriptedPolicy
from harness.runs.steppers import make_stepper
from harness.runs.tiny_model import Tiny
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.evolution.execution import Execution
from orchestrator.train.evolution.measurements import LayerMeasurement
from orchestrator.train.evolution.plan import EvolutionPlan
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world

TASK = Tiny(((4, 4, 4),), samples=12)
TWO_LAYERS = Tiny(((4, 4, 4), (4, 4, 4)), samples=12)
BIRTH = Change("born", 0, (3,), "", (0,), ((1,),), 4, warmup_steps=2)


@dataclass
class FirstUndone(ScriptedPolicy):
    """Undoes the first change that it judges, and keeps the losses of all."""

    judged: list[tuple[float, float]] = field(default_factory=list)

    def why_undo(self, loss_before: float, loss_after: float) -> str | None:
        self.judged.append((loss_before, loss_after))
        return "it hurts" if len(self.judged) == 1 else None


@dataclass
class DividedPolicy(ScriptedPolicy):
    """Undoes every change on one of the workers, and none on the others."""

    undoes: bool = False
    num_undone: int = 0

    def why_undo(self, loss_before: float, loss_after: float) -> str | None:
        return "it hurts" if self.undoes else None

    def undone(self, layer_name: str, change: Change, state: EvolutionState, step: int) -> None:
        self.num_undone += 1


def carry_out_on_host(rank: int, size: int, store: str, undoing_rank: int) -> dict[str, Any]:
    cpu = torch.device("cpu")
    with process_group_world(file_store(store, size), rank, size, cpu, "gloo", 60) as world:
        stepper, feed = make_stepper(TASK, 4, 12, world=world, host_of=[(0, 1, 0)])
        policy = DividedPolicy({}, undoes=rank == undoing_rank)
        plan = EvolutionPlan(seed=0, steps_left=lambda progress: 1, policy=policy)
        evaluation = Evaluation(stepper.strategy, feed, stepper.precision)
        log = ListLog()
        execution = Execution(plan, stepper, log, evaluation, EvolutionState())
        execution.on_change(evaluation.experts_changed)
        execution.carry_out([BIRTH], 1, [])
        (layer,) = structure_of(stepper.strategy.model)
        changes = [event["change"] for event in log.events]
        return {"ids": layer.ids, "changes": changes, "num_undone": policy.num_undone}


@pytest.mark.parametrize("undoing_rank", [0, 1])
def test_all_workers_follow_the_main_worker_when_it_undoes_a_change(undoing_rank: int) -> None:
    main, other = run_ranks(carry_out_on_host, 2, undoing_rank)
    is_undone = undoing_rank == 0
    assert main["ids"] == other["ids"] == ((0, 1, 2) if is_undone else (0, 1, 2, 3))
    assert main["changes"] == other["changes"] == (["born", "undone"] if is_undone else ["born"])
    assert [main["num_undone"], other["num_undone"]] == [int(is_undone), 0]


def test_a_change_after_an_undone_one_is_judged_against_the_loss_without_it() -> None:
    stepper, feed = make_stepper(TWO_LAYERS, 12, 12)
    policy = FirstUndone({})
    plan = EvolutionPlan(seed=0, steps_left=lambda progress: 1, policy=policy)
    evaluation = Evaluation(stepper.strategy, feed, stepper.precision)
    log = ListLog()
    execution = Execution(plan, stepper, log, evaluation, EvolutionState())
    execution.on_change(evaluation.experts_changed)
    loss = evaluation()["loss"]
    # Experts with tokens: the loss without them is another one.
    prunes = [Change("pruned", layer, (1,), "a test") for layer in (0, 1)]
    execution.carry_out(prunes, 1, [])
    assert [event["change"] for event in log.events] == ["pruned", "undone", "pruned"]
    (first_before, first_after), (second_before, second_after) = policy.judged
    assert first_before == second_before == loss
    assert len({loss, first_after, second_after}) == 3
    assert [event["loss_before"] for event in log.events] == [loss, first_after, loss]
    assert [len(layer.ids) for layer in structure_of(stepper.strategy.model)] == [3, 2]


def test_a_change_is_measured_in_fp32_where_the_experts_compute_in_fp8() -> None:
    stepper, _ = make_stepper(TASK, 12, 12)
    (layer,) = (each for _, each in moe_layers(stepper.strategy.model))
    layer.bank.fp8 = True
    plan = EvolutionPlan(seed=0, steps_left=lambda progress: 1, policy=ScriptedPolicy({}))
    log = ListLog()
    execution = Execution(plan, stepper, log, None, EvolutionState())
    sample_PD = torch.randn(6, TASK.width, dtype=torch.float64)
    view = LayerView(0, "", (), 2, 3, 0.0, 6)
    execution.carry_out([Change("pruned", 0, (1,), "a test")], 1, [LayerMeasurement(view, sample_PD)])
    assert log.events[0]["output_change"] > 0
    assert layer.bank.fp8
