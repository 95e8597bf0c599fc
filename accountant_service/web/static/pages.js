// What the pages do beyond HTML: plots drawn from the tables beside them, sliders, copying.
"use strict";

const DIGITS = 6; // as in the table that a plot is drawn from: a bound is not rounded once more
const HEIGHT = 280;
const AXIS_FONT = "13px system-ui, sans-serif";

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// --- plots

function numberOf(cell) {
  const value = Number(cell.dataset.value ?? cell.textContent);
  return Number.isFinite(value) ? value : null;
}

function columnsOf(table, positiveOnly) {
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map(numberOf));
  const kept = rows.filter((row) => !positiveOnly || row[0] > 0);
  return [...table.tHead.rows[0].cells].map((_, at) => kept.map((row) => row[at]));
}

function axis(more) {
  const grid = { stroke: colour("line"), width: 1 };
  return { stroke: colour("muted"), grid, ticks: grid, ...more };
}

function lineOf(label, at, stepped) {
  const stroke = colour(["accent", "second", "third"][at % 3]);
  const paths = stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
  return { label, stroke, width: 2, paths, spanGaps: true, points: { show: false }, dash: at === 2 ? [4, 4] : [] };
}

// A column of single points, such as the recommended run: a marker in place of a line.
function marksOf(label, at) {
  const stroke = colour(["accent", "second", "third", "bad"][at % 4]);
  return { label, stroke, paths: () => null, points: { show: true, size: 13, width: 2.5, fill: colour("paper") } };
}

function limitLine(limit) {
  const stroke = colour("bad");
  return { label: "budget", stroke, width: 1.5, dash: [6, 4], points: { show: false }, value: () => short(Number(limit)) };
}

const AXES = {
  log: { splits: (_, __, low, high) => powersBetween(low, high), values: (_, ticks) => ticks.map(String) },
  time: { values: (_, ticks, __, ___, seconds) => ticks.map((tick) => clock(tick, seconds)) },
};

function optionsOf(figure, labels, width) {
  const { x = "plain", steps, limit, yTitle } = figure.dataset;
  const marked = Number(figure.dataset.marks ?? labels.length);
  const value = (_, found) => short(found);
  const moment = (_, found) => (found == null ? "–" : clock(found, 0));
  const series = (label, at) => (at + 1 < marked ? lineOf(label, at, steps) : marksOf(label, at));
  const lines = labels.slice(1).map((label, at) => ({ ...series(label, at), value }));
  const titled = (label) => (label ? { label, labelSize: 22, labelFont: AXIS_FONT } : {});
  return {
    width,
    height: HEIGHT,
    tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "Etc/UTC"),
    scales: {
      x: { time: x === "time", distr: x === "log" ? 3 : 1 },
      y: { range: (_, __, top) => [0, (top || 1) * 1.05] },
    },
    axes: [axis({ space: 80, ...titled(labels[0]), ...AXES[x] }), axis({ size: 48, ...titled(yTitle) })],
    series: [
      { label: labels[0], value: x === "time" ? moment : value },
      ...lines,
      ...(limit ? [limitLine(limit)] : []),
    ],
    cursor: { drag: { x: false, y: false } },
  };
}

// A moment in UTC, as exactly as the distance between two of them asks for.
function clock(tick, seconds) {
  const text = new Date(1000 * tick).toISOString();
  if (seconds >= 86400) return text.slice(0, 10);
  return seconds === 0 ? text.slice(0, 19).replace("T", " ") : text.slice(11, seconds >= 60 ? 16 : 19);
}

function short(value) {
  return value == null ? "–" : Number(value.toPrecision(DIGITS)).toString();
}

function powersBetween(low, high) {
  const [first, last] = [low, high].map((end) => Math.round(Math.log10(end)));
  return Array.from({ length: last - first + 1 }, (_, at) => Number(`1e${first + at}`));
}

function draw(figure) {
  const holder = figure.querySelector(".canvas");
  const table = document.getElementById(figure.dataset.from);
  const width = holder.parentElement.clientWidth;
  if (!table || !width || !table.tBodies[0].rows.length) return;
  const labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const columns = columnsOf(table, figure.dataset.x === "log");
  const { limit } = figure.dataset;
  if (limit) columns.push(columns[0].map(() => Number(limit)));
  holder.replaceChildren();
  new uPlot(optionsOf(figure, labels, width), columns, holder);
  figure.dataset.width = width;
}

function drawAll(root) {
  root.querySelectorAll("figure.plot").forEach(draw);
}

function redrawResized() {
  for (const figure of document.querySelectorAll("figure.plot")) {
    if (Number(figure.dataset.width) !== figure.clientWidth) draw(figure);
  }
}

// --- sliders: their position is the decimal logarithm of the field's number

function place(slider) {
  const value = Number(document.getElementById(slider.dataset.for).value);
  if (value > 0) slider.value = Math.log10(value);
}

function slide(slider) {
  const field = document.getElementById(slider.dataset.for);
  const value = 10 ** Number(slider.value);
  field.value = field.name === "steps" ? Math.round(value) : Number(value.toPrecision(3));
}

function prepareSliders() {
  for (const slider of document.querySelectorAll("input[data-for]")) {
    const field = document.getElementById(slider.dataset.for);
    slider.hidden = false;
    place(slider);
    slider.addEventListener("input", () => slide(slider));
    field.addEventListener("input", () => place(slider));
  }
}

// --- the answer: said aloud, and the fields it found wrong

function announce() {
  const said = document.getElementById("said");
  const headline = document.getElementById("result");
  if (said && headline) said.textContent = headline.textContent;
}

function markProblems() {
  for (const problem of document.querySelectorAll("p.problem[id]")) {
    const field = document.getElementById(problem.id.replace("-problem", ""));
    if (!field) continue;
    if (problem.textContent) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

function prepareCopying(root) {
  if (!navigator.clipboard) return;
  for (const button of root.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.firstChild.textContent = "Copied";
    });
  }
}

document.addEventListener("DOMContentLoaded", () => {
  prepareSliders();
  prepareCopying(document);
  drawAll(document);
  new ResizeObserver(redrawResized).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));
});

document.addEventListener("htmx:afterSettle", (event) => {
  if (event.target.id !== "answer") return;
  prepareCopying(event.target);
  drawAll(event.target);
  announce();
  markProblems();
});
