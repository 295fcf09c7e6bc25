"""Write docs/images/*.png: small real runs, their pages in a headless Chromium, cut and compressed.

    make docs-images

Runs take a few minutes on two cores. ``--only comparison`` makes one picture; ``--runs FOLDER`` keeps the
runs there, and takes those that an earlier call has left.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from rich.console import Console
from rich.text import Text

from harness.docs.browser import find_chromium, open_browser

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 300_000
COLUMNS = 110
HEADING_TOP = """
[...document.querySelectorAll('h2')].find(head => head.textContent.startsWith(%s))
  .getBoundingClientRect().top - 20
"""
TERMINAL = """<!doctype html><html lang="en"><meta charset="utf-8"><title>terminal</title>
<style>body {{ margin: 0; background: #12151a; color: #e8ebef; }}
pre {{ margin: 0; padding: 20px 24px; font: 14px/1.35 "DejaVu Sans Mono", monospace; }}</style>
<pre>{code}</pre></html>"""


@dataclass(frozen=True)
class Shot:
    """A picture: the commands whose files it needs, and the page or the screen that it shows."""

    name: str
    commands: Mapping[str, str]
    """Commands by the folder that they write: a folder that exists needs no command. ``{folder}`` is the
    folder of the runs."""
    page: str = ""
    """The page to show; without one the output of ``screen``."""
    screen: str = ""
    """The command whose output on a terminal is shown."""
    width: int = 1120
    height: int = 1500
    section: str = ""
    """The heading at which the picture begins; by default the top of the page."""


def train(name: str, flags: str) -> dict[str, str]:
    return {f"results/{name}": f"orchestrator train --name {name} {flags}"}


DIGITS = train("digits", "--workers 2 --parallel-strategy expert_parallel --epochs 3")


SHOTS = (
    Shot(
        "run",
        DIGITS,
        page="results/digits/report.html",
        height=1160,
    ),
    Shot("experts", DIGITS, page="results/digits/report.html", section="Experts", height=1150),
    Shot(
        "sweep",
        {
            "results/widths": "orchestrator sweep --name widths --objective accuracy --trial-steps 60 "
            "--sweep learning-rate=0.001,0.003,0.01 width=16,32,64"
        },
        page="results/widths/report.html",
        height=1780,
    ),
    Shot(
        "comparison",
        {
            **train("narrow-0", "--seed 0 --epochs 2 --width 16"),
            **train("narrow-1", "--seed 1 --epochs 2 --width 16"),
            **train("narrow-2", "--seed 2 --epochs 2 --width 16"),
            **train("wide-0", "--seed 0 --epochs 2 --width 64"),
            **train("wide-1", "--seed 1 --epochs 2 --width 64"),
            **train("wide-2", "--seed 2 --epochs 2 --width 64"),
            "results/comparison": "orchestrator report results/narrow-0 results/narrow-1 results/narrow-2 "
            "results/wide-0 results/wide-1 results/wide-2",
        },
        page="results/comparison/comparison.html",
        height=1960,
    ),
    Shot("watch", DIGITS, screen="orchestrator watch results/digits --once", width=1000),
    Shot(
        "site",
        {"site": f"mkdocs build --quiet --config-file {ROOT}/mkdocs.yml --site-dir {{folder}}/site"},
        page="site/index.html",
        width=1280,
        height=1000,
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[shot.name for shot in SHOTS], help="the picture to make")
    parser.add_argument("--runs", type=Path, help="a folder for the runs, kept")
    options = parser.parse_args(arguments)
    shots = [shot for shot in SHOTS if options.only in (None, shot.name)]
    if options.runs is not None:
        options.runs.mkdir(parents=True, exist_ok=True)
        take(shots, options.runs.resolve())
        return
    with TemporaryDirectory() as folder:
        take(shots, Path(folder))


def take(shots: Sequence[Shot], folder: Path) -> None:
    """Make the runs in a folder, and write the pictures of their pages."""
    program = find_chromium()
    if program is None:
        sys.exit("pictures need Chromium: install the package chromium")
    for shot in shots:
        for target, command in shot.commands.items():
            if not (folder / target).exists():
                run(command, folder)
    IMAGES.mkdir(exist_ok=True)
    with open_browser(program) as browser:
        for shot in shots:
            page = folder / shot.page if shot.page else terminal_page(shot, folder)
            # A low window: a short page ends where its text ends.
            browser.open(page, shot.width, height=200)
            top = browser.evaluate(HEADING_TOP % json.dumps(shot.section)) if shot.section else 0
            picture = browser.screenshot(top, shot.height)
            write_image(IMAGES / f"{shot.name}.png", picture)


def run(command: str, folder: Path) -> str:
    """Run a command in a folder and return its output, coloured as on a terminal."""
    command = command.format(folder=folder)
    sys.stdout.write(f"{command}\n")
    words = [sys.executable, "-m", *command.split()]
    terminal = {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        words, cwd=folder, env=os.environ | terminal, stdout=subprocess.PIPE, text=True, check=False
    )
    if finished.returncode:
        sys.exit(f"it ended with {finished.returncode}: {finished.stdout[-2000:]}")
    return finished.stdout


def terminal_page(shot: Shot, folder: Path) -> Path:
    """Write what a command prints, colours included, as a page that looks like a terminal."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True)
    console.print(Text.from_ansi(run(shot.screen, folder)))
    page = folder / f"{shot.name}.html"
    page.write_text(console.export_html(inline_styles=True, code_format=TERMINAL), encoding="utf-8")
    return page


def write_image(path: Path, picture: bytes) -> None:
    """Write a picture with at most 256 colours, which halves the file and shows no difference."""
    small = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"{path} has {size} bytes; at most {MAX_BYTES} were wanted: lower its height")
    sys.stdout.write(f"wrote {path.relative_to(ROOT)} ({size // 1000} kB)\n")


if __name__ == "__main__":
    main()
