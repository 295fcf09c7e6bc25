"""Runs whose experts change by a script, on any number of hosts, and random scripts for them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experts.balance import gated_layers
from experts.evolution.views import LayerView
from experts.model import structure_of
from experts.moe.statistics import ExpertStatistics
from experts.structure import Change, LayerStructure, changed
from harness.runs.host_runs import by_expert
from harness.runs.steppers import make_stepper, mean_loss
from harness.runs.tiny_model import Tiny
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.record.events.decoding import to_json
from orchestrator.record.events.kinds import Event
from orchestrator.record.files.log import SilentLog
from orchestrator.train.data.steps import Feed
from orchestrator.train.evolution.engine import Evolution
from orchestrator.train.evolution.plan import EvolutionPlan, RulesPolicy
from orchestrator.train.group.world import World
from orchestrator.train.stepper import Stepper

Script = Mapping[int, Sequence[Change]]
"""The changes after each step."""


@dataclass
class ScriptedPolicy(RulesPolicy):
    """Decides what a script says."""

    script: Script

    def decide(self, layers: Sequence[LayerView], state: EvolutionState, step: int) -> list[Change]:
        return list(self.script.get(step, ()))

    def why_undo(self, loss_before: float, loss_after: float) -> str | None:
        return None

    def undone(self, layer_name: str, change: Change, state: EvolutionState, step: int) -> None: ...


@dataclass
class ListLog(SilentLog):
    """A log that keeps its events."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def write(self, *events: Event) -> None:
        self.events += map(to_json, events)


def on_one_host(script: Script) -> Script:
    """Return a script for one process, which has neither moves nor copies."""
    return {
        step: [replace(change, hosts=()) for change in changes if change.kind not in ("moved", "copied")]
        for step, changes in script.items()
    }


def on_hosts(script: Script, hosts: int) -> Script:
    """Return a script for a number of hosts: higher ones stand for lower ones."""
    if hosts == 1:
        return on_one_host(script)
    return {step: [_on_hosts(change, hosts) for change in changes] for step, changes in script.items()}


def _on_hosts(change: Change, hosts: int) -> Change:
    return replace(
        change, hosts=tuple(tuple(sorted({host % hosts for host in copies})) for copies in change.hosts)
    )


def make_evolution(
    stepper: Stepper, feed: Feed, script: Script, state: EvolutionState | None = None
) -> Evolution:
    """Return an evolution that may change experts after every step."""
    for _, layer in gated_layers(stepper.strategy.model):
        layer.statistics = ExpertStatistics(len(layer.load_E), layer.bank.width).to(
            layer.gate.weight_ED.dtype
        )
    plan = EvolutionPlan(
        seed=0,
        steps_left=lambda progress: feed.steps_from(progress.position),
        sleep_every=1,
        policy=ScriptedPolicy(script),
    )
    return Evolution(plan, stepper, ListLog(), None, state or EvolutionState())


def train_evolving(
    task: Tiny,
    script: Script,
    world: World,
    host_of: Any,
    steps: int,
    micro_batch: int = 4,
    sharding: str = "none",
) -> dict[str, Any]:
    """Train with a script of changes. Return losses, norms, loads and the weights by the experts' ids."""
    size = 4 if world.size == 1 else world.size
    stepper, feed = make_stepper(
        task,
        micro_batch if world.size > 1 else micro_batch * size,
        12,
        learning_rate=1e-2,
        world=world,
        sharding=sharding,
        host_of=host_of,
    )
    evolution = make_evolution(stepper, feed, script if world.size > 1 and host_of else on_one_host(script))
    progress = Progress()
    evolution.start(progress)
    result: dict[str, Any] = {"loss": [], "norm": [], "use": []}
    while progress.step < steps:
        for batch in feed.steps(progress.epoch, progress.position):
            if progress.step == steps:
                break
            totals = stepper.run(batch, progress.step)
            progress.step += 1
            progress.position += totals.samples
            assert totals.norm is not None
            result["loss"].append(mean_loss(totals))
            result["norm"].append(float(totals.norm))
            result["use"].append([load.tolist() for load in totals.loads])
            evolution.after_step(progress)
        progress.start_next_epoch()
    model = stepper.strategy.model
    result["weights"] = by_expert(model, dict(model.named_parameters()))
    optimizer = stepper.optimizer.inner
    moments = {
        name: optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters() if p in optimizer.state
    }
    result["moments"] = by_expert(model, moments)
    result["structure"] = structure_of(model)
    return result


def random_script(
    draw: random.Random, task: Tiny, host_of: Any, hosts: int, steps: int
) -> dict[int, list[Change]]:
    """Draw valid changes after most steps, of all kinds."""
    layers = [
        LayerStructure.initial(f"blocks.{number}.ffn", sizes, host_of[number])
        for number, sizes in enumerate(task.sizes)
    ]
    script: dict[int, list[Change]] = {}
    for step in range(1, steps):
        changes: list[Change] = []
        number = draw.randrange(len(layers))
        change = _draw_change(draw, number, layers[number], task, hosts)
        if change is not None:
            chooses_all = min(task.top_k, len(task.sizes[number])) == len(task.sizes[number])
            layers[number] = changed(layers[number], change, step, chooses_all)
            changes.append(change)
        # Twins end their time by themselves: the engine does it first.
        script[step] = changes
        for index, layer in enumerate(layers):
            for expert in layer.experts:
                if expert.twin_of is not None and step + 1 >= expert.warm_step:
                    warmed = Change("warmed", index, (expert.id,), "")
                    layers[index] = changed(layers[index], warmed, step + 1)
    return script


def _draw_change(
    draw: random.Random, number: int, layer: LayerStructure, task: Tiny, hosts: int
) -> Change | None:
    parents_of_twins = {expert.twin_of for expert in layer.experts}
    free = [e for e in layer.experts if e.twin_of is None and e.id not in parents_of_twins]
    kind = draw.choice(["born", "born", "merged", "pruned", "moved", "copied"])
    host = (draw.randrange(hosts),)
    top_k = min(task.top_k, len(task.sizes[number]))
    is_full = top_k == len(task.sizes[number])
    established = [e for e in layer.experts if e.twin_of is None]
    enough = len(established) > (2 if is_full else top_k + 1)
    if kind == "born" and free:
        parents = (draw.choice(free).id,) if draw.random() < 0.7 else ()
        size = layer.expert(parents[0]).size if parents else draw.choice(layer.sizes)
        return Change(
            "born", number, (layer.next_id,), "", parents, (host,), size, warmup_steps=draw.choice([1, 2, 3])
        )
    if kind == "merged" and enough:
        pairs = [(a, b) for a in free for b in free if a.id < b.id and a.size == b.size]
        if pairs:
            first, second = draw.choice(pairs)
            weights = (draw.random(), draw.random())
            return Change(
                "merged", number, (layer.next_id,), "", (first.id, second.id), (host,), weights=weights
            )
    if kind == "pruned" and enough and free:
        return Change("pruned", number, (draw.choice(free).id,), "")
    if kind == "moved":
        return Change("moved", number, (draw.choice(layer.experts).id,), "", hosts=(host,))
    if kind == "copied":
        copies = tuple(sorted(draw.sample(range(hosts), draw.randint(1, hosts))))
        return Change("copied", number, (draw.choice(layer.experts).id,), "", hosts=(copies,))
    return None
