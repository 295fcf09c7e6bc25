"""YAML from untrusted files: plain values only, and a limit on their number.

A few lines of aliases can expand to more entries than there is memory.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

MAX_NODES = 100_000
MAX_CHARACTERS = 1_000_000


def safe_content(text: str) -> Any:
    """Return the content of a YAML text. Every defect of the text raises YAMLError."""
    loader = yaml.SafeLoader(text)
    try:
        node = compose(loader)
        return loader.construct_document(node) if node is not None else None
    except (ValueError, TypeError) as error:  # a 13th month, a number of 5,000 digits, a list as a key
        raise yaml.YAMLError(str(error)) from None
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    finally:
        loader.dispose()


def compose(loader: yaml.SafeLoader) -> yaml.Node | None:
    """Return the node of the text's one document.

    YAMLError for long texts, and for aliases that expand to too much.
    """
    if len(loader.buffer) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it is longer than {MAX_CHARACTERS:,} characters")
    node = loader.get_single_node()
    if node is not None and _num_nodes(node, {}, set()) > MAX_NODES:
        raise ComposerError(
            None, None, f"its aliases stand for more than {MAX_NODES:,} entries", node.start_mark
        )
    return node


def _num_nodes(node: yaml.Node, counts: dict[int, int], ancestors: set[int]) -> int:
    """Count the nodes below a node; those of an alias count at each of its uses.

    ``counts`` keeps the result of each node, so that nested aliases are not walked again and again.
    """
    if id(node) in ancestors:
        raise ComposerError(None, None, "an alias stands for what it is part of", node.start_mark)
    if id(node) not in counts:
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        # The children of a mapping are pairs of key and value, those of a sequence are nodes.
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        below = ancestors | {id(node)}
        counts[id(node)] = 1 + sum(_num_nodes(part, counts, below) for part in parts)
    return counts[id(node)]
