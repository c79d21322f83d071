// The four pools as stacked areas that breathe: pinned, in flight, cached, free.

import { chartPanel } from "./charts.js";
import { byId } from "./dom.js";
import { shownFrom, shownPoints, state } from "./state.js";
import { age, bytes, count, percent, POOLS } from "./words.js";

const SERIES = [
  { id: "pinned", title: "pinned", pattern: "/" },
  { id: "in_flight", title: "in flight", pattern: "x" },
  { id: "cached", title: "cached" },
  { id: "free", title: "free" },
];

/** By the names of /admin/cache; what the history calls the same. Host memory is shown in bytes. */
const HISTORY_NAMES = {
  device_state_slots: "device_state_slots",
  device_kv_pages: "kv_pages",
  host_state_slots: "host_state_slots",
  host_units: "host_bytes",
};

const MOST_POINTS = 180;

const panels = new Map();

export function showPools(nowMs) {
  const points = thinned(shownPoints(nowMs));
  for (const [pool, { title, unit }] of Object.entries(POOLS)) {
    const format = pool === "host_units" ? bytes : count;
    if (!panels.has(pool)) {
      const panel = chartPanel({ title, series: SERIES, isStacked: true, format });
      panels.set(pool, panel);
      byId("pools").append(panel.node);
    }
    panels.get(pool).draw(dataOf(pool, unit, format, points, nowMs));
  }
}

/** The last point of each of so many parts of the time shown; the parts stay where they are as time goes on. */
function thinned(points) {
  const width = (state.spanSeconds * 1000) / MOST_POINTS;
  const partOf = (point) => Math.floor(point.timestamp_unix_ms / width);
  return points.filter((point, place) => place + 1 === points.length || partOf(point) !== partOf(points[place + 1]));
}

function dataOf(pool, unit, format, points, nowMs) {
  const name = HISTORY_NAMES[pool];
  const moments = points.map(({ timestamp_unix_ms, context_cache }) => ({ at: timestamp_unix_ms, ...statesOf(context_cache, name) }));
  const live = liveStates(pool, points.at(-1));
  if (live) moments.push({ at: Math.max(nowMs, moments.at(-1)?.at ?? 0), ...live });
  const now = moments.at(-1);
  if (!now) return { absent: "No figures yet." };
  if (now.capacity === 0) return { absent: "There is none: it is switched off, or this model needs none." };
  const used = now.capacity - now.free;
  const oldest = state.cache?.oldest_entry_seconds?.[pool];
  return {
    x: moments.map(({ at }) => at),
    values: Object.fromEntries(SERIES.map(({ id }) => [id, moments.map((each) => each[id])])),
    now,
    from: shownFrom(nowMs),
    to: nowMs,
    capacity: now.capacity,
    ticks: ticks(now.capacity, format),
    headline: `${percent(used / now.capacity)} of ${format(now.capacity)}${pool === "host_units" ? "" : ` ${unit}`}`,
    summary:
      `${SERIES.map(({ id, title }) => `${title} ${format(now[id])}`).join(", ")}, of ${format(now.capacity)}.` +
      (oldest ? ` The oldest entry has been there for ${age(oldest)}.` : ""),
  };
}

function statesOf({ occupancy, capacity, pinned, in_flight }, name) {
  const busy = pinned[name] + (in_flight?.[name] ?? 0);
  return {
    capacity: capacity[name],
    pinned: pinned[name],
    in_flight: in_flight?.[name] ?? 0,
    cached: Math.max(0, occupancy[name] - busy),
    free: capacity[name] - occupancy[name],
  };
}

/** As it is now, between two points of the history. */
function liveStates(pool, lastPoint) {
  const units = state.cache?.pools?.[pool];
  if (!units) return null;
  if (pool !== "host_units") return units;
  const capacity = lastPoint?.context_cache.capacity.host_bytes;
  if (!capacity || !units.capacity) return capacity === undefined ? null : { ...units, capacity: 0 };
  const unitBytes = capacity / units.capacity;
  return Object.fromEntries(Object.entries(units).map(([name, value]) => [name, value * unitBytes]));
}

function ticks(capacity, format) {
  const places = [0, capacity > 1 ? Math.round(capacity / 2) : null, capacity].filter((place) => place !== null);
  return { tickmode: "array", tickvals: places, ticktext: places.map(format) };
}
