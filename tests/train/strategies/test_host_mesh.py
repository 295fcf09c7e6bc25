"""Meshes of expert hosts, whose groups are formed anew after each recovery."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from experts.hosts.group import Group
from orchestrator.train.optim.shards import own_rows
from orchestrator.train.strategies.host_mesh import HostMesh

CPU = torch.device("cpu")


def test_shards_of_a_later_group_do_not_get_an_earlier_one() -> None:
    """Torch caches what operations on shards return, by their mesh. A survivor may have another rank too."""
    seen: list[Any] = []
    for rank in (0, 2, 1):
        group = Group(rank, 3, None)
        mesh = HostMesh(group, CPU)
        shard: Any = DTensor.from_local(
            torch.ones(4, 5), mesh, [Shard(0)], run_check=False, shape=torch.Size((12, 5)), stride=(5, 1)
        )
        results: list[Any] = [shard.detach(), torch.zeros_like(shard), shard * 2]
        for tensor in results:
            assert tensor.device_mesh.host_group is group
            rows = own_rows(tensor)
            assert rows is not None
            assert (rows.first, rows.end) == (4 * rank, 4 * rank + 4)
        seen.append(mesh)
    assert len(set(seen)) == 3
