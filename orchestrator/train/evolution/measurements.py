"""Measurements of the experts of all layers at one point of a run: use, routing, similarity, and their graph.

All workers take part; the result is the same on each, however the experts are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from experts.evolution.views import ExpertView, LayerView, Matrix
from experts.moe.layer import MoELayer
from experts.tokens.dispatch import dispatch
from orchestrator.record.events import kinds
from orchestrator.train.group.world import World

_SKETCH = 4096
"""Numbers that an expert's weights are reduced to: similarities are then known to about one percent."""
_PROJECTED = 64
"""Width that the outputs of experts are projected to before they are compared."""
_EDGES_PER_EXPERT = 4
_LEAST_VALUE = 0.05  # of a similarity or co-activation that the graph shows


@dataclass(frozen=True)
class LayerMeasurement:
    """A layer's view, and the tokens that it was measured on."""

    view: LayerView
    sample_PD: Tensor


def measure_layers(layers: Sequence[MoELayer], world: World, step: int) -> list[LayerMeasurement]:
    """Measure all layers. The sums of their statistics are complete. All workers must call it."""
    return [_measure(number, layer, world, step) for number, layer in enumerate(layers)]


@torch.no_grad()
def _measure(number: int, layer: MoELayer, world: World, step: int) -> LayerMeasurement:
    statistics = layer.statistics
    assert statistics is not None
    sample_PD = statistics.gather_sample(lambda tensor: _gather(tensor, world))
    use = statistics.use_E.tolist()
    total = sum(use) or 1.0
    structure = layer.structure
    experts = tuple(
        ExpertView(
            expert.id,
            expert.size,
            use[row] / total,
            step - expert.born_step,
            expert.twin_of is not None or step < expert.warm_step,
            expert.hosts,
            expert.twin_of,
            # A merged expert has two parents, one made afresh none.
            expert.parents[0] if len(expert.parents) == 1 else None,
        )
        for row, expert in enumerate(structure.experts)
    )
    view = LayerView(
        number,
        structure.name,
        experts,
        layer.gate.top_k,
        structure.next_id,
        statistics.entropy,
        int(statistics.tokens),
        _matrix(_coactivation(statistics.together_EE)),
        _matrix(_similarity(_weight_sketches(layer, world))),
        _matrix(_similarity(_responses(layer, sample_PD, world))),
    )
    return LayerMeasurement(view, sample_PD)


def _gather(tensor: Tensor, world: World) -> Tensor:
    """Return a tensor of each worker, stacked."""
    if world.size == 1:
        return tensor.unsqueeze(0)
    rows = tensor.new_zeros(world.size, *tensor.shape)
    rows[world.rank] = tensor
    return world.all_reduce(rows)


def _coactivation(together_EE: Tensor) -> Tensor:
    """Return the share of the rarer expert's tokens that chose the other one too."""
    count_E = together_EE.diagonal()
    rarer_EE = torch.minimum(count_E.unsqueeze(0), count_E.unsqueeze(1))
    return together_EE / rarer_EE.clamp(min=1)


def _similarity(vectors_EF: Tensor) -> Tensor:
    """Return the cosine of each pair of vectors."""
    unit_EF = F.normalize(vectors_EF.double(), dim=1)
    return unit_EF @ unit_EF.t()


def _weight_sketches(layer: MoELayer, world: World) -> Tensor:
    """Return a short vector for each expert whose cosines are about those of the weights.

    Every so many weights are added up, each with a fixed random sign."""
    sketch_EF = torch.zeros(len(layer.load_E), _SKETCH, dtype=torch.float64, device=layer.load_E.device)
    for group, _, stack in layer.bank.stacks():
        signs = _signs(stack[0].numel()).to(stack.device)
        for row, weight in zip(group.rows, stack.detach().unbind(), strict=True):
            if row in layer.bank.owned:
                signed = weight.reshape(-1).double() * signs
                padded = F.pad(signed, (0, -len(signed) % _SKETCH))
                sketch_EF[row] += padded.view(-1, _SKETCH).sum(0)
    return _over_hosts(sketch_EF, layer, world)


