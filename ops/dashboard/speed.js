// Speed over time: the queue, the time to the first token, tokens per second.

import { chartPanel } from "./charts.js";
import { byId } from "./dom.js";
import { lastWords, shownFrom, shownPoints } from "./state.js";
import { count, duration, number } from "./words.js";

const MOST_STEPS = 90;

const CHARTS = [
  {
    title: "Requests",
    format: number,
    series: [
      { id: "running", title: "running", of: ({ scheduler }) => scheduler.running },
      { id: "waiting", title: "waiting", dash: "dash", of: ({ scheduler }) => scheduler.waiting },
    ],
    join: Math.max,
  },
  {
    title: "Time to the first token, median",
    format: duration,
    series: [
      { id: "ttft_hit", title: "hit", of: ({ median_seconds }) => median_seconds?.ttft_hit },
      { id: "ttft_root", title: "root", dash: "dash", of: ({ median_seconds }) => median_seconds?.ttft_root },
    ],
    join: Math.max,
    unit: "s",
  },
  {
    title: "Tokens per second",
    format: (value) => count(value),
    series: [
      { id: "prefill", title: "prefill", dash: "dash", of: ({ tokens, interval_seconds }) => tokens.prefill / interval_seconds },
      { id: "decode", title: "decode", of: ({ tokens, interval_seconds }) => tokens.decode / interval_seconds },
    ],
    join: (...values) => values.reduce((sum, value) => sum + value, 0) / values.length,
  },
];

const panels = [];

export function showSpeed(nowMs) {
  const points = shownPoints(nowMs);
  if (panels.length === 0) {
    if (points.length === 0) return;
    for (const { title, series, format } of CHARTS) panels.push(chartPanel({ title, series, isStacked: false, isLow: true, format }));
    byId("speed").append(...panels.map(({ node }) => node));
  }
  const steps = inSteps(points, nowMs);
  CHARTS.forEach((chart, place) => panels[place].draw(dataOf(chart, steps, nowMs)));
}

/** Points together, as many steps as a chart has room for. */
function inSteps(points, nowMs) {
  const width = Math.max(1, (nowMs - shownFrom(nowMs)) / MOST_STEPS);
  const steps = new Map();
  for (const point of points) {
    const step = Math.floor(point.timestamp_unix_ms / width);
    steps.set(step, [...(steps.get(step) ?? []), point]);
  }
  return [...steps.values()];
}

function dataOf({ series, join, format, unit }, steps, nowMs) {
  if (steps.length === 0) return { absent: "No figures yet." };
  const valueOf = (step, of) => {
    const known = step.map(of).filter((value) => value !== undefined && value !== null);
    return known.length ? join(...known) : null;
  };
  const values = Object.fromEntries(series.map(({ id, of }) => [id, steps.map((step) => valueOf(step, of))]));
  const now = Object.fromEntries(series.map(({ id }) => [id, values[id].findLast((value) => value !== null) ?? null]));
  return {
    x: steps.map((step) => step.at(-1).timestamp_unix_ms),
    values,
    now,
    from: shownFrom(nowMs),
    to: nowMs,
    ticks: unit ? { ticksuffix: ` ${unit}` } : { tickformat: "~s" },
    headline: lastWords(),
    summary: `${series.map(({ id, title }) => `${title} ${format(now[id])}`).join(", ")} at last.`,
  };
}
