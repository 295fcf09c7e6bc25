"""One MoE layer trained by hand: SPMD under torchrun, its experts spread evenly over the ranks. What ``expert_parallel``
compares with.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.spmd_layer [--steps 30]

Each rank has 2,048 tokens of its own, fp32, one thread. The input's gradient is computed, as inside a model. Prints a line of
JSON. Letters of shapes: T tokens, D width, H hidden size, E experts, L experts of a rank, K experts per token, R rows, W ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 2048, 256, 512, 8, 2
WARM_UP = 5


class SpmdLayer(nn.Module):
    """Softmax gate, top-k with normalised weights, this rank's SwiGLU experts. One rank exchanges nothing."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.world, self.local = world, EXPERTS // world
        self.gate_ED = nn.Parameter(
            torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(0)) * WIDTH**-0.5
        )
        draws = [torch.Generator().manual_seed(1 + rank * self.local + i) for i in range(self.local)]
        up = [torch.randn(WIDTH, 2 * HIDDEN, generator=draw) * WIDTH**-0.5 for draw in draws]
        down = [torch.randn(HIDDEN, WIDTH, generator=draw) * HIDDEN**-0.5 for draw in draws]
        self.up_LDH, self.down_LHD = nn.Parameter(torch.stack(up)), nn.Parameter(torch.stack(down))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, chosen_TK = F.linear(x_TD, self.gate_ED).softmax(-1).topk(TOP_K)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        chosen_R = chosen_TK.flatten()
        order_R = chosen_R.argsort(stable=True)
        rows_RD = x_TD.index_select(0, order_R // TOP_K)
        made_RD = self.out_and_back(rows_RD, chosen_R.bincount(minlength=EXPERTS))
        made_RD = made_RD * weights_TK.flatten()[order_R].unsqueeze(1)
        return torch.zeros_like(x_TD).index_add(0, order_R // TOP_K, made_RD)

    def out_and_back(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows come sorted by expert and are returned in that order, wherever the experts live."""
        if self.world == 1:
            return torch.cat(self.experts(rows_RD.split(counts_E.tolist())))
        got_E = torch.empty_like(counts_E)
        dist.all_to_all_single(got_E, counts_E)
        counts_WL, got_WL = counts_E.view(self.world, -1), got_E.view(self.world, -1)
        sent, got = counts_WL.sum(1).tolist(), got_WL.sum(1).tolist()
        here = exchange(rows_RD, got, sent)
        pieces = here.split(got_E.tolist())  # by rank, and by expert within one
        made = self.experts([torch.cat(pieces[i :: self.local]) for i in range(self.local)])
        by_expert = [rows.split(got_WL[:, i].tolist()) for i, rows in enumerate(made)]
        by_rank = torch.cat([by_expert[i][rank] for rank in range(self.world) for i in range(self.local)])
        return exchange(by_rank, sent, got)

    def experts(self, rows: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
        made = []
        for rows_RD, up_DH, down_HD in zip(rows, self.up_LDH.unbind(), self.down_LHD.unbind(), strict=True):
            gate_RH, value_RH = (rows_RD @ up_DH).chunk(2, dim=-1)
            made.append((F.silu(gate_RH) * value_RH) @ down_HD)
        return made


def exchange(rows_RD: Tensor, got: list[int], sent: list[int]) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return all_to_all_single_autograd(rows_RD, got, sent, group)


def data(rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens and what the layer shall make of them."""
    x_TD, target_TD = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 + rank))
    return x_TD.requires_grad_(), target_TD


def train(steps: int) -> dict[str, float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if EXPERTS % world:
        raise SystemExit(f"{EXPERTS} experts do not divide evenly over {world} ranks")
    layer = SpmdLayer(rank, world)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    x_TD, target_TD = data(rank)
    seconds, loss = [], torch.zeros(())
    for _ in range(WARM_UP + steps):
        begun = time.perf_counter()
        loss = (layer(x_TD) - target_TD).square().sum() / (
            world * target_TD.numel()
        )  # the ranks' losses add up
        loss.backward()
        if world > 1:
            dist.all_reduce(layer.gate_ED.grad)
        optimizer.step()
        optimizer.zero_grad()
        x_TD.grad = None
        seconds.append(time.perf_counter() - begun)
    loss = loss.detach()
    dist.all_reduce(loss)
    step_s = statistics.median(seconds[WARM_UP:])
    return {
        "ranks": world,
        "tokens_per_s": world * TOKENS / step_s,
        "step_ms": 1000 * step_s,
        "loss": loss.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = train(arguments.steps)
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