@lru_cache(maxsize=4)
def _signs(count: int) -> Tensor:
    """Return random signs, the same on every host and in every run."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, (count,), generator=generator, dtype=torch.int8) * 2 - 1


def _responses(layer: MoELayer, sample_PD: Tensor, world: World) -> Tensor:
    """Return each expert's outputs for the sampled tokens, projected to a smaller width."""
    num_tokens, width = sample_PD.shape
    generator = torch.Generator().manual_seed(width)
    projection = torch.randn(width, _PROJECTED, generator=generator, dtype=torch.float64)
    projection = projection.to(sample_PD.device)
    response_EF = torch.zeros(
        len(layer.load_E), num_tokens * _PROJECTED, dtype=torch.float64, device=sample_PD.device
    )
    bank = layer.bank
    for row in bank.owned:
        slot = int(bank.slot_E[row])
        slots_TK = torch.full((num_tokens, 1), slot, device=sample_PD.device)
        ones_TK = torch.ones(num_tokens, 1, device=sample_PD.device, dtype=sample_PD.dtype)
        rows_RD, trip = dispatch(sample_PD, slots_TK, ones_TK, len(bank.held))
        output_PD = bank(rows_RD, trip.counts_L, trip.weights_R)
        response_EF[row] = (output_PD.double() @ projection).reshape(-1)
    return _over_hosts(response_EF, layer, world)


def _over_hosts(table_EF: Tensor, layer: MoELayer, world: World) -> Tensor:
    """Fill in the rows of experts on other hosts."""
    return world.all_reduce(table_EF) if layer.context.exchange.size > 1 else table_EF


def _matrix(table: Tensor) -> Matrix:
    return tuple(tuple(row) for row in table.tolist())


# --- the graph of the experts


def graph_event(
    step: int, epoch: int, layers: Sequence[MoELayer], measured: Sequence[LayerMeasurement]
) -> kinds.ExpertGraph:
    """Return the event of all layers' experts. Experts that are gone by now are left out."""
    entries = [_graph_layer(layer, entry.view) for layer, entry in zip(layers, measured, strict=True)]
    return kinds.ExpertGraph(step=step, epoch=epoch, layers=tuple(entries))


def _graph_layer(layer: MoELayer, view: LayerView) -> kinds.GraphLayer:
    structure = layer.structure
    views = {expert.id: expert for expert in view.experts}
    experts = [
        kinds.GraphExpert(
            id=expert.id,
            size=expert.size,
            share=views[expert.id].share if expert.id in views else 0.0,
            hosts=tuple(expert.hosts),
            age=views[expert.id].age_steps if expert.id in views else 0,
            parents=tuple(expert.parents),
            warming=expert.twin_of is not None or expert.id not in views or views[expert.id].warming,
        )
        for expert in structure.experts
    ]
    ids = [expert.id for expert in view.experts]
    present = set(structure.ids)
    return kinds.GraphLayer(
        layer=view.layer,
        name=view.name,
        experts=tuple(experts),
        coactivation=_edges(view.coactivation, ids, present),
        similarity=_edges(view.response_similarity, ids, present),
    )


def _edges(matrix: Matrix, ids: Sequence[int], present: set[int]) -> tuple[kinds.GraphPair, ...]:
    """Return the strongest pairs of each expert."""
    chosen: set[tuple[int, int]] = set()
    for row, values in enumerate(matrix):
        others = [other for other in range(len(ids)) if other != row and ids[other] in present]
        strongest = sorted(others, key=lambda other: -abs(values[other]))[:_EDGES_PER_EXPERT]
        if ids[row] in present:
            chosen |= {
                (min(row, other), max(row, other))
                for other in strongest
                if abs(values[other]) >= _LEAST_VALUE
            }
    return tuple(kinds.GraphPair(ids[a], ids[b], round(matrix[a][b], 4)) for a, b in sorted(chosen))
