// Beyond HTML: plots of the tables beside them, sliders, copying.
"use strict";

const DIGITS = 6; // as in the table: no bound is rounded twice
const HEIGHT = 280;
const TICK_WIDTH = 64; // pixels of a tick
const TIME_WIDTH = 80;
const TICK_HEIGHT = 36;
const MINUTE = 60;
const AXIS_FONT = "13px system-ui, sans-serif";

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// --- plots

function numberOf(cell) {
  const value = Number(cell.dataset.value ?? cell.textContent);
  return Number.isFinite(value) ? value : null;
}

// A table's columns as numbers; a logarithmic axis has no 0.
function columnsOf(table, positiveOnly, positiveValues) {
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map(numberOf));
  const kept = rows.filter((row) => !positiveOnly || row[0] > 0);
  const shown = (value, at) => (at && positiveValues && value <= 0 ? null : value);
  return [...table.tHead.rows[0].cells].map((_, at) => kept.map((row) => shown(row[at], at)));
}

function axis(more) {
  const grid = { stroke: colour("line"), width: 1 };
  return { stroke: colour("muted"), grid, ticks: grid, ...more };
}

function lineOf(label, at, { steps, smooth }) {
  const stroke = colour(["accent", "second", "third"][at % 3]);
  const paths = steps ? uPlot.paths.stepped({ align: 1 }) : smooth ? uPlot.paths.spline() : undefined;
  return { label, stroke, width: 2, paths, spanGaps: true, points: { show: false }, dash: at === 2 ? [4, 4] : [] };
}

// Single points, such as the recommended run: a marker, no line.
function marksOf(label, at) {
  const stroke = colour(["accent", "second", "third", "bad"][at % 4]);
  return { label, stroke, paths: () => null, points: { show: true, size: 13, width: 2.5, fill: colour("paper") } };
}

function limitLine(limit, label) {
  const stroke = colour("bad");
  return { label, stroke, width: 1.5, dash: [6, 4], points: { show: false }, value: () => short(Number(limit)) };
}

const AXES = {
  plain: { values: (_, ticks) => ticks.map(grouped) },
  log: {
    splits: (plot, at, low, high) => powersBetween(low, high, at ? plot.height / TICK_HEIGHT : plot.width / TICK_WIDTH),
    filter: (_, ticks) => ticks, // uPlot leaves out some
    values: (_, ticks) => ticks.map(short),
  },
  // steps at most double, four fit: so two ticks or more
  time: {
    incrs: [...[1, 60].flatMap((unit) => [1, 2, 3, 5, 10, 20, 30].map((step) => unit * step)),
      3600, 7200, 14400, 28800, 43200, ...Array.from({ length: 11 }, (_, n) => 86400 << n)],
    space: (...given) => Math.min(TIME_WIDTH, given.at(-1) / 4),
    values: (_, ticks, __, ___, seconds) => ticks.map((tick) => clock(tick, seconds)),
  },
};

// Times within a minute are on an axis of a minute.
function timeRange(_, low, high) {
  return [low, Math.max(high, low + MINUTE)];
}

function decades(_, low, high) {
  return [low, high].map((end, at) => 10 ** (at ? Math.ceil : Math.floor)(Math.log10(end)));
}

// The legend has the last values before a pointer is there.
function legendOf(columns, isLogarithmic) {
  const known = columns.map((column) => column.filter((value) => value != null));
  const rest = known.map((column) => (isLogarithmic && column.length > 1 ? null : column.at(-1)));
  return (at, found, format) => (found ?? rest[at]) == null ? "" : format(found ?? rest[at]);
}

function optionsOf(figure, labels, columns, width) {
  const { x = "plain", y = "plain", diagonal, limit, limitTitle = "budget", yTitle } = figure.dataset;
  const marked = Number(figure.dataset.marks ?? labels.length);
  const legend = legendOf(columns, x === "log");
  const value = (_, found, at) => legend(at, found, short);
  const moment = (_, found, at) => legend(at, found, (seconds) => clock(seconds, 0));
  const series = (label, at) => (at + 1 < marked ? lineOf(label, at, figure.dataset) : marksOf(label, at));
  const lines = labels.slice(1).map((label, at) => ({ ...series(label, at), value }));
  const titled = (label) => (label ? { label, labelSize: 22, labelFont: AXIS_FONT } : {});
  return {
    width,
    height: HEIGHT,
    tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "Etc/UTC"),
    scales: {
      x: { time: x === "time", distr: x === "log" ? 3 : 1, ...(x === "time" ? { range: timeRange } : {}) },
      y: y === "log" ? { distr: 3, range: decades } : { range: (_, __, top) => [0, (top || 1) * 1.05] },
    },
    axes: [axis({ space: TIME_WIDTH, ...titled(labels[0]), ...AXES[x] }), axis({ size: 52, ...titled(yTitle), ...AXES[y] })],
    bands: diagonal ? [{ series: [1, labels.length - 1], fill: colour("band") }] : [],
    series: [
      { label: labels[0], value: x === "time" ? moment : value },
      ...lines,
      ...(limit ? [limitLine(limit, limitTitle)] : []),
    ],
    cursor: { drag: { x: false, y: false } },
  };
}

