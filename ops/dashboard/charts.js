// Charts over time, drawn by Plotly; each with a sentence and a table that say the same without it.

import { element, setText, syncChildren, table } from "./dom.js";
import { clock } from "./words.js";

const TABLE_ROWS = 12;
const SHORT_MS = 480_000;

/** Plotly, when it has come. Rejects where it never will. */
const library = new Promise((resolve, reject) => {
  if (window.Plotly) return resolve(window.Plotly);
  const script = document.getElementById("chart-library");
  script.addEventListener("load", () => resolve(window.Plotly));
  script.addEventListener("error", () => reject(new Error("the chart library did not load")));
});
library.catch(() => {});

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };

/**
 * A panel with a chart. `series`: [{id, title}] from the bottom up; their colours are the style sheet's `--ID`.
 * Gives back the node, and `draw({x, values, ...})`; a value that is null is passed over.
 */
export function chartPanel({ title, series, isStacked, isLow = isStacked, format }) {
  const plot = element("div", { class: "plot", role: "img" });
  const legend = element("ul", { class: "legend" });
  const numbers = table(`${title}, over time`, [{ title: "Time" }, ...series.map((each) => ({ title: each.title, kind: "number" }))]);
  const details = element("details", {}, element("summary", {}, "As a table"), element("div", { class: "scroll" }, numbers));
  const headline = element("span", { class: "headline" });
  const absent = element("p", { class: "muted" });
  const node = element(
    "figure", { class: "panel chart" },
    element("figcaption", {}, element("h3", {}, title), headline), absent, plot, legend, details,
  );
  let last = null;

  function draw(data) {
    last = data;
    setText(headline, data.headline ?? "");
    setText(absent, data.absent ?? "");
    absent.hidden = !data.absent;
    for (const part of [plot, legend, details]) part.hidden = Boolean(data.absent);
    if (data.absent) return;
    plot.setAttribute("aria-label", `${title}. ${data.summary}`);
    showLegend(legend, isStacked ? [...series].reverse() : series, data, format);
    if (details.open) showTable(numbers, series, data, format);
    library.then(
      (plotly) => plotly.react(plot, traces(series, data, isStacked, format), layout(data, isLow), CONFIG),
      () => setText(plot, "The charts could not be loaded; the tables hold the same numbers."),
    );
  }

  details.addEventListener("toggle", () => last && details.open && showTable(numbers, series, last, format));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && draw(last));
  return { node, draw };
}

function showLegend(legend, series, { now }, format) {
  syncChildren(legend, series, (each) => each.id, buildEntry, (node, each) => {
    setText(node.lastElementChild, now?.[each.id] === undefined ? "" : format(now[each.id]));
  });
}

const buildEntry = (each) =>
  element("li", {}, element("i", { class: "swatch", "data-series": each.id, "aria-hidden": "true" }), `${each.title} `, element("b"));

function showTable(numbers, series, { x, values }, format) {
  const step = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
  const rows = x.map((_, place) => place).filter((place) => (x.length - 1 - place) % step === 0).reverse();
  syncChildren(
    numbers.tBodies[0], rows, (place) => x[place],
    () => element("tr", {}, element("th", { scope: "row" }), ...series.map(() => element("td", { class: "number" }))),
    (row, place) => {
      setText(row.cells[0], clock(x[place]));
      series.forEach((each, index) => setText(row.cells[index + 1], format(values[each.id][place])));
    },
  );
}

/** Plotly shows times as if they were in Greenwich; this moves them to where the operator is. */
const localTimes = (x) => x.map((unixMs) => unixMs - new Date(unixMs).getTimezoneOffset() * 60_000);

/** `stepMs`: each value is that of the time before its moment; without it, that of the moment. */
function traces(series, { x, values, stepMs }, isStacked, format) {
  const colours = getComputedStyle(document.documentElement);
  const colour = (name) => colours.getPropertyValue(`--${name}`).trim();
  const times = localTimes(stepMs && x.length ? [x[0] - stepMs, ...x] : x);
  const whole = (numbers) => (stepMs ? [...numbers.slice(0, 1), ...numbers] : numbers);
  return series.map((each) => ({
    type: "scatter",
    mode: "lines",
    connectgaps: true,
    name: each.title,
    x: times,
    y: whole(values[each.id]),
    text: whole(values[each.id]).map(format),
    hovertemplate: "%{text}",
    stackgroup: isStacked ? "all" : undefined,
    fill: isStacked ? undefined : each.isFilled ? "tozeroy" : "none",
    fillcolor: colour(`${each.id}-fill`) || colour(each.id),
    fillpattern: each.pattern
      ? { shape: each.pattern, size: 5, solidity: 0.35, fgcolor: colour("surface"), bgcolor: colour(each.id) }
      : undefined,
    line: { color: colour(each.id), width: isStacked ? 0.75 : 1.75, dash: each.dash ?? "solid", shape: isStacked ? "linear" : "vh" },
  }));
}

function layout({ from, to, capacity, ticks }, isLow) {
  const colours = getComputedStyle(document.documentElement);
  const colour = (name) => colours.getPropertyValue(`--${name}`).trim();
  const [first, last] = localTimes([from, to]);
  const quiet = { fixedrange: true, color: colour("muted"), zeroline: false, gridcolor: colour("line"), ticks: "", automargin: false };
  return {
    autosize: true,
    height: isLow ? 132 : 210,
    margin: { l: 48, r: 10, t: 8, b: 22 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colour("muted") },
    showlegend: false,
    dragmode: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line"), font: { color: colour("text"), size: 12 } },
    xaxis: { ...quiet, type: "date", range: [first, last], nticks: 4, tickformat: to - from < SHORT_MS ? "%H:%M:%S" : "%H:%M", hoverformat: "%H:%M:%S", showgrid: false },
    yaxis: { ...quiet, range: capacity ? [0, capacity] : undefined, rangemode: "tozero", nticks: 4, ...ticks },
  };
}
