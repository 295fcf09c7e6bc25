"""Tests of the pages of runs, sweeps and comparisons in a headless Chromium: from files, on wide and
narrow screens, light and dark, by keyboard and for screen readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.docs.browser import Browser, Scheme, find_chromium, open_browser
from harness.fakes.fake_events import FakeRun
from harness.fakes.fake_evolution import evolving_record
from harness.fakes.fake_run import events_record, run_record
from harness.fakes.fake_sweep import FakeSweep, write_record
from orchestrator.report.comparison.compare import compare
from orchestrator.report.comparison.page import comparison_page
from orchestrator.report.run.page import page
from orchestrator.report.sweep.page import sweep_page
from tests.report.comparison.helpers import runs_in, write_named
from tests.report.run.findings.test_learning import FALLING, OVERFITTED, run_of

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")

WIDE = 1280
NARROW = 400
LAPTOP = (1366, 768)
MIN_CONTRAST = 4.5
TAB = ("Tab", 9)
RIGHT = ("ArrowRight", 39)

# Text that is wider than the screen, outside of frames that scroll.
OVERFLOWS = """
[...document.body.querySelectorAll('*')].filter(part => !part.closest('.scroll, .changes, svg, script') &&
  part.getBoundingClientRect().width && part.getBoundingClientRect().right > innerWidth + 1)
  .map(part => part.outerHTML.slice(0, 120))
"""
# Texts whose colour is too near to the colours behind them. A canvas turns any colour into numbers.
LOW_CONTRASTS = """
(() => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 1;
  const context = canvas.getContext('2d', {willReadFrequently: true});
  const known = new Map();
  const numbers = color => {
    if (!known.has(color)) {
      context.clearRect(0, 0, 1, 1); context.fillStyle = color; context.fillRect(0, 0, 1, 1);
      known.set(color, [...context.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(color);
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] / 255 + below[i] * (1 - top[3] / 255));
  const behind = part => {
    const own = part ? numbers(getComputedStyle(part).backgroundColor) : [255, 255, 255, 255];
    return own[3] === 255 ? own : over(own, behind(part.parentElement));
  };
  const light = color => {
    const [r, g, b] = color.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const part = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || part.closest('svg, script') || !part.checkVisibility()) continue;
    const back = behind(part), front = over(numbers(getComputedStyle(part).color), back);
    const [low, high] = [light(front), light(back)].sort((a, b) => a - b);
    const ratio = (high + .05) / (low + .05);
    if (ratio < LEAST) found.push(ratio.toFixed(2) + ' ' + part.className + ': ' + text.slice(0, 40));
  }
  return [...new Set(found)];
})()
""".replace("LEAST", str(MIN_CONTRAST))
# Figures without a name for screen readers, without a title, an axis, or a legend of several colours.
BARE_FIGURES = """
[...document.querySelectorAll('figure')].filter(figure => {
  const drawing = figure.querySelector('svg, .stack, table');
  const isNamed = !drawing || drawing.matches('table') || drawing.getAttribute('aria-label');
  const curves = new Set([...figure.querySelectorAll('[data-label]')].map(curve => curve.dataset.label));
  const axis = figure.querySelector('.plot') ? figure.querySelector('.plot .axis') : true;
  return !isNamed || !figure.querySelector('figcaption')?.textContent.trim() || !axis ||
    curves.size > 1 && figure.querySelectorAll('.key').length < curves.size;
}).map(figure => figure.outerHTML.slice(0, 160))
"""
# Tables that are wider than their frames: their last columns are hidden until one scrolls.
CLIPPED = """
[...document.querySelectorAll('.scroll')].filter(frame => frame.scrollWidth > frame.clientWidth)
  .map(frame => frame.getAttribute('aria-label'))
"""
FIRST_CHART = """
(() => { const box = document.querySelector('.plot').getBoundingClientRect();
  return {top: box.top, bottom: box.bottom}; })()
"""
TILE_ROWS = """
new Set([...document.querySelector('.tiles')?.children ?? []].map(tile => tile.offsetTop)).size
"""
BARE_TABLES = """
[...document.querySelectorAll('table')].filter(table => !table.querySelector('thead th[scope=col]') ||
  [...table.querySelectorAll('th')].some(head => !head.scope)).map(table => table.outerHTML.slice(0, 160))
"""
OPERABLE = """
[...document.querySelectorAll('input, button, summary, .scroll')]
  .filter(part => part.checkVisibility()).length
"""
FOCUS = """
(() => { const part = document.activeElement, style = getComputedStyle(part);
  return {tag: part.tagName, at: [...document.querySelectorAll('*')].indexOf(part),
    visible: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0}; })()
