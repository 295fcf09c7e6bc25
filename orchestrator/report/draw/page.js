// Without this script only hover values, the slider and the filters and sorting of tables are missing.
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
      (apart(i) ? '  (at ' + step(near[i][0]) + ')' : ''))].join('\n');
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
  const words = field.value.toLowerCase().split(/\s+/);
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
