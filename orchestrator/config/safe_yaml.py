"""YAML from strangers: plain values alone, and not more of them than the text has room for. A few lines of aliases can stand for more
entries than there is memory."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

MOST_NODES = 100_000
MOST_CHARACTERS = 1_000_000


def safe_content(text: str) -> Any:
    """The content of a YAML text. Whatever is wrong with it is a YAMLError."""
    loader = yaml.SafeLoader(text)
    try:
        node = composed(loader)
        return loader.construct_document(node) if node is not None else None
    except (ValueError, TypeError) as error:  # a 13th month, a number of 5,000 digits, a list as a key
        raise yaml.YAMLError(str(error)) from None
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    finally:
        loader.dispose()


def composed(loader: yaml.SafeLoader) -> yaml.Node | None:
    """The one document of a text that is no longer, and whose aliases stand for no more, than can be looked through; and not for
    themselves."""
    if len(loader.buffer) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"it is longer than {MOST_CHARACTERS:,} characters")
    node = loader.get_single_node()
    if node is not None:
        size = _size(node, {}, set())
        if size > MOST_NODES:
            raise ComposerError(
                None, None, f"its aliases stand for more than {MOST_NODES:,} entries", node.start_mark
            )
    return node


def _size(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """Entries below a node, those of aliases counted wherever they stand."""
    if id(node) in above:
        raise ComposerError(None, None, "an alias stands for what it is part of", node.start_mark)
    if id(node) not in known:
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        flat = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_size(part, known, above | {id(node)}) for part in flat)
    return known[id(node)]
