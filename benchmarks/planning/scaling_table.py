"""The predicted scaling of known devices, next to the efficiency that a guide promises.

Nothing is measured.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.support import header, markdown_table
from orchestrator.cli.planning.prediction import cluster_figures, prepare_on_cluster
from orchestrator.cli.planning.scaling import COLUMNS, predict_scaling, scaling_cells
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.plan.cost.cluster_spec import parse_cluster
from orchestrator.plan.cost.devices import catalogue
from orchestrator.plan.cost.scaling import IMBALANCE, by_kind
from orchestrator.tasks.load import load_task

PROMISED = {1: 1.0, 2: 0.95, 4: 0.87, 8: 0.81}
"""Efficiency by the number of devices, from a guide for four L4."""
DECODER: dict[str, Any] = {
    "task": "synthetic",
    "width": 768,
    "layers": 12,
    "sequence_length": 1024,
    "vocabulary": 50304,
    "samples": 128,  # 16 on each of 8 devices
}
MODELS: dict[str, dict[str, Any]] = {
    "transformer, 124M": DECODER | {"experts": 0},
    "MoE, 8 experts of 2,048, 2 a token": DECODER | {"experts": 8, "expert_hidden_size": 2048, "top_k": 2},
}
CLUSTERS = {
    "8 × L4": ("nodes=1,gpus=8,gpu=l4,link=pcie", 4),
    "8 × H200": ("nodes=1,gpus=8,gpu=h200,link=nvlink", 16),
}
"""A cluster and the samples of a micro-batch on each of its devices."""


def scaling(arguments: argparse.Namespace) -> str:
    """Return the promised efficiencies next to the predicted ones: weak scaling, one micro-batch on
    each device.
    """
    columns = ["devices", "promised"]
    rows = {count: [str(count), f"{share:.0%}"] for count, share in PROMISED.items()}
    details: list[list[str]] = []
    for cluster, (text, batch) in CLUSTERS.items():
        spec = parse_cluster(text)
        for model, settings in MODELS.items():
            config = Config.of(**settings, batch_size=batch, precision="bf16")
            prepared = prepare_on_cluster(Resolved(config, {}), load_task(config), spec)
            predicted = predict_scaling(prepared, spec, cluster_figures(spec, None)).rows
            for (kind, strategy), group in by_kind(predicted).items():
                if kind == "weak":
                    columns.append(f"{cluster}, {model}, {strategy.replace('_', ' ')}")
                    for row in group:
                        rows[row.devices].append(f"{row.efficiency:.0%}")
                        details.append([columns[-1], *scaling_cells(row, spec)])
    table = markdown_table(columns, list(rows.values()))
    assumptions = (
        "\nWeak scaling, one micro-batch of 1,024-token samples a device (4 on an L4, 16 on an H200), bf16, "
        "no accumulation.\n"
        f"{catalogue().about}\n{catalogue().links_about}\n"
        f"Assumed in expert parallel: the busiest device has {IMBALANCE - 1:.0%} more rows than the mean.\n\n"
    )
    title = header("Scaling: promised and predicted", arguments)
    return title + table + assumptions + markdown_table(["on", *COLUMNS], details)