"""


def write_sweep_page(folder: Path) -> str:
    return sweep_page(write_record(folder, FakeSweep(failing=(3,), stopped=(5,))))


def write_comparison_page(folder: Path) -> str:
    names = [f"run-{seed}" for seed in range(8)]
    runs = [
        write_named(folder / name, FakeRun(seed=seed, workers=3, recover_at=60), run_seed=seed)
        for seed, name in enumerate(names)
    ]
    runs.append(write_named(folder / "going", FakeRun(ends="killed", step_s=0.2), optim_learning_rate=0.1))
    return comparison_page(compare(runs_in(*runs)))


def write_overfitted_page(folder: Path) -> str:
    """Write the page of a run with every tile: its best weights are not the kept ones, and it recovered."""
    events = run_of(
        FALLING, OVERFITTED, final={"step": 100, "weights": "last", "reason": "set by --keep-last"}
    )
    recovery = {"event": "recovery", "step": 50, "total_seconds": 2.0, "lost_steps": 3, "source": "memory"}
    return page(events_record(folder, [*events, recovery]))


PAGES: dict[str, Callable[[Path], str]] = {
    "dense run": lambda folder: page(run_record(folder, FakeRun(gpu=True, ooms=1, broken={5: "nan"}))),
    "hosted run": lambda folder: page(
        run_record(folder, FakeRun(hosted=True, workers=3, experts=5, layers=2, recover_at=50))
    ),
    "evolving run": lambda folder: page(evolving_record(folder)),
    "overfitted run": write_overfitted_page,
    "sweep": write_sweep_page,
    "comparison": write_comparison_page,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None
    with open_browser(program) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a file of each page."""
    files = {}
    for name, write in PAGES.items():
        folder = tmp_path_factory.mktemp("page")
        files[name] = folder / "page.html"
        files[name].write_text(write(folder / "data"), encoding="utf-8")
    return files


@pytest.mark.parametrize("name", ["dense run", "hosted run", "evolving run", "overfitted run", "comparison"])
def test_the_first_curves_are_above_the_fold_of_a_laptop(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name], *LAPTOP)
    chart = browser.evaluate(FIRST_CHART)
    assert chart["bottom"] <= LAPTOP[1], chart
    assert browser.evaluate(TILE_ROWS) <= 1


@pytest.mark.parametrize("name", ["dense run", "sweep"])
def test_no_table_is_clipped_on_a_laptop(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], *LAPTOP)
    browser.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    assert browser.evaluate(CLIPPED) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_without_errors_and_requests_and_fits_the_screen(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    for width in (WIDE, NARROW):
        browser.open(pages[name], width)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(OVERFLOWS) == []
        assert browser.errors == []
        assert browser.requests == [pages[name].resolve().as_uri()]


@pytest.mark.parametrize("name", PAGES)
def test_text_is_readable_in_light_and_dark(browser: Browser, pages: dict[str, Path], name: str) -> None:
    grounds = []
    schemes: tuple[Scheme, ...] = ("light", "dark")
    for scheme in schemes:
        browser.open(pages[name], WIDE, scheme=scheme)
        grounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert browser.evaluate(LOW_CONTRASTS) == []
    assert len(set(grounds)) == 2


@pytest.mark.parametrize("name", PAGES)
def test_figures_and_tables_say_what_they_are(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], WIDE)
    assert browser.evaluate(BARE_FIGURES) == []
    assert browser.evaluate(BARE_TABLES) == []
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1
    assert browser.evaluate("document.documentElement.lang") == "en"
    unnamed = [node for node in accessible_nodes(browser) if not node["name"]["value"].strip()]
    assert unnamed == []


def accessible_nodes(browser: Browser) -> list[dict[str, Any]]:
    """Return what a screen reader must be able to name: landmarks, images, and everything to operate."""
    roles = ("main", "region", "image", "slider", "searchbox", "button", "DisclosureTriangle")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    assert any(node["role"]["value"] == "main" for node in named)
    return [node for node in named if node["role"]["value"] != "main"]


@pytest.mark.parametrize("name", PAGES)
def test_everything_to_operate_is_reached_by_tab_and_shows_the_focus(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name], WIDE)
    browser.press(*TAB)
    visited: dict[int, dict[str, Any]] = {}
    # After the last part the focus goes to the page itself, or begins again at the first.
    while (focus := browser.evaluate(FOCUS))["tag"] != "BODY" and focus["at"] not in visited:
        visited[focus["at"]] = focus
        browser.press(*TAB)
    assert [focus for focus in visited.values() if not focus["visible"]] == []
    assert len(visited) == browser.evaluate(OPERABLE)


def test_arrow_keys_move_the_slider_of_the_graphs(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["evolving run"], WIDE)
    browser.evaluate(
        "const slider = document.querySelector('.graphs input'); slider.value = 0; slider.focus()"
    )
    before = browser.evaluate("document.querySelector('.graphs output').textContent")
    browser.press(*RIGHT)
    assert browser.evaluate("document.querySelector('.graphs output').textContent") != before
    assert browser.evaluate("document.querySelectorAll('.graphs figure .frame.now').length") > 0


def test_enter_sorts_the_trials_of_a_sweep(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["sweep"], WIDE)
    browser.evaluate("document.querySelector('table.sortable th button').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r")
    assert browser.evaluate("document.querySelector('table.sortable th').getAttribute('aria-sort')")
