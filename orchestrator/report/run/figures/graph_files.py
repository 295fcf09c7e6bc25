"""Files and objects of the graph of a run's experts: pictures, JSON, networkx."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import UserError
from orchestrator.record.experts.expert_graph import graph_of_epochs
from orchestrator.record.files.event_log import encode_event
from orchestrator.report.draw.image import png
from orchestrator.report.draw.write import write_whole
from orchestrator.report.graph.networks import to_json, to_networkx
from orchestrator.report.graph.plot import graph_picture
from orchestrator.report.graph.view import graph_views, spread
from orchestrator.report.run.figures.read import RunRecord, read_run_record

if TYPE_CHECKING:
    from networkx import MultiGraph

GRAPH_JSON = "expert_graph.json"
MAX_PICTURES = 40
"""Of more epochs as many are drawn, evenly spaced, with the first and the last."""


def write_graph_files(record: RunRecord, folder: Path, with_pictures: bool = True) -> list[Path]:
    """Write the graph of each epoch as a picture, and all graphs as JSON; nothing without graphs."""
    graphs = record.expert_graphs
    if not graphs:
        return []
    pictures = _draw_epochs(record, folder) if with_pictures else []
    data = to_json(graphs, record.expert_changes)
    return [*pictures, write_whole(folder / GRAPH_JSON, encode_event(data) + "\n")]


def _draw_epochs(record: RunRecord, folder: Path) -> list[Path]:
    ends_of_epochs = list(graph_of_epochs(record.expert_graphs).values())
    views = graph_views(record.expert_graphs, record.expert_changes, spread(ends_of_epochs, MAX_PICTURES))
    return [
        write_whole(folder / f"knowledge_graph_epoch_{view.epoch}.png", png(graph_picture(view, record.name)))
        for view in views
    ]


def read_expert_graph(folder: str | Path, epoch: int | None = None) -> MultiGraph:
    """Return the graph of a run's experts at the end of an epoch, as networkx has it::

        graph = orchestrator.read_expert_graph("results/digits")
        busiest = max(graph.nodes, key=lambda node: graph.nodes[node]["share"])

    Epochs are counted from 1, as in the names of the pictures; without one it is the last graph of the run.
    A node is (layer, expert id), with the attributes ``share``, ``size``, ``hosts``, ``age``, ``parents``,
    ``warming``. The key of an edge is its kind: ``coactivation`` and ``similarity`` have a ``value``,
    ``parentage`` the ``parent``.
    """
    graphs = read_run_record(Path(folder)).expert_graphs
    if not graphs:
        raise UserError(
            f"the run {folder} recorded no graph of its experts: a run writes them while its experts may "
            "change. Train with --evolution cautious or bold"
        )
    of_epoch = graph_of_epochs(graphs)
    if epoch is not None and epoch not in of_epoch:
        known = ", ".join(map(str, of_epoch))
        raise UserError(f"the run {folder} has no graph of epoch {epoch}; it has {known}")
    return to_networkx(graphs[-1] if epoch is None else of_epoch[epoch])
