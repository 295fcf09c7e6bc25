"""The search of the documentation site, computed as in the browser.

The index of lunr finds hits; pages come before their sections, and hits with more of the terms before others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAG = re.compile(r"<[^>]+>")


@dataclass(frozen=True)
class SiteSearch:
    """The index of a built site."""

    index: Any

    @classmethod
    def of(cls, site: Path) -> SiteSearch:
        """Read the index that the browser would read."""
        from lunr.builder import Builder
        from lunr.stop_word_filter import stop_word_filter

        content = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
        builder = Builder()
        builder.pipeline.add(stop_word_filter)  # English, without stemming: the default of the theme
        builder.search_pipeline.add(stop_word_filter)
        builder.b(0)
        builder.ref("location")
        builder.field("title", boost=1000)
        builder.field("text")
        for entry in content["docs"]:
            words = {name: _TAG.sub(" ", entry[name]) for name in ("title", "text")}
            builder.add({"location": entry["location"], **words})
        return cls(builder.build())

    def pages(self, query: str) -> list[str]:
        """Return the pages in the order of their best hits.

        Each term stands for all words that begin with it."""
        terms = [term for term in re.split(r"[\s\-]+", query.lower()) if term]
        found = self.index.search(" ".join(f"{term}*" for term in terms))
        hits = [(_score(hit, terms), hit["ref"]) for hit in found]
        ordered = [location.partition("#")[0] for _, location in sorted(hits, reverse=True)]
        return list(dict.fromkeys(ordered))


def _score(hit: Any, terms: list[str]) -> float:
    is_page = "#" not in hit["ref"]
    words = list(hit["match_data"].metadata)
    share = sum(any(word.startswith(term) for word in words) for term in terms) / len(terms)
    return hit["score"] * (1 + (is_page + share) ** 2)
