"""Ten questions of a newcomer: the site's search answers each within its first three pages. It works from
files, without a server."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from harness.docs.browser import find_chromium, open_browser

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


QUESTIONS = {
    "train own model": "own-model.html",
    "resume killed run": "recovery.html",
    "fine-tune LLM LoRA": "language-models.html",
    "CUDA out of memory": "troubleshooting.html",
    "train on several GPUs": "training.html",
    "loss is nan": "troubleshooting.html",
    "host worker node meaning": "concepts.html",
    "save checkpoints S3": "storage.html",
    "find best learning rate": "sweeps.html",
    "migrate from DeepSpeed": "coming-from.html",
}


@pytest.fixture(scope="module")
def search(site: Path) -> SiteSearch:
    pytest.importorskip("lunr", reason="the search needs pip install 'expert-orchestrator[docs]'")
    return SiteSearch.of(site)


@pytest.mark.extended
@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_a_question_is_answered_within_three_hits(search: SiteSearch, question: str, page: str) -> None:
    assert page in search.pages(question)[:3]


@pytest.mark.extended
def test_pages_from_files_load_the_index_as_a_script(site: Path) -> None:
    """A browser lets such pages neither fetch a file nor start a worker."""
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert json.loads(script.removeprefix("var __index = ")) == json.loads(index)
    for name in ("index.html", "benchmarks/results/index.html"):
        page = (site / name).read_text(encoding="utf-8")
        worker = page.index('iframe-worker.js"></script>')
        assert worker < page.index("assets/javascripts/bundle"), "the theme starts its worker at once"


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", ["index.html", "benchmarks/results/index.html"])
def test_a_browser_finds_pages_from_files(site: Path, name: str) -> None:
    with open_browser(find_chromium() or "") as browser:
        browser.open(site / name)
        browser.evaluate("""
            const field = document.querySelector('[data-md-component=search-query]');
            field.focus();
            field.value = 'resume killed run';
            field.dispatchEvent(new Event('input', {bubbles: true}));
            field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
        """)
        found: list[str] = []
        deadline = monotonic() + 60
        while not found and monotonic() < deadline:
            sleep(0.1)
            found = browser.evaluate(
                "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
            )
        assert found[:1] == [f"{(site / 'recovery.html').as_uri()}?h=resume+killed+run"]
        assert browser.errors == []
        assert [address for address in browser.requests if not address.startswith("file:")] == []
