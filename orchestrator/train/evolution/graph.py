"""The graph of a run's experts at one point, as an event: experts, co-activation and similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experts.evolution.views import LayerView, Matrix
from experts.moe.layer import MoELayer
from orchestrator.train.evolution.measurements import LayerMeasurement

_EDGES_PER_EXPERT = 4
_LEAST_VALUE = 0.05


def graph_fields(
    step: int, epoch: int, layers: Sequence[MoELayer], measured: Sequence[LayerMeasurement]
) -> dict[str, Any]:
    """Return the fields of an ``expert_graph`` event. Experts that are gone by now are left out."""
    entries = [_layer_fields(layer, entry.view) for layer, entry in zip(layers, measured, strict=True)]
    return {"step": step, "epoch": epoch, "layers": entries}


def _layer_fields(layer: MoELayer, view: LayerView) -> dict[str, Any]:
    structure = layer.structure
    views = {expert.id: expert for expert in view.experts}
    experts = [
        {
            "id": expert.id,
            "size": expert.size,
            "share": views[expert.id].share if expert.id in views else 0.0,
            "hosts": list(expert.hosts),
            "age": views[expert.id].age_steps if expert.id in views else 0,
            "parents": list(expert.parents),
            "warming": expert.twin_of is not None or expert.id not in views or views[expert.id].warming,
        }
        for expert in structure.experts
    ]
    ids = [expert.id for expert in view.experts]
    present = set(structure.ids)
    return {
        "layer": view.layer,
        "name": view.name,
        "experts": experts,
        "coactivation": _edges(view.coactivation, ids, present),
        "similarity": _edges(view.response_similarity, ids, present),
    }


def _edges(matrix: Matrix, ids: Sequence[int], present: set[int]) -> list[list[float]]:
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
    return [[ids[a], ids[b], round(matrix[a][b], 4)] for a, b in sorted(chosen)]
