// The page: asks the daemon over and over, keeps what it answered, and shows it.

import { installActions, showActions } from "./actions.js";
import { getJson, key, Refused, Unreachable } from "./api.js";
import { byId, setText } from "./dom.js";
import { showFigures } from "./figures.js";
import { forgetInsights, showInsights } from "./insights.js";
import { installKeyForm, showKeyForm } from "./key.js";
import { showKept } from "./kept.js";
import { showPools } from "./pools.js";
import { repeat } from "./repeat.js";
import { showRequests } from "./requests.js";
import { showReuse } from "./reuse.js";
import { showServed } from "./served.js";
import { showSpeed } from "./speed.js";
import { addPoints, state } from "./state.js";
import { showStatus } from "./status.js";
import { follow } from "./stream.js";
import { clock } from "./words.js";
import { installWhy, refresh as refreshWhy } from "./why.js";

const LIVE_SECONDS = 2;
const HEALTH_SECONDS = 3;
const SERVED_SECONDS = 30;
const REQUESTS_ASKED = 50;
const TOGETHER_MS = 100;

/** How far the daemon's clock is before that of the browser: all times on the page are the daemon's. */
let clockAheadMs = 0;
/** What ends each of the loops that ask. */
let endings = [];
/** By path: what was refused, and is asked again with another key. */
const refusals = new Map();

const nowMs = () => Date.now() + clockAheadMs;

function show() {
  isToShow = false;
  const now = nowMs();
  document.body.dataset.stale = String(state.isUp === false);
  showStatus(now);
  showServed(state.served, now);
  showActions(state);
  showInsights(state.insights, now);
  showFigures(now);
  showCharts(now);
  showRequests();
  showKept(state.cache);
  showKeyForm(state.refusal);
  setText(byId("freshness"), state.lastAnswerMs ? `as of ${clock(state.lastAnswerMs)}` : "");
}

/** Charts cost most; they are drawn no more often than there is something new in them. */
let chartsDrawnMs = 0;
function showCharts(now) {
  if (Math.abs(now - chartsDrawnMs) < LIVE_SECONDS * 900) return;
  chartsDrawnMs = now;
  showPools(now);
  showReuse(now);
  showSpeed(now);
}

/** What comes within a moment is shown at once. */
let isToShow = false;
function showSoon() {
  if (isToShow) return;
  isToShow = true;
  setTimeout(show, TOGETHER_MS);
}

function answered() {
  const wasDown = state.isUp === false;
  state.isUp = true;
  state.lastAnswerMs = nowMs();
  if (wasDown) startAgain();
  showSoon();
}

/** Maybe it is another daemon than before: nothing of the old one is taken over. */
function startAgain() {
  state.points = [];
  state.requests = [];
  state.insights = null;
  state.served = null;
  forgetInsights();
  start();
}

/** Ask for `path`; a refusal ends the loop that asks, until there is another key. */
async function ask(path, take, options) {
  try {
    const body = await getJson(path, options);
    take(body);
    answered();
    return true;
  } catch (error) {
    if (noteFailure(error, path)) return false;
    throw error;
  }
}

/** Whether asking again is of no use. */
function noteFailure(error, path) {
  if (error instanceof Unreachable) state.isUp = false;
  if (error instanceof Refused) refusals.set(path.replace(/\?.*/, ""), error);
  state.refusal = chiefRefusal();
  showSoon();
  return error instanceof Refused;
}

/** That of the figures for operators before that of the insights: the operator's key opens both. */
function chiefRefusal() {
  const [path, error] = [...refusals].sort(([one], [other]) => one.localeCompare(other))[0] ?? [];
  return error ? { isForOperators: path.startsWith("/admin/"), status: error.status, message: error.message, hadKey: Boolean(key.get()) } : null;
}

/** A drained daemon takes no requests, but its figures are there. */
const hasFigures = () => ["ok", "degraded", "draining"].includes(state.health?.status);

function takeHealth(body) {
  const wasWaitedFor = state.health !== null && !hasFigures();
  state.health = body;
  if (wasWaitedFor && hasFigures()) start();
}

const askHealth = () => ask("/health", takeHealth, { expected: [503] });

/** It does not change while the daemon lives, but for its age, which the page counts on. */
const askServed = () => ask("/admin/server", (body) => (state.served = { ...body, startedMs: nowMs() - body.uptime_seconds * 1000 }), { expected: [503] });

const askCache = () => ask("/admin/cache", (body) => (state.cache = body));

const askRequests = () => ask(`/admin/requests?limit=${REQUESTS_ASKED}`, (body) => (state.requests = body.requests));

const askHistory = () =>
  ask(`/admin/history?since=${state.points.at(-1)?.timestamp_unix_ms ?? 0}`, (body) => {
    clockAheadMs = body.generated_unix_ms - Date.now();
    state.intervalSeconds = body.interval_seconds;
    if (state.points.length === 0) chartsDrawnMs = 0;
    addPoints(body.points);
  });

function takeInsights({ name, data }) {
  if (name !== "insights") return;
  state.insights = JSON.parse(data);
  answered();
}

function start() {
  endings.forEach((end) => end());
  refusals.clear();
  state.refusal = null;
  endings = [
    repeat(askHealth, () => HEALTH_SECONDS),
    repeat(askServed, () => SERVED_SECONDS),
    repeat(askCache, () => LIVE_SECONDS),
    repeat(askRequests, () => LIVE_SECONDS),
    repeat(askHistory, () => Math.min(Math.max(state.intervalSeconds, 1), 5)),
    follow("/insights/stream", takeInsights, (error) => !noteFailure(error, "/insights/stream")),
  ];
}

function chooseSpan() {
  state.spanSeconds = Number(document.querySelector("#span input:checked").value);
  chartsDrawnMs = 0;
  showSoon();
}

setText(byId("host"), location.host);
byId("span").addEventListener("change", chooseSpan);
chooseSpan();
installKeyForm(() => {
  start();
  refreshWhy();
});
installWhy();
installActions(showSoon);
start();
