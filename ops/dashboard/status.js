// The status in words: what is right or wrong, for who has five seconds.

import { byId, setText } from "./dom.js";
import { reuseWindow, state, total } from "./state.js";
import { clock, count, percent, plural } from "./words.js";

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
  if (status === "draining") return draining(known, reasons);
  if (status === "unavailable") return { tone: "bad", headline: "Not serving", detail: sentence(reasons) };

  const reuse = known.insights?.reuse ?? known.health?.reuse ?? "healthy";
  const work = workInWords(known.cache);
  const detail = [reuseInWords(known, nowMs), othersInWords(known)].filter(Boolean).join(" ");
  if (status === "ok" && (reuse === "healthy" || reuse === "recovering")) {
    const words = reuse === "healthy" ? healthyInWords(known, nowMs) : REUSE[reuse];
    return { tone: reuse === "healthy" ? "good" : "notice", headline: `Healthy: ${words}`, work, detail };
  }
  const isBad = reuse === "collapsed" || (reuse === "healthy" && worst(known)?.severity === "critical");
  const tone = isBad ? "bad" : "notice";
  const what = reuse === "healthy" ? worstTitle(known) ?? reasons : REUSE[reuse];
  const saysMore = reasons.toLowerCase() !== what?.toLowerCase() && known.insights?.insights.length !== 1;
  return { tone, headline: `Degraded: ${what || "see below"}`, work, detail: [saysMore ? sentence(reasons) : "", detail].filter(Boolean).join(" ") };
}

/** A drain can be undone, the end of the process cannot. */
function draining(known, reasons) {
  if (!known.health.drained) return { tone: "notice", headline: "Shutting down", detail: sentence(reasons) };
  const left = (known.cache?.requests_running ?? 0) + (known.cache?.requests_waiting ?? 0);
  const headline = left > 0 ? `Draining: ${plural(left, "request")} to finish` : "Drained: no requests are taken";
  return { tone: "notice", headline, detail: sentence(reasons) };
}

/** Only figures show that reuse works: without them, or without a request that could have reused something, nothing does. */
function healthyInWords(known, nowMs) {
  if (known.points.length === 0) return "the engine runs";
  return total(reuseWindow(nowMs).points, (point) => point.context_cache.achievable_tokens) > 0 ? REUSE.healthy : "nothing to reuse yet";
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

function reuseInWords(known, nowMs) {
  if (known.points.length === 0) return "";
  const { points, words } = reuseWindow(nowMs);
  const could = total(points, (point) => point.context_cache.achievable_tokens);
  const window = words.startsWith("last") ? `In the ${words}` : `${words[0].toUpperCase()}${words.slice(1)}`;
  if (could === 0) return `${window} no prompt held anything that had been computed before.`;
  const did = total(points, (point) => point.context_cache.reused_tokens);
  return `${window}, ${percent(did / could)} of what could be reused was: ${count(did)} of ${count(could)} prompt tokens.`;
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
