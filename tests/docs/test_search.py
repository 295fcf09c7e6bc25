"""Ten questions of a newcomer: the site's search answers each within its first three pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.docs.site_search import SiteSearch

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
