"""expert-orchestrator: distributed training for PyTorch on Ray. The public names are loaded when
they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.cli.check import check
    from orchestrator.config.metric import Metric
    from orchestrator.config.settings import Config
    from orchestrator.config.sweep.space_parser import parse_space
    from orchestrator.config.sweep.sweep import Sweep
    from orchestrator.data.json_lines import JsonLines
    from orchestrator.data.parquet import ParquetRows
    from orchestrator.data.source import Source
    from orchestrator.evaluations import EvaluationResult
    from orchestrator.live.callbacks.callbacks import Callback, Request
    from orchestrator.record.machine.monitor import Monitor
    from orchestrator.report.run.figures.frames import read_run
    from orchestrator.report.run.figures.graph_files import read_expert_graph
    from orchestrator.report.run.page import draw_report
    from orchestrator.report.sweep.frames import read_sweep
    from orchestrator.result import Result
    from orchestrator.tasks.metrics import AUC, F1, Perplexity
    from orchestrator.tasks.task import Loss, Task, TensorData
    from orchestrator.tasks.token_file import TokenFile
    from orchestrator.trainer import Trainer
    from orchestrator.weights import load_weights

_HOMES = {
    "AUC": "orchestrator.tasks.metrics",
    "F1": "orchestrator.tasks.metrics",
    "Perplexity": "orchestrator.tasks.metrics",
    "Callback": "orchestrator.live.callbacks.callbacks",
    "Config": "orchestrator.config.settings",
    "EvaluationResult": "orchestrator.evaluations",
    "JsonLines": "orchestrator.data.json_lines",
    "Metric": "orchestrator.config.metric",
    "ParquetRows": "orchestrator.data.parquet",
    "Request": "orchestrator.live.callbacks.callbacks",
    "Trainer": "orchestrator.trainer",
    "Result": "orchestrator.result",
    "Source": "orchestrator.data.source",
    "Sweep": "orchestrator.config.sweep.sweep",
    "Task": "orchestrator.tasks.task",
    "Loss": "orchestrator.tasks.task",
    "TensorData": "orchestrator.tasks.task",
    "TokenFile": "orchestrator.tasks.token_file",
    "Monitor": "orchestrator.record.machine.monitor",
    "check": "orchestrator.cli.check",
    "draw_report": "orchestrator.report.run.page",
    "parse_space": "orchestrator.config.sweep.space_parser",
    "read_expert_graph": "orchestrator.report.run.figures.graph_files",
    "read_run": "orchestrator.report.run.figures.frames",
    "read_sweep": "orchestrator.report.sweep.frames",
    "load_weights": "orchestrator.weights",
}

__all__ = [
    "AUC",
    "F1",
    "Callback",
    "Config",
    "EvaluationResult",
    "JsonLines",
    "Loss",
    "Metric",
    "Monitor",
    "ParquetRows",
    "Perplexity",
    "Request",
    "Result",
    "Source",
    "Sweep",
    "Task",
    "TensorData",
    "TokenFile",
    "Trainer",
    "check",
    "draw_report",
    "load_weights",
    "parse_space",
    "read_expert_graph",
    "read_run",
    "read_sweep",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
