// What the page knows of the daemon; the one mutable record, written by main.js only.

import { clock, duration } from "./words.js";

export const state = {
  /** Whether the daemon answers at all; null before the first answer or failure. */
  isUp: null,
  lastAnswerMs: null,
  /** The refusal that hinders some of the page: {status, message}, or null. */
  refusal: null,
  health: null,
  /** The body of /insights, or null. */
  insights: null,
  cache: null,
  /** The body of /admin/server, or null. */
  served: null,
  /** Of /admin/history, oldest first. */
  points: [],
  intervalSeconds: 5,
  requests: [],
  spanSeconds: 900,
};

const KEPT_MS = 3_600_000;

/** Add what is new, forget what is older than an hour. */
export function addPoints(points) {
  const last = state.points.at(-1)?.timestamp_unix_ms ?? 0;
  const all = [...state.points, ...points.filter((point) => point.timestamp_unix_ms > last)];
  const end = all.at(-1)?.timestamp_unix_ms ?? 0;
  state.points = all.filter((point) => point.timestamp_unix_ms >= end - KEPT_MS);
}

/** The points of the time that is shown. */
export function shownPoints(nowMs) {
  const from = nowMs - state.spanSeconds * 1000;
  return state.points.filter((point) => point.timestamp_unix_ms >= from);
}

/** The insight that says that reuse is not as it should be, or null. */
const reuseTrouble = () => state.insights?.insights.find(({ id }) => id.startsWith("prefix.reuse_")) ?? null;

/**
 * The one window over which shares and sums are told, and its name: the time that is shown, or, while reuse is in
 * trouble, the time since that began, which a longer one would hide.
 */
export function reuseWindow(nowMs) {
  const points = shownPoints(nowMs);
  const trouble = reuseTrouble();
  if (trouble === null || trouble.since_unix_ms <= nowMs - state.spanSeconds * 1000) return { points, words: lastWords() };
  return { points: points.filter((point) => point.timestamp_unix_ms > trouble.since_unix_ms), words: `since ${clock(trouble.since_unix_ms)}` };
}

/** "last 15 min": the time that is shown. */
export const lastWords = () => `last ${state.spanSeconds === 3600 ? "hour" : duration(state.spanSeconds)}`;

/** Where the time that is shown begins: with the daemon, when that is younger, but never less than a minute ago. */
export function shownFrom(nowMs) {
  const first = Math.min(state.points[0]?.timestamp_unix_ms ?? nowMs, nowMs - 60_000);
  return Math.max(first, nowMs - state.spanSeconds * 1000);
}

/** Sum of one number of each point. */
export const total = (points, numberOf) => points.reduce((sum, point) => sum + (numberOf(point) ?? 0), 0);

/** Sums of a mapping of each point, largest first, without those that are 0. */
export function ranked(points, mappingOf) {
  const sums = new Map();
  for (const point of points) {
    for (const [name, value] of Object.entries(mappingOf(point) ?? {})) sums.set(name, (sums.get(name) ?? 0) + value);
  }
  return [...sums].filter(([, value]) => value > 0).sort((one, other) => other[1] - one[1]);
}
