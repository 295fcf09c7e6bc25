"""A run whose experts are born, merged, pruned, moved and copied, as a training would record it.

The ids and hosts come from ``experts.structure``, which the training itself uses."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from experts.structure import Change, LayerStructure, changed
from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_run import write_events, write_run
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.report.run.figures.read import RunRecord, read_run_record

EVOLVING = FakeRun(experts=4, layers=2, name="evolving", skew=0.5)
EVOLVING_HOSTS = replace(EVOLVING, hosted=True, workers=3)

HURT = "validation loss 0.51 -> 0.6, more than the tolerance 0.02"
CHANGES: tuple[tuple[int, Change], ...] = (
    (20, Change("born", 0, (4,), "gate entropy 1.31 of at most 1.39 for 20 steps", (1,), ((1,),))),
    (40, Change("warmed", 0, (4,), "its warm-up of 20 steps is over")),
    (50, Change("merged", 0, (5,), "similarity 0.97 of 0 and 3", (0, 3), ((0,),))),
    (60, Change("born", 1, (4,), "the loss has stalled for 30 steps", (), ((0,),), size=64)),
    (70, Change("born", 0, (6,), "expert 2 has 2.4 times its even share", (2,), ((0,),))),
    (80, Change("pruned", 0, (1,), "0.1% of the choices for 30 steps")),
    (90, Change("moved", 0, (4,), "host 1 takes 1.4 times the mean", (), ((2,),))),
    (100, Change("copied", 0, (2,), "2.6 times its even share", (), ((0, 1),))),
)
UNDONE = {70}
"""Steps of the changes that are undone."""
SLEEPS = {50, 80}
"""Steps after which a graph is written, besides the ends of epochs."""
AVERAGES = ("phases", "exchange", "load", "monitor")
FINAL_IDS = ((2, 4, 5), (0, 1, 2, 3, 4))
"""The experts of both layers at the end."""


def evolving_events(run: FakeRun = EVOLVING) -> list[Event]:
    """Return the events of a run with all these changes; on one host without the moves."""
    return _Weaver(run).events(run_events(run))


def write_evolving_run(folder: Path, run: FakeRun = EVOLVING) -> Path:
    write_run(folder, run)
    return write_events(folder, evolving_events(run))


def evolving_record(folder: Path, run: FakeRun = EVOLVING) -> RunRecord:
    return read_run_record(write_evolving_run(folder, run))


@dataclass
class _Weaver:
    """Adds the events of evolution to those of an ordinary run."""

    run: FakeRun
    layers: list[LayerStructure] = field(default_factory=list)
    at_step: dict[int, list[LayerStructure]] = field(default_factory=dict)

    def events(self, events: list[Event]) -> list[Event]:
        woven: list[Event] = []
        last_step: Event | None = None
        for event in events:
            # The changes come after the averages of their step.
            if last_step is not None and event["event"] not in AVERAGES:
                woven += self._between_steps(last_step)
                last_step = None
            if event["event"] == "step":
                last_step = event
            woven += self._woven(event)
        return woven

    def _between_steps(self, event: Event) -> list[Event]:
        step = event["step"]
        changes = self._changes(step, event["time"])
        self.at_step[step] = list(self.layers)
        graphs = [self._graph(step, event["epoch"], event["time"])] if step in SLEEPS else []
        return [*changes, *graphs]

    def _woven(self, event: Event) -> list[Event]:
        if event["event"] == "start":
            self._restore(event["step"])
        if event["event"] == "placement":
            self._place(event)
        if event["event"] == "load":
            return [self._load(event)]
        if event["event"] == "epoch":
            return [event, self._graph(event["step"], event["epoch"], event["time"])]
        return [event]

    def _restore(self, step: int) -> None:
        sizes = [64] * self.run.experts
        initial = [LayerStructure.initial(f"blocks.{i}.ffn", sizes) for i in range(self.run.layers)]
        self.layers = list(self.at_step.get(step, initial))

    def _place(self, event: Event) -> None:
        """Take the hosts of the experts from the placement at the start, and write those of a restart."""
        for index, fields in enumerate(event["layers"]):
            layer = self.layers[index]
            if not event["step"]:
                hosted = zip(layer.experts, fields["host_of"], strict=True)
                experts = tuple(replace(expert, hosts=(rank,)) for expert, rank in hosted)
                self.layers[index] = replace(layer, experts=experts)
            else:
                fields["ids"] = list(layer.ids)
                fields["host_of"] = [list(expert.hosts) for expert in layer.experts]
                for name in ("sizes", "costs"):
                    fields[name] = [64] * len(layer.ids)

    def _load(self, event: Event) -> Event:
        if all(layer.ids == tuple(range(self.run.experts)) for layer in self.layers):
            return event
        draw = random.Random(event["step"])
        loads = []
        for layer, before in zip(self.layers, event["loads"], strict=True):
            weights = [1 + draw.random() for _ in layer.ids]
            loads.append([round(sum(before) * weight / sum(weights)) for weight in weights])
        return event | {"loads": loads, "ids": [list(layer.ids) for layer in self.layers]}

    def _changes(self, step: int, time: float) -> list[Event]:
        events = []
        for due, change in CHANGES:
            is_move = change.kind in ("moved", "copied")
            if due == step and change.layer < len(self.layers) and (self.run.hosted or not is_move):
                events += self._change(change, step, time)
        return events

    def _change(self, change: Change, step: int, time: float) -> list[Event]:
        before = self.layers[change.layer]
        after = changed(before, change, step)
        self.layers[change.layer] = after
        event = self._event(change, after, step, time)
        if step not in UNDONE:
            return [event]
        # The id is not used again.
        self.layers[change.layer] = replace(before, next_id=after.next_id)
        undone = {"change": "undone", "reason": HURT, "experts": len(before.experts)}
        return [event, event | undone]

    def _event(self, change: Change, after: LayerStructure, step: int, time: float) -> Event:
        is_measured = change.kind not in ("moved", "copied")
        loss = 0.5 + step / 1000
        hosts = [list(after.expert(id_).hosts) for id_ in change.ids if id_ in after.ids]
        return {
            "event": "expert",
            "time": time,
            "step": step,
            "change": change.kind,
            "layer": change.layer,
            "layer_name": after.name,
            "ids": list(change.ids),
            "parents": list(change.parents),
            "hosts": hosts,
            "reason": change.reason,
            "loss_before": loss if is_measured else None,
            "loss_after": loss - 0.004 if is_measured else None,
            "output_change": 3.2e-7 if change.kind == "born" else None,
            "seconds": 0.012,
            "experts": len(after.experts),
        }

    def _graph(self, step: int, epoch: int, time: float) -> Event:
        layers = [self._graph_layer(index, step) for index in range(len(self.layers))]
        return {"event": "expert_graph", "time": time, "step": step, "epoch": epoch, "layers": layers}

    def _graph_layer(self, index: int, step: int) -> dict[str, Any]:
        layer = self.layers[index]
        draw = random.Random(f"{index}-{step}")
        weights = [0.3 + draw.random() for _ in layer.ids]
        experts = [
            {
                "id": expert.id,
                "size": expert.size,
                "share": weight / sum(weights),
                "hosts": list(expert.hosts),
                "age": step - expert.born_step,
                "parents": list(expert.parents),
                "warming": expert.twin_of is not None,
            }
            for expert, weight in zip(layer.experts, weights, strict=True)
        ]
        pairs = list(combinations(layer.ids, 2))
        return {
            "layer": index,
            "name": layer.name,
            "experts": experts,
            "coactivation": [[a, b, round(draw.random(), 3)] for a, b in pairs if draw.random() < 0.7],
            "similarity": [[a, b, round(draw.random(), 3)] for a, b in pairs if draw.random() < 0.5],
        }
