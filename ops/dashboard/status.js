// The status in words: what is right or wrong, for who has five seconds.

import { byId, setText } from "./dom.js";
import { shownPoints, state, total } from "./state.js";
import { clock, count, duration, percent, plural } from "./words.js";

const REUSE = {
  healthy: "reuse works",
  degraded: "less is reused than should be",
  collapsed: "reuse has collapsed",
  recovering: "reuse is coming back",
};

/** -> {tone: "good" | "notice" | "bad" | "off", headline, detail} */
export function statusInWords(known, nowMs) {
  if (known.isUp === false) return unreachable(known);
  const status = known.health?.status ?? known.insights?.status;
  if (!status) return { tone: "off", headline: "Asking the daemon …", detail: "" };
  const reasons = (known.health?.reasons ?? []).join("; ");
  if (status === "starting") return { tone: "notice", headline: "Starting", detail: sentence(reasons || "the model is being loaded") };
  if (status === "draining") return { tone: "notice", headline: "Shutting down", detail: sentence(reasons || "running requests are finished, new ones are turned away") };
  if (status === "unavailable") return { tone: "bad", headline: "Not serving", detail: sentence(reasons) };

  const reuse = known.insights?.reuse ?? known.health?.reuse ?? "healthy";
  const work = workInWords(known.cache);
  const detail = reuseInWords(known, nowMs);
  if (status === "ok" && (reuse === "healthy" || reuse === "recovering")) {
    const words = reuse === "healthy" && !hasReusable(known, nowMs) ? "nothing to reuse yet" : REUSE[reuse];
    return { tone: reuse === "healthy" ? "good" : "notice", headline: `Healthy: ${words}${work}`, detail };
  }
  const tone = reuse === "collapsed" || worstSeverity(known) === "critical" ? "bad" : "notice";
  const what = reuse === "healthy" ? worstTitle(known) ?? reasons : REUSE[reuse];
  return { tone, headline: `Degraded: ${what || "see below"}${work}`, detail: [sentence(reasons), detail].filter(Boolean).join(" ") };
}

function unreachable(known) {
  const since = known.lastAnswerMs ? `What is below is from ${clock(known.lastAnswerMs)}. ` : "";
  return { tone: "bad", headline: "The daemon does not answer", detail: `${since}The page asks again every few seconds and goes on by itself.` };
}

function workInWords(cache) {
  if (!cache) return "";
  const waiting = cache.requests_waiting ? `, ${count(cache.requests_waiting)} waiting` : "";
  return cache.requests_running || waiting ? `, ${plural(cache.requests_running, "request")} running${waiting}` : ", idle";
}

const achievable = (known, nowMs) => total(shownPoints(nowMs), (point) => point.context_cache.achievable_tokens);

const hasReusable = (known, nowMs) => known.points.length === 0 || achievable(known, nowMs) > 0;

function reuseInWords(known, nowMs) {
  const points = shownPoints(nowMs);
  if (points.length === 0) return "";
  const could = achievable(known, nowMs);
  const span = duration(known.spanSeconds);
  if (could === 0) return `In the last ${span} no prompt held anything that had been computed before.`;
  const did = total(points, (point) => point.context_cache.reused_tokens);
  return `In the last ${span}, ${percent(did / could)} of what could be reused was: ${count(did)} of ${count(could)} prompt tokens.`;
}

const SEVERITIES = ["critical", "warning", "notice", "info"];

const worst = (known) =>
  [...(known.insights?.insights ?? [])].sort((one, other) => SEVERITIES.indexOf(one.severity) - SEVERITIES.indexOf(other.severity))[0];

const worstSeverity = (known) => worst(known)?.severity;

function worstTitle(known) {
  const title = worst(known)?.title;
  return title ? title[0].toLowerCase() + title.slice(1) : null;
}

const sentence = (text) => (text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` : "");

const TITLE_MARKS = { good: "●", notice: "▲", bad: "✕", off: "○" };

export function showStatus(nowMs) {
  const { tone, headline, detail } = statusInWords(state, nowMs);
  byId("status").dataset.tone = tone;
  setText(byId("status-headline"), headline);
  setText(byId("status-detail"), detail);
  const title = `${TITLE_MARKS[tone]} ${headline.split(/[:,]/)[0]} · dalsegno`;
  if (document.title !== title) document.title = title;
}
