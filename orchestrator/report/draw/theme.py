"""Style sheet and script of the page. They are Python strings, since the page is a single file.

Colours are variables, light and dark; series use --c0 to --c5. Without JavaScript only hover values,
the slider and the filters and sorting of tables are missing.
"""

from __future__ import annotations

import re

CSS = """
:root { color-scheme: light dark;
  --bg: #f6f7f9; --card: #ffffff; --ink: #1b2129; --soft: #414b57; --muted: #5d6773; --line: #e3e6ea; --fill: #eef0f3;
  --c0: #3b5bdb; --c1: #e8590c; --c2: #0c8599; --c3: #9c36b5; --c4: #2f9e44; --c5: #54677a;
  --good: #1d6b30; --bad: #c92a2a; --warn: #9a4a00; --cold: #2b6cb0; --warm: #d9480f;
  --shadow: 0 1px 2px rgb(20 30 50 / 5%), 0 4px 14px rgb(20 30 50 / 4%); }
@media (prefers-color-scheme: dark) { :root {
  --bg: #12151a; --card: #1a1f26; --ink: #e8ebef; --soft: #c3cad3; --muted: #8f9aa8; --line: #2b323c; --fill: #252b34;
  --c0: #7f9cff; --c1: #ff9a5a; --c2: #4fc3d4; --c3: #d58aea; --c4: #69cc7f; --c5: #9fb1c4;
  --good: #69cc7f; --bad: #ff8080; --warn: #ffb35c; --cold: #5b9fe6; --warm: #ff7a3d; --shadow: none; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 24px 56px; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 32px 0 12px; font-size: 17px; letter-spacing: -.01em; }
h2 small { margin-left: 8px; color: var(--muted); font-size: 13px; font-weight: 400; letter-spacing: 0; }
p { margin: 0; }
code, .mono { overflow-wrap: anywhere; font-size: .9em;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
code.flag { white-space: nowrap; }
code { padding: 1px 5px; border-radius: 4px; background: var(--fill); }
.head { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; }
.badge { padding: 3px 11px 3px 9px; border-radius: 99px; font-size: 13px; font-weight: 600; color: var(--tone);
  background: color-mix(in srgb, var(--tone) 13%, transparent); }
.badge { white-space: nowrap; }
.badge::before { content: ""; display: inline-block; width: 7px; height: 7px; margin: 0 7px 1px 0; border-radius: 50%;
  background: var(--tone); }
.facts { display: flex; flex-wrap: wrap; gap: 4px 22px; margin-top: 10px; color: var(--soft); font-size: 14px; }
.facts span { color: var(--muted); margin-right: 6px; }
.card { padding: 18px 20px; border: 1px solid var(--line); border-radius: 12px; background: var(--card); box-shadow: var(--shadow); }
.note { margin-top: 12px; padding: 11px 16px; border-left: 4px solid var(--tone); overflow-wrap: anywhere; font-size: 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 16px; }
.tile { padding: 10px 16px 9px; }
.tile b { display: block; margin: 2px 0; font-size: 25px; font-weight: 650; line-height: 1.2; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.tile b i { font-size: 14px; font-style: normal; font-weight: 500; letter-spacing: 0; color: var(--soft); }
h2 + .tiles { margin-top: 0; } .tiles + .grid { margin-top: 14px; }
.label { color: var(--muted); font-size: 13px; }
.verdicts { display: grid; grid-auto-columns: minmax(0, 1fr); grid-auto-flow: column; gap: 12px; margin-top: 12px; }
.verdicts .card { margin: 0; padding: 11px 16px 6px; }
.verdicts h3 { margin: 0 0 4px; font-size: 18px; line-height: 1.25; letter-spacing: -.01em; }
.verdicts ul { margin: 2px 0 4px; padding-left: 16px; font-size: 13.5px; line-height: 1.4; color: var(--soft); }
.verdicts li { margin-bottom: 2px; } .verdicts + h2 { margin-top: 16px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.grid.three { grid-template-columns: repeat(3, minmax(0, 1fr)); }
.grid:not(.three) > :last-child:nth-child(odd) { grid-column: 1 / -1; }
.grid.one { grid-template-columns: minmax(0, 1fr); }
figure { margin: 0; }
.chart { padding: 14px 18px 12px; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 14px; align-items: baseline; min-height: 24px; font-size: 14px; font-weight: 600;
  overflow-wrap: anywhere; }
figcaption .unit, figcaption .key { font-size: 12.5px; font-weight: 400; color: var(--muted); }
figcaption .unit { margin-left: -8px; }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 5px; border-radius: 3px; background: var(--c); }
.key.dashed::before { width: 22px; height: 3px; border-radius: 0; vertical-align: middle;
  background: repeating-linear-gradient(90deg, var(--c) 0 var(--on), transparent var(--on) var(--off)); }
.keys { margin-left: auto; display: flex; flex-wrap: wrap; gap: 0 12px; }
.plot { --left: min(var(--margin), 26vw); position: relative; height: var(--height); margin: 10px 4px 24px var(--left); touch-action: pan-y; }
.plot.named { margin-top: 28px; } .plot :is(.cells, .hatch) { position: absolute; background: var(--fill); image-rendering: pixelated; }
.plot .hatch { background: repeating-linear-gradient(45deg, var(--fill) 0 5px, var(--card) 5px 9px); }
.plot svg { position: relative; display: block; width: 100%; height: 100%; overflow: visible; }
.plot span { position: absolute; color: var(--muted); font-size: 11.5px; line-height: 1; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.plot :is(.x, .y) { overflow: hidden; padding: 1px 0; text-overflow: ellipsis; }
.plot .y { right: calc(100% + 8px); max-width: calc(var(--left) - 8px); transform: translateY(50%); }
.plot .x { top: calc(100% + 7px); transform: translateX(-50%); }
.plot .axis { top: calc(100% + 8px); left: calc(-1 * var(--left)); }
.plot .y-name { left: calc(-1 * var(--left)); bottom: calc(100% + 8px); }
.plot .text { overflow: hidden; padding: 1px 0; color: var(--ink); text-overflow: clip; pointer-events: none; }
.plot .tag { max-width: 100px; padding: 1px 3px; border-radius: 3px; text-overflow: ellipsis;
  background: color-mix(in srgb, var(--card) 84%, transparent); }
svg * { vector-effect: non-scaling-stroke; fill: none; stroke-linejoin: round; stroke-linecap: round; }
svg .gridline { stroke: var(--line); stroke-width: 1; stroke-linecap: butt; }
svg .reach { stroke: transparent; stroke-width: 7; pointer-events: stroke; }
svg g:hover > path:first-child { stroke-width: 3 !important; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--muted); pointer-events: none; }
.tip { position: absolute; z-index: 2; top: 4px; padding: 6px 10px; border-radius: 8px; background: var(--ink); color: var(--bg);
  font-size: 12px; line-height: 1.45; white-space: pre; pointer-events: none; font-variant-numeric: tabular-nums; }
.stack { display: flex; height: 22px; margin: 10px 0 10px; border-radius: 6px; overflow: hidden; background: var(--fill); gap: 1px; }
.stack i { min-width: 0; background: var(--c); }
.parts { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13px; color: var(--soft); }
.parts b { font-weight: 600; font-variant-numeric: tabular-nums; }
.bar { display: grid; grid-template-columns: 92px 1fr 84px; gap: 12px; align-items: center; margin: 6px 0; font-size: 13.5px; }
.bar .stack { margin: 0; background: none; }
.bar i:last-child { border-radius: 0 6px 6px 0; }
.bar > :last-child { text-align: right; font-variant-numeric: tabular-nums; }
.pairs .bar { margin: 0 0 8px; } .pairs .bar:nth-of-type(odd) { margin: 0; } .pairs .stack { height: 12px; }
.remark { margin-top: 12px; color: var(--muted); font-size: 12.5px; }
.scale { max-width: 460px; margin: 12px 0; color: var(--muted); font-size: 12.5px; }
.scale .plot { margin: 6px 40px 26px; }
details.card { margin-top: 14px; padding: 0; }
summary { padding: 15px 20px; cursor: pointer; font-weight: 600; list-style-position: inside; }
summary small { margin-left: 6px; color: var(--muted); font-size: 13px; font-weight: 400; }
.scroll { overflow-x: auto; border-top: 1px solid var(--line); }
.runs th:first-child { width: 26%; } .runs td { min-width: 90px; }
.framed { padding: 0; overflow: hidden; } .framed .scroll { border-top: 0; }
tbody th { padding: 9px 20px; border-top: 1px solid var(--line); color: var(--ink); font-size: inherit; vertical-align: top; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th { padding: 9px 20px; color: var(--muted); font-size: 12.5px; font-weight: 500; text-align: left; white-space: nowrap; }
td { padding: 9px 20px; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; }
td:nth-child(2) { min-width: 104px; }
td.figure { white-space: nowrap; font-variant-numeric: tabular-nums; }
.framed table:not(.runs) td:last-child { min-width: 260px; } .chart .scroll { border-top: 0; }
td .not { margin-top: 4px; color: var(--muted); font-size: 13px; }
tr.changed td:first-child { box-shadow: inset 3px 0 var(--c0); }
tr.plain td { color: var(--muted); }
tr.best td:first-child { box-shadow: inset 3px 0 var(--c1); }
.dense { font-size: 13px; } .dense th, .dense td { padding: 6px; } .dense td:nth-child(2) { min-width: 0; }
.dense th:first-child, .dense td:first-child { padding-left: 20px; } .dense td { white-space: nowrap; }
.dense th { font-size: 12px; white-space: normal; vertical-align: bottom; } .dense .figure { text-align: right; } .dense td.wrap { min-width: 260px; white-space: normal; }
.dense .stack { width: 96px; height: 11px; margin: 4px 0; border-radius: 4px; }
.dense + .parts, .scroll + .parts { padding: 10px 20px 14px; border-top: 1px solid var(--line); }
th button { all: unset; cursor: pointer; white-space: nowrap; } th button:hover { color: var(--ink); }
th button:focus-visible { outline: 2px solid var(--c0); outline-offset: 3px; border-radius: 2px; }
th[aria-sort] { color: var(--ink); } th[aria-sort=ascending] button::after { content: " ▲"; }
th[aria-sort=descending] button::after { content: " ▼"; }
.end-of { color: var(--tone); font-weight: 600; }
.command { display: block; margin: 6px 0 14px; padding: 10px 14px; border-radius: 8px; white-space: pre-wrap; }
.unbroken { white-space: nowrap; } .command:last-child { margin-bottom: 0; }
.filter { display: none; width: calc(100% - 40px); margin: 0 20px 14px; padding: 8px 12px; border: 1px solid var(--line);
  border-radius: 8px; background: var(--bg); color: inherit; font: inherit; font-size: 14px; }
.live .filter { display: block; }
.when { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: center; margin-bottom: 14px; padding: 12px 20px; }
.when input { display: none; flex: 1 1 220px; min-width: 0; margin: 0; accent-color: var(--c0); } .live .when input { display: block; }
.when output { min-width: 210px; font-size: 14px; font-variant-numeric: tabular-nums; text-align: right; }
.frame { display: none; } .frame.now { display: inline; }
.experts { display: block; width: 100%; max-height: 420px; } .experts * { vector-effect: none; }
.experts text { text-anchor: middle; dominant-baseline: central; pointer-events: none; }
.experts .reach { stroke-width: 30; }
.experts g:hover > path:first-child { stroke: var(--c0) !important; stroke-width: 13 !important; }
.graph-key { margin-top: 12px; } .graphs + .changes { margin-top: 14px; }
.changes { max-height: 460px; overflow-y: auto; } .changes small { display: block; color: var(--muted); font-size: 13px; }
.times { margin: 0; padding: 6px 20px; list-style: none; }
.times li { display: grid; grid-template-columns: 84px 92px 120px 1fr; gap: 12px; padding: 8px 0; font-size: 14px; }
.times li + li { border-top: 1px solid var(--line); }
.times span { color: var(--muted); font-variant-numeric: tabular-nums; }
.times em { font-style: normal; font-weight: 600; color: var(--tone); }
.times p { overflow-wrap: anywhere; }
footer { margin-top: 44px; color: var(--muted); font-size: 13px; overflow-wrap: anywhere; }
.t-good { --tone: var(--good); } .t-bad { --tone: var(--bad); } .t-warn { --tone: var(--warn); }
.t-calm { --tone: var(--c5); } .t-info { --tone: var(--c0); }
@media (max-width: 760px) {
  main { padding: 24px 14px 40px; }
  .grid, .grid.three { grid-template-columns: minmax(0, 1fr); } .verdicts { grid-auto-flow: row; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .times li { grid-template-columns: 72px 1fr; gap: 0 12px; }
  th, td, summary { padding-left: 14px; padding-right: 14px; } td:first-child { white-space: normal; }
  .bar { grid-template-columns: 76px 1fr 72px; }
}
@media print {
  .changes { max-height: none; }
  :root { color-scheme: light; } body { background: #fff; font-size: 12px; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; } .card { box-shadow: none; break-inside: avoid; } details.card { break-inside: auto; }
  tr, li, figure { break-inside: avoid; } h2 { break-after: avoid; } .live .filter { display: none; }
}
"""

