// Reuse: achieved against achievable over time, what was lost and why, which paths were taken.

import { chartPanel } from "./charts.js";
import { byId, element, setShare, setText, syncChildren, table } from "./dom.js";
import { lastWords, ranked, shownFrom, shownPoints, state, total } from "./state.js";
import { count, duration, LOSSES, PATHS, percent, plain, UNAVOIDABLE } from "./words.js";

const STEPS = 60;

const SERIES = [
  { id: "achieved", title: "reused", isFilled: true, of: (cache) => cache.reused_tokens },
  { id: "expected", title: "a sound cache of this size would at least have", dash: "dot", of: (cache) => cache.expected_tokens },
  { id: "achievable", title: "endless memory would have", dash: "dash", of: (cache) => cache.achievable_tokens },
];

let chart = null;
let losses = null;
let paths = null;

export function showReuse(nowMs) {
  const points = shownPoints(nowMs);
  const hasExpected = points.some(({ context_cache }) => context_cache.expected_tokens !== undefined);
  if (!chart) {
    if (points.length === 0) return;
    chart = chartPanel({
      title: "Prompt tokens reused, and what could have been, per step",
      series: SERIES.filter(({ id }) => hasExpected || id !== "expected"),
      isStacked: false,
      format: count,
    });
    byId("reuse-chart").append(chart.node);
    losses = rankedPanel("losses", "Lost, by reason", "Reason", "Tokens");
    paths = rankedPanel("paths", "Reused from, by path", "Path", "Requests");
  }
  chart.draw(reuseData(points, nowMs));
  losses(ranked(points, (point) => point.context_cache.lost_tokens), lossWords, "Nothing was lost.");
  paths(ranked(points, (point) => point.context_cache.selections), (name) => [plain(name, PATHS), ""], "No request yet.");
}

const lossWords = (reason) => [plain(reason, LOSSES), UNAVOIDABLE.has(reason) ? "no cache could have kept it" : ""];

function reuseData(points, nowMs) {
  const from = shownFrom(nowMs);
  const width = Math.max(1, Math.ceil((nowMs - from) / 1000 / STEPS / state.intervalSeconds)) * state.intervalSeconds * 1000;
  const bins = new Map();
  for (let start = Math.floor((points[0]?.timestamp_unix_ms ?? nowMs) / width); start <= Math.floor(nowMs / width); start += 1) bins.set(start, { achieved: 0, expected: 0, achievable: 0 });
  for (const { timestamp_unix_ms, context_cache } of points) {
    const bin = bins.get(Math.floor(timestamp_unix_ms / width));
    if (bin) for (const { id, of } of SERIES) bin[id] += of(context_cache) ?? 0;
  }
  // A step that has only begun would look like a fall.
  if (bins.size > 1) bins.delete([...bins.keys()].at(-1));
  const sums = Object.fromEntries(SERIES.map(({ id, of }) => [id, total(points, ({ context_cache }) => of(context_cache))]));
  const share = percent(sums.achieved / sums.achievable);
  return {
    x: [...bins.keys()].map((start) => (start + 1) * width),
    values: Object.fromEntries(SERIES.map(({ id }) => [id, [...bins.values()].map((bin) => bin[id])])),
    now: sums,
    from,
    stepMs: width,
    to: nowMs,
    ticks: { tickformat: "~s" },
    headline: `${sums.achievable > 0 ? `${share} of the achievable` : "nothing was achievable"}, ${lastWords()}`,
    summary:
      `In the ${lastWords()}: ${SERIES.map(({ id, title }) => `${title} ${count(sums[id])}`).join(", ")} tokens. ` +
      `Each step is ${duration(width / 1000)}.`,
  };
}

/** A panel with a table whose rows are bars too; gives back what fills it. */
function rankedPanel(id, title, nameTitle, numberTitle) {
  const rows = table(title, [{ title: nameTitle }, { title: numberTitle, kind: "number" }, { title: "Share", kind: "number" }], "ranked");
  const nothing = element("p", { class: "muted" });
  byId(id).append(element("h3", {}, title), rows, nothing);
  return (entries, wordsOf, emptyText) => {
    const sum = entries.reduce((so, [, value]) => so + value, 0);
    rows.hidden = entries.length === 0;
    setText(nothing, entries.length === 0 ? emptyText : "");
    syncChildren(rows.tBodies[0], entries, ([name]) => name, buildRow, (row, [name, value]) => {
      const [words, note] = wordsOf(name);
      setText(row.querySelector(".name"), words);
      setText(row.querySelector("small"), note);
      row.dataset.quiet = String(note !== "");
      setText(row.cells[1], count(value));
      setText(row.cells[2], percent(value / sum));
      setShare(row.querySelector(".meter"), value / entries[0][1]);
    });
  };
}

function buildRow() {
  return element(
    "tr", {},
    element("th", { scope: "row" }, element("span", { class: "name" }), element("small", { class: "muted" }), element("span", { class: "meter", "aria-hidden": "true" })),
    element("td", { class: "number" }), element("td", { class: "number" }),
  );
}
