"""One MoE layer trained by hand: SPMD under torchrun, its experts spread evenly over the ranks.

``benchmarks.parallel.expert_parallel`` compares with it.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.parallel.spmd_layer
    [--steps 30]

Each rank has 2,048 tokens of its own, fp32, one thread. The input's gradient is computed, as inside
a model. Prints a line of JSON.

Shapes: T tokens, D width, H hidden size, E experts, L experts of a rank, K experts per token, R
rows, W ranks.
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

TOKENS = 2048
WIDTH = 256
HIDDEN = 512
EXPERTS = 8
TOP_K = 2
WARM_UP = 5


class SpmdLayer(nn.Module):
    """Softmax gate, top-k with normalised weights, this rank's SwiGLU experts.

    One rank exchanges nothing.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self.num_local = EXPERTS // world_size
        gate_generator = torch.Generator().manual_seed(0)
        self.gate_ED = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=gate_generator) * WIDTH**-0.5)
        first = 1 + rank * self.num_local
        generators = [torch.Generator().manual_seed(first + index) for index in range(self.num_local)]
        up = [torch.randn(WIDTH, 2 * HIDDEN, generator=each) * WIDTH**-0.5 for each in generators]
        down = [torch.randn(HIDDEN, WIDTH, generator=each) * HIDDEN**-0.5 for each in generators]
        self.up_LDH = nn.Parameter(torch.stack(up))
        self.down_LHD = nn.Parameter(torch.stack(down))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, chosen_TK = F.linear(x_TD, self.gate_ED).softmax(-1).topk(TOP_K)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        chosen_R = chosen_TK.flatten()
        order_R = chosen_R.argsort(stable=True)
        rows_RD = x_TD.index_select(0, order_R // TOP_K)
        output_RD = self.exchange_and_compute(rows_RD, chosen_R.bincount(minlength=EXPERTS))
        output_RD = output_RD * weights_TK.flatten()[order_R].unsqueeze(1)
        return torch.zeros_like(x_TD).index_add(0, order_R // TOP_K, output_RD)

    def exchange_and_compute(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Send rows sorted by expert to their ranks, compute, and return the results in the same order."""
        if self.world_size == 1:
            return torch.cat(self.compute(rows_RD.split(counts_E.tolist())))
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E)
        received_WL = received_E.view(self.world_size, -1)
        num_sent = counts_E.view(self.world_size, -1).sum(1).tolist()
        num_received = received_WL.sum(1).tolist()
        local_RD = exchange(rows_RD, num_received, num_sent)
        pieces = local_RD.split(received_E.tolist())  # by rank, and by expert within one
        stride = self.num_local
        outputs = self.compute([torch.cat(pieces[index::stride]) for index in range(stride)])
        by_expert = [rows.split(received_WL[:, index].tolist()) for index, rows in enumerate(outputs)]
        by_rank = [by_expert[index][rank] for rank in range(self.world_size) for index in range(stride)]
        return exchange(torch.cat(by_rank), num_sent, num_received)

    def compute(self, rows: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
        """Return the output of each local expert for its rows."""
        outputs = []
        for rows_RD, up_DH, down_HD in zip(rows, self.up_LDH.unbind(), self.down_LHD.unbind(), strict=True):
            gate_RH, value_RH = (rows_RD @ up_DH).chunk(2, dim=-1)
            outputs.append((F.silu(gate_RH) * value_RH) @ down_HD)
        return outputs


def exchange(rows_RD: Tensor, num_received: list[int], num_sent: list[int]) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return all_to_all_single_autograd(rows_RD, num_received, num_sent, group)


def data(rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's tokens and their targets."""
    generator = torch.Generator().manual_seed(1000 + rank)
    x_TD, target_TD = torch.randn(2, TOKENS, WIDTH, generator=generator)
    return x_TD.requires_grad_(), target_TD


def train(steps: int) -> dict[str, float]:
    """Train the layer. Returns its speed and its last loss."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if EXPERTS % world_size:
        raise SystemExit(f"{EXPERTS} experts do not divide evenly over {world_size} ranks")
    layer = SpmdLayer(rank, world_size)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    x_TD, target_TD = data(rank)
    num_values = world_size * target_TD.numel()  # of all ranks: their losses add up to the mean
    seconds = []
    loss = torch.zeros(())
    for _ in range(WARM_UP + steps):
        begun = time.perf_counter()
        loss = (layer(x_TD) - target_TD).square().sum() / num_values
        loss.backward()
        if world_size > 1:
            dist.all_reduce(layer.gate_ED.grad)
        optimizer.step()
        optimizer.zero_grad()
        x_TD.grad = None
        seconds.append(time.perf_counter() - begun)
    loss = loss.detach()
    dist.all_reduce(loss)
    return {
        "ranks": world_size,
        "median_step_s": statistics.median(seconds[WARM_UP:]),
        "mean_step_s": statistics.mean(seconds[WARM_UP:]),
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
