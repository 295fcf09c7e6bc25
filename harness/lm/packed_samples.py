"""Reads packed samples back into documents, slowly, and writes data files for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.data.documents.opening import open_documents
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.packed import NO_LABEL, PackedDocuments


@dataclass(frozen=True)
class Segment:
    """Part of a sample whose positions count up from 0."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]

    def labelled(self) -> list[tuple[int, int]]:
        """Return pairs of a position and its label."""
        return [(place, label) for place, label in enumerate(self.labels) if label != NO_LABEL]


def segments_of(packed: PackedDocuments) -> list[list[Segment]]:
    """Return the segments of each sample; padding must be at the end and without labels."""
    samples = []
    for index in range(len(packed)):
        batch = packed.gather(torch.tensor([index]))
        ids, labels, positions, mask = (
            batch[name][0].tolist() for name in ("input_ids", "labels", "position_ids", "mask")
        )
        num_real = sum(mask)
        assert mask == [1] * num_real + [0] * (len(mask) - num_real)
        assert set(labels[num_real:]) <= {NO_LABEL}
        begins = [place for place in range(num_real) if positions[place] == 0]
        assert begins[0] == 0
        sample = []
        for begin, end in zip(begins, [*begins[1:], num_real], strict=True):
            assert positions[begin:end] == list(range(end - begin))
            sample.append(Segment(tuple(ids[begin:end]), tuple(labels[begin:end])))
        samples.append(sample)
    return samples


def write_rows(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    return file


def open_rows(file: Path, rows: Sequence[Any], tokenizer: Any, **options: Any) -> PackedDocuments:
    """Write rows into a JSONL file and open it."""
    write_rows(file, rows)
    settings: dict[str, Any] = {"sequence_length": 64, **options}
    return open_documents([str(file)], tokenizer, DocumentOptions(**settings), lambda note: None)
