"""Ten questions of a newcomer: the site's search answers each within its first three pages. It works from
files, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic, sleep

import pytest

from harness.docs.browser import find_chromium, open_browser
from harness.docs.site_search import SiteSearch

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


@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_a_question_is_answered_within_three_hits(search: SiteSearch, question: str, page: str) -> None:
    assert page in search.pages(question)[:3]


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
