"""A language model's generations, which ``orchestrator evaluate`` writes beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError
from orchestrator.record.events.decoding import measure
from orchestrator.report.draw.markup import esc
from orchestrator.report.run.figures.read import RunRecord, entries, read_tree
from orchestrator.report.run.sections import heading

_RESULTS = "checkpoints/step_*.*.json"
_MAX_LETTERS = 4000
_PARTS = (("prompt", "Prompt"), ("text", "Generated"), ("reference", "In the data"))


def generations_section(record: RunRecord) -> str:
    """Return the generations of the last evaluation that has some."""
    results = [result for path in record.folder.glob(_RESULTS) if (result := _read(path)) is not None]
    if not results:
        return ""
    last = max(results, key=lambda result: measure(result.get("time")) or 0.0)
    generations = entries(last, "generations")
    cards = "".join(_card(generation) for generation in generations)
    from_data = any(generation.get("reference") is not None for generation in generations)
    source = f"prompts of the {last.get('split')} data" if from_data else "prompts of --prompts"
    subtitle = f"{source}, continued by the weights of step {last.get('step')} with the most probable tokens"
    return f'{heading("Generations", subtitle)}<div class="grid one">{cards}</div>'


def _read(path: Path) -> dict[str, Any] | None:
    """Return a result with generations; None for others, and for a file that cannot be read."""
    try:
        result = read_tree(path, json.loads)
    except UserError:
        return None  # of no use to a page about the run
    return result if entries(result, "generations") else None


def _card(generation: Mapping[str, Any]) -> str:
    parts = [
        f'<div class="label">{label}</div><code class="command">{esc(text[:_MAX_LETTERS])}</code>'
        for name, label in _PARTS
        if isinstance(text := generation.get(name), str)
    ]
    return f'<div class="card">{"".join(parts)}</div>'
