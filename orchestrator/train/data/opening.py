"""Opens the feed that fits the data: with random access, or read in order."""

from __future__ import annotations

from typing import Any

from orchestrator.data.source import Source
from orchestrator.train.data.indexed import IndexedFeed
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.steps import Feed, as_dataset
from orchestrator.train.data.stream import StreamFeed
from orchestrator.train.group.world import World


def open_feed(
    data: Any,
    world: World,
    *,
    global_batch: int,
    micro_batch: int,
    seed: int | None,
    loader: LoaderOptions,
) -> Feed:
    """Return data of any form as a stream of steps; ``micro_batch`` is the mean per worker.

    Without a seed the order is the data's own (evaluation).
    """
    data = as_dataset(data)
    kind = StreamFeed if isinstance(data, Source) else IndexedFeed
    return kind(data, world, global_batch=global_batch, micro_batch=micro_batch, seed=seed, loader=loader)
