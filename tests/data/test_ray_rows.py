"""Tests of Ray Data sets as sources, with a stand-in that has their methods."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from orchestrator.data.adapt import as_source
from orchestrator.data.ray_rows import RayRows


class Dataset:
    """Rows in blocks that come in any order, unless it is asked to keep it."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        blocks = [range(3), range(3, 5)]
        if not self.context.execution_options.preserve_order:
            blocks.reverse()
        return ({"id": number} for block in blocks for number in block)

    def streaming_split(self) -> None: ...

    def materialize(self) -> None: ...


class MaterializedDataset(Dataset):
    def count(self) -> int:
        return 5


def test_rows_come_in_the_order_of_the_blocks_in_each_pass() -> None:
    source = as_source(Dataset())
    assert isinstance(source, RayRows)
    for epoch in range(2):
        assert [row["id"] for row in source.read(epoch).take(10)] == list(range(5))
    assert "reads the epoch again up to its position" in str(source.note)


def test_only_a_materialized_data_set_knows_its_length() -> None:
    assert as_source(Dataset()).num_samples is None
    assert not as_source(Dataset()).is_materialized
    assert as_source(MaterializedDataset()).num_samples == 5
    assert as_source(MaterializedDataset()).is_materialized
