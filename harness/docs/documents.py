"""The pages of the documentation: their code blocks, links and anchors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int
    language: str
    runs: bool
    """False where the fence says ``no-run``: the block needs a cluster, a GPU or minutes."""
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self, program: str) -> list[str]:
        """Return the lines that start a program, without trailing comments."""
        lines = [line.split("  #")[0].strip() for line in self.text.splitlines()]
        return [line for line in lines if line.startswith(f"{program} ")]


def blocks() -> list[Block]:
    """Return the code blocks of all pages, in order."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            runs = "no-run" not in match[2].split()
            found.append(Block(page_name(path), line, match[1], runs, match[3]))
    return found


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """Return a page without its code blocks."""
    return _BLOCK.sub("", text)


def broken_links(path: Path) -> list[str]:
    """Return the links of a page whose file or anchor does not exist.

    Links into the web are not followed.
    """
    broken = []
    for target in _LINK.findall(prose(path.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists():
            broken.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(linked.read_text(encoding="utf-8")):
            broken.append(f"{target}: no such heading")
    return broken


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    kept = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in _HEADING.findall(prose(text)))
    return {heading.replace(" ", "-") for heading in kept}