LIGHT = dict(re.findall(r"--(\w+): (#\w{6});", CSS.partition("@media")[0]))
"""The colours of the light page by name."""

JS = """
'use strict';
document.documentElement.classList.add('live');
const short = v => v && Math.abs(v) < 1e-3 ? v.toExponential(2) : v.toLocaleString('en', {maximumSignificantDigits: 4});
for (const plot of document.querySelectorAll('.plot')) {
  const {x, y, x_is_log, y_is_log, is_count, name} = JSON.parse(plot.dataset.scale || '{}');
  const along = (ends, log, at) => log ? ends[0] * Math.pow(ends[1] / ends[0], at) : ends[0] + at * (ends[1] - ends[0]);
  const lines = [...plot.querySelectorAll('[data-label]')].map(line => ({label: line.dataset.label,
    points: line.dataset.at.split(' ').map(pair => pair.split(',').map(Number))}));
  const cursor = document.createElement('div'), tip = document.createElement('div');
  cursor.className = 'cursor'; tip.className = 'tip'; cursor.hidden = tip.hidden = true; plot.append(cursor, tip);
  plot.addEventListener('pointerleave', () => { cursor.hidden = tip.hidden = true; });
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect(), here = (event.clientX - box.left) / box.width * 1000;
    if (!lines.length || here < 0 || here > 1000) return;
    const near = lines.map(line => line.points.reduce((a, b) => Math.abs(b[0] - here) < Math.abs(a[0] - here) ? b : a));
    const hit = near.reduce((a, b) => Math.abs(b[0] - here) < Math.abs(a[0] - here) ? b : a)[0];
    cursor.hidden = tip.hidden = false; cursor.style.left = hit / 10 + '%';
    const place = at => along(x, x_is_log, at / 1000), apart = i => Math.abs(near[i][0] - hit) > 15;
    const step = at => is_count ? Math.round(place(at)) : short(place(at));
    const value = at => short(along(y, y_is_log, 1 - at / 1000));
    tip.textContent = [name + ' ' + step(hit), ...lines.map((line, i) => line.label + '  ' + value(near[i][1]) +
      (apart(i) ? '  (at ' + step(near[i][0]) + ')' : ''))].join('\\n');
    const right = hit > 400; tip.style.left = right ? 'auto' : 'calc(' + hit / 10 + '% + 10px)';
    tip.style.right = right ? 'calc(' + (100 - hit / 10) + '% + 10px)' : 'auto';
  });
}
for (const part of document.querySelectorAll('.graphs')) {
  const slider = part.querySelector('input'), text = part.querySelector('output');
  const drawings = [...part.querySelectorAll('figure svg')].map(drawing => [...drawing.querySelectorAll('.frame')]);
  slider.addEventListener('input', () => {
    for (const frames of drawings) frames.forEach((frame, at) => frame.classList.toggle('now', at === +slider.value));
    text.textContent = drawings[0][slider.value].dataset.text;
  });
}
for (const field of document.querySelectorAll('.filter')) field.addEventListener('input', () => {
  const words = field.value.toLowerCase().split(/\\s+/);
  for (const row of field.parentElement.querySelectorAll('tbody tr'))
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
});
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, at) => {
    const button = document.createElement('button');
    button.type = 'button'; button.append(...head.childNodes); head.append(button);
    button.addEventListener('click', () => {
      const was = head.getAttribute('aria-sort'), turned = was === 'ascending' ? 'descending' : 'ascending';
      const now = was ? turned : head.dataset.first || 'ascending', sign = now === 'ascending' ? 1 : -1;
      for (const other of heads) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', now);
      const order = (a, b) => isNaN(a) - isNaN(b) || (isNaN(a) ? a.localeCompare(b) : a - b);
      const rows = [...body.rows].map(row => [row.cells[at].dataset.value ?? row.cells[at].textContent, row]);
      rows.sort(([a], [b]) => (a === '') - (b === '') || sign * order(a, b));
      body.append(...rows.map(([, row]) => row));
    });
  });
}
addEventListener('beforeprint', () => { for (const part of document.querySelectorAll('details')) part.open = true; });
"""
