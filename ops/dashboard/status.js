// The status in words: what is right or wrong, for who has five seconds.

import { byId, setText } from "./dom.js";
import { shownPoints, state, total } from "./state.js";
import { clock, count, duration, percent, plural } from "./words.js";

const LATELY_SECONDS = 60;

const REUSE = {
  healthy: "reuse works",
  degraded: "less is reused than should be",
  collapsed: "reuse has collapsed",
  recovering: "reuse is coming back",
};

/** -> {tone: "good" | "notice" | "bad" | "off", headline, work, detail}; the work under way changes all the time. */
export function statusInWords(known, nowMs) {
  if (known.isUp === false) return unreachable(known);
  const status = known.health?.status ?? known.insights?.status;
  if (!status) return { tone: "off", headline: "Asking the daemon …", detail: "" };
  const reasons = (known.health?.reasons ?? []).map((reason) => reason.replace(/^[a-z]+\.[a-z_]+: /, "")).join("; ");
  if (status === "starting") return { tone: "notice", headline: "Starting", detail: sentence(reasons || "the model is being loaded") };
  if (status === "draining") return { tone: "notice", headline: "Shutting down", detail: sentence(reasons || "running requests are finished, new ones are turned away") };
  if (status === "unavailable") return { tone: "bad", headline: "Not serving", detail: sentence(reasons) };

  const reuse = known.insights?.reuse ?? known.health?.reuse ?? "healthy";
  const work = workInWords(known.cache);
  const detail = [reuseInWords(known, nowMs), othersInWords(known)].filter(Boolean).join(" ");
  if (status === "ok" && (reuse === "healthy" || reuse === "recovering")) {
    const words = reuse === "healthy" && !hasReusable(known, nowMs) ? "nothing to reuse yet" : REUSE[reuse];
    return { tone: reuse === "healthy" ? "good" : "notice", headline: `Healthy: ${words}`, work, detail };
  }
  const isBad = reuse === "collapsed" || (reuse === "healthy" && worst(known)?.severity === "critical");
  const tone = isBad ? "bad" : "notice";
  const what = reuse === "healthy" ? worstTitle(known) ?? reasons : REUSE[reuse];
  const saysMore = reasons.toLowerCase() !== what?.toLowerCase() && known.insights?.insights.length !== 1;
  return { tone, headline: `Degraded: ${what || "see below"}`, work, detail: [saysMore ? sentence(reasons) : "", detail].filter(Boolean).join(" ") };
}

function unreachable(known) {
  const since = known.lastAnswerMs ? `What is below is from ${clock(known.lastAnswerMs)}. ` : "";
  return { tone: "bad", headline: "The daemon does not answer", detail: `${since}The page asks again every few seconds and goes on by itself.` };
}

function workInWords(cache) {
  if (!cache) return "";
  const { requests_running: running, requests_waiting: waiting } = cache;
  if (running === 0 && waiting === 0) return ", idle";
  return `, ${plural(running, "request")} running${waiting ? `, ${count(waiting)} waiting` : ""}`;
}

const achievable = (known, nowMs) => total(shownPoints(nowMs), (point) => point.context_cache.achievable_tokens);

const hasReusable = (known, nowMs) => known.points.length === 0 || achievable(known, nowMs) > 0;

function reuseInWords(known, nowMs) {
  const points = shownPoints(nowMs);
  if (points.length === 0) return "";
  const lately = points.filter((point) => point.timestamp_unix_ms >= nowMs - LATELY_SECONDS * 1000);
  for (const [shown, seconds] of [[lately, LATELY_SECONDS], [points, known.spanSeconds]]) {
    const could = total(shown, (point) => point.context_cache.achievable_tokens);
    if (could > 0) return shareInWords(total(shown, (point) => point.context_cache.reused_tokens), could, spanInWords(seconds));
  }
  return `In the last ${spanInWords(known.spanSeconds)} no prompt held anything that had been computed before.`;
}

const spanInWords = (seconds) => (seconds === 60 ? "minute" : seconds === 3600 ? "hour" : duration(seconds));

function shareInWords(did, could, span) {
  return `In the last ${span}, ${percent(did / could)} of what could be reused was: ${count(did)} of ${count(could)} prompt tokens.`;
}

/** What is worth a look although all is well in the whole. */
function othersInWords({ insights }) {
  const urgent = (insights?.insights ?? []).filter(({ severity }) => severity === "critical" || severity === "warning");
  return urgent.length ? `${plural(urgent.length, "insight")} below ${urgent.length === 1 ? "is" : "are"} worth a look.` : "";
}

const SEVERITIES = ["critical", "warning", "notice", "info"];

const worst = (known) =>
  [...(known.insights?.insights ?? [])].sort((one, other) => SEVERITIES.indexOf(one.severity) - SEVERITIES.indexOf(other.severity))[0];

function worstTitle(known) {
  const title = worst(known)?.title;
  return title ? title[0].toLowerCase() + title.slice(1) : null;
}

const sentence = (text) => (text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` : "");

const TITLE_MARKS = { good: "●", notice: "▲", bad: "✕", off: "○" };

export function showStatus(nowMs) {
  const { tone, headline, work = "", detail } = statusInWords(state, nowMs);
  byId("status").dataset.tone = tone;
  setText(byId("status-headline"), headline + work);
  setText(byId("status-spoken"), headline);
  setText(byId("status-detail"), detail);
  const title = `${TITLE_MARKS[tone]} ${headline.split(":")[0]} · dalsegno`;
  if (document.title !== title) document.title = title;
}
