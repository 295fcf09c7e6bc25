"""The documentation site builds without a warning, and its pages need no network."""

from __future__ import annotations

import re
from pathlib import Path

from harness.docs.documents import PAGES, ROOT

_ADDRESS = re.compile(r'(?:src|href)="([^"]+)"')
_LOADED = re.compile(r'<(?:script|img|link)[^>]*(?:src|href)="([^"]+)"')


def test_every_page_of_docs_is_a_page_of_the_site(site: Path) -> None:
    pages = [path for path in PAGES if path.parent != ROOT]
    missing = [path for path in pages if not _built(site, path).is_file()]
    assert missing == []


def _built(site: Path, page: Path) -> Path:
    return (site / page.relative_to(ROOT / "docs")).with_suffix(".html")


def test_files_that_pages_link_to_are_part_of_the_site(site: Path) -> None:
    """mkdocs checks links between pages; those to results and sources come from our hook."""
    assert (site / "benchmarks" / "results" / "chaos_cpu_2026-11-15.html").is_file()
    assert (site / "orchestrator" / "plan" / "cost" / "devices.json").is_file()
    for page in site.glob("*.html"):
        if page.name != "404.html":  # its addresses begin at the root of the server
            missing = [name for name in _local_files(page) if not (page.parent / name).exists()]
            assert missing == [], page.name


def _local_files(page: Path) -> set[str]:
    addresses = _ADDRESS.findall(page.read_text(encoding="utf-8"))
    files = {address.partition("#")[0] for address in addresses if "://" not in address}
    return {name for name in files if name and not name.startswith("data:")}


def test_no_page_loads_anything_from_another_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = _LOADED.findall(page.read_text(encoding="utf-8"))
        foreign = [address for address in loaded if address.startswith(("http:", "https:", "//"))]
        assert foreign == [], page.name


def test_commands_that_no_test_runs_are_shown_as_commands(site: Path) -> None:
    page = (site / "recovery.html").read_text(encoding="utf-8")
    assert "no-run" not in page
    assert "worker_1.pid" in page
