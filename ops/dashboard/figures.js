// The handful of figures that an operator looks at first.

import { byId, element, setText, syncChildren } from "./dom.js";
import { summary } from "./record.js";
import { reuseWindow, state, total } from "./state.js";
import { age, count, duration, NONE, percent, plural } from "./words.js";

export function showFigures(nowMs) {
  syncChildren(byId("figures"), figures(nowMs), ([title]) => title, build, (node, [title, value, note]) => {
    setText(node.children[0], title);
    setText(node.children[1].firstElementChild, value);
    setText(node.children[1].lastElementChild, note);
  });
}

const build = () => element("div", {}, element("dt"), element("dd", {}, element("b"), element("small", { class: "muted" })));

function figures(nowMs) {
  const last = state.points.at(-1);
  const { points, words } = reuseWindow(nowMs);
  const could = total(points, (point) => point.context_cache.achievable_tokens);
  const did = total(points, (point) => point.context_cache.reused_tokens);
  const computed = total(points, (point) => point.tokens.prefill);
  const ended = state.requests.map(summary).filter(({ ttft, startedMs }) => ttft !== null && startedMs >= nowMs - state.spanSeconds * 1000);
  const hits = ended.filter(({ path }) => path !== "root");
  const roots = ended.filter(({ path }) => path === "root");
  const newest = `of the newest ${plural(ended.length, "answer")}`; // as many as are kept
  const interval = `tokens/s, last ${age(state.intervalSeconds)}`;
  return [
    ["Running", count(state.cache?.requests_running ?? last?.scheduler.running), "requests, now"],
    ["Waiting", count(state.cache?.requests_waiting ?? last?.scheduler.waiting), "requests, now"],
    ["Decode", perSecond(last, "decode"), interval],
    ["Prefill", perSecond(last, "prefill"), interval],
    ["Reused", could > 0 ? percent(did / could) : NONE, `of the achievable, ${words}`],
    ["From the cache", did + computed > 0 ? percent(did / (did + computed)) : NONE, `of all prompt tokens, ${words}`],
    ["TTFT, hit", duration(median(hits.map(({ ttft }) => ttft))), `median, ${hits.length} ${newest}`],
    ["TTFT, root", duration(median(roots.map(({ ttft }) => ttft))), `median, ${roots.length} ${newest}`],
  ];
}

const perSecond = (point, kind) => (point ? count(point.tokens[kind] / point.interval_seconds) : NONE);

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
}
