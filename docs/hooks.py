"""Hooks of mkdocs: files outside of docs/ that pages link to, and fences of commands that no test runs.

Pages of docs/ link to results and sources by their paths in the repository, as GitHub shows them. On the site
these files are pages and downloads of its own, so that every link works without a network.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^```(\w+) no-run$", flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the results of the benchmarks, the list of changes, and the sources that pages link to."""
    results = sorted(ROOT.glob(f"{RESULTS}/*.md"))
    others = ("benchmarks/LOG.md", "benchmarks/README.md", "examples/README.md", "CHANGELOG.md")
    pages = [*results, *(ROOT / name for name in others)]
    for path in {*pages, *_linked_sources()}:
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, f"{RESULTS}/index.md", content=_list_of(results)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn paths of the repository into paths of the site, and leave out the words for the tests."""
    uri = page.file.src_uri
    if page.file.generated_by:
        page.meta["search"] = {"exclude": True}  # pages that explain a result or a change are found instead
    home = posixpath.dirname(uri if page.file.generated_by else f"docs/{uri}")
    markdown = _FENCE.sub(r"```\1", markdown)
    return _LINK.sub(lambda link: f"{link[1]}{_on_site(link[2], home, uri)}{link[3]}", markdown)


def _on_site(target: str, home: str, uri: str) -> str:
    """Return a link's target as seen from the page ``uri`` of the site.

    ``home`` is the folder of the page in the repository.
    """
    path = posixpath.normpath(posixpath.join(home, target))
    if "://" in target or not (ROOT / path).exists():
        return target  # of the web, or a mistake that mkdocs reports
    if (ROOT / path).is_dir():
        path = f"{path}/index.md"
    return posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(uri) or ".")


def _linked_sources() -> set[Path]:
    """Return the files outside of docs/ that are no Markdown and that pages link to."""
    linked = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for _, target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if path.is_file() and path.suffix != ".md" and ROOT / "docs" not in path.parents:
                linked.add(path)
    return linked


def _list_of(results: list[Path]) -> str:
    titles = [path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ") for path in results]
    lines = [f"- [{title}]({path.name})" for title, path in zip(titles, results, strict=True)]
    return "\n".join(["# Measured results", "", *lines, ""])