// A moment in UTC, as exactly as the ticks' distance asks for.
function clock(tick, seconds) {
  const text = new Date(1000 * tick).toISOString();
  if (seconds >= 86400) return text.slice(0, 10);
  return seconds === 0 ? text.slice(0, 19).replace("T", " ") : text.slice(11, seconds >= 60 ? 16 : 19);
}

function short(value) {
  const rounded = Number(value.toPrecision(DIGITS));
  return rounded && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : grouped(rounded);
}

// Groups of three digits, as the server makes them.
function grouped(value) {
  const [whole, rest] = String(value).split(".");
  const digits = whole.replace(/\B(?=(\d{3})+$)/g, "\u202f");
  return rest ? `${digits}.${rest}` : digits;
}

function powersBetween(low, high, most) {
  const [first, last] = [low, high].map((end) => Math.round(Math.log10(end)));
  const stride = Math.max(1, Math.ceil((last - first + 1) / Math.max(most, 2)));
  const count = Math.floor((last - first) / stride) + 1;
  return Array.from({ length: count }, (_, at) => Number(`1e${last - stride * at}`)).reverse();
}

function draw(figure) {
  const holder = figure.querySelector(".canvas");
  const table = document.getElementById(figure.dataset.from);
  const width = holder.parentElement.clientWidth;
  if (!table || !width) return;
  const labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const columns = columnsOf(table, figure.dataset.x === "log", figure.dataset.y === "log");
  figure.classList.toggle("bare", columns[0].length < 2);
  if (columns[0].length < 2) return; // one point makes no line
  const { x, limit, diagonal } = figure.dataset;
  // what changed last holds until now
  if (x === "time") columns.forEach((each, at) => each.push(at ? each.at(-1) : Date.now() / 1000));
  if (diagonal) { columns.push(columns[0]); labels.push(diagonal); }
  if (limit) columns.push(columns[0].map(() => Number(limit)));
  holder.replaceChildren();
  new uPlot(optionsOf(figure, labels, columns, width), columns, holder);
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
  field.value = slider.dataset.whole ? Math.round(value) : Number(value.toPrecision(3));
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

// --- the answer, said aloud, and wrong fields

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

// --- waiting: seconds, pressed buttons

function countSeconds() {
  const begun = Date.now();
  const places = [...document.querySelectorAll(".working .seconds")];
  places.forEach((place) => { place.textContent = ""; });
  return setInterval(() => {
    places.forEach((place) => { place.textContent = `${Math.round((Date.now() - begun) / 1000)} s`; });
  }, 1000);
}

let counting = 0;
document.addEventListener("htmx:beforeRequest", (event) => {
  if (event.target.id !== "progress") { clearInterval(counting); counting = countSeconds(); }
});
document.addEventListener("htmx:afterRequest", () => clearInterval(counting));

// Fields that are not shown are no part of the address.
document.addEventListener("htmx:configRequest", ({ detail }) => {
  for (const field of detail.elt.querySelectorAll(".run [name]")) {
    const shown = field.type === "hidden" ? field.parentElement : field;
    if (!shown.offsetParent) detail.parameters.delete(field.name);
  }
});

// A form that writes is sent once, and says so.
document.addEventListener("submit", (event) => {
  const { busy } = event.target.dataset;
  const button = event.submitter;
  if (!busy || !button) return;
  if (button.getAttribute("aria-busy") === "true") return event.preventDefault();
  button.setAttribute("aria-busy", "true");
  button.textContent = busy;
});

// Buttons that change the form load the whole page anew.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-reload]");
  if (!button) return;
  event.preventDefault();
  const query = new URLSearchParams(new FormData(button.form, button));
  location.assign(`${button.form.getAttribute("action")}?${query}`);
});

document.addEventListener("DOMContentLoaded", () => {
  prepareSliders();
  prepareCopying(document);
  drawAll(document);
  new ResizeObserver(redrawResized).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));
});

document.addEventListener("htmx:afterSettle", (event) => {
  if (event.target.id === "meaning") markProblems();
  if (event.target.id !== "answer") return;
  prepareCopying(event.target);
  drawAll(event.target);
  announce();
  markProblems();
});
