"""Families of ``transformers`` models with our experts against their own eager code in one process.

Tiny random models of the real classes, in fp64, with 7 or 8 experts: in one process, on two hosts, and on
three with uneven numbers of experts, one of them without any in a layer. For each, the largest relative
difference of the loss, of a gradient, of the auxiliary loss and its gradients (a masked batch in two
micro-batches per host), after five steps of AdamW, and after five steps of the task lm with its auxiliary
loss.

    python -m benchmarks.models.families --out benchmarks/results/families_cpu_DATE.md
"""

from __future__ import annotations

from collections.abc import Sequence

import transformers

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from harness.hosts.ranks import run_ranks
from harness.lm.families import FAMILIES
from harness.lm.family_runs import differences, train_eager, train_in_one_process, train_on_hosts

COLUMNS = (
    "loss",
    "gradients",
    "5 AdamW steps",
    "auxiliary loss",
    "its gradients",
    "5 AdamW steps with it",
)
PLACES = {1: "one process", 2: "2 hosts", 3: "3 hosts, uneven"}


def rows(families: Sequence[str], places: Sequence[int]) -> list[list[str]]:
    """Return a row for each family and number of hosts."""
    several = [hosts for hosts in places if hosts > 1]
    ranks = []
    if several:
        ranks = run_ranks(train_on_hosts, max(several), list(families), several, timeout=600.0)
    table: list[list[str]] = []
    for name in families:
        expected = train_eager(name)
        for hosts in places:
            if hosts == 1:
                runs = [train_in_one_process(name)]
            else:
                runs = [rank[name, hosts] for rank in ranks[:hosts]]
            found = differences(name, runs, expected)
            figures = [f"{found[kind]:.0e}" if kind in found else "none" for kind in COLUMNS]
            table.append([name, PLACES[hosts], *figures])
    return table


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--hosts", type=int, nargs="+", choices=list(PLACES), default=list(PLACES))
    arguments = parser.parse_args()
    title = "Families of transformers with our experts: largest differences"
    text = header(title, arguments) + f"transformers {transformers.__version__}, fp64.\n\n"
    found = rows(arguments.families, arguments.hosts)
    publish(text + markdown_table(["family", "where", *COLUMNS], found), arguments.out)


if __name__ == "__main__":
    main()
