// The handful of figures that an operator looks at first.

import { byId, element, setText, syncChildren } from "./dom.js";
import { summary } from "./record.js";
import { shownPoints, state, total } from "./state.js";
import { count, duration, NONE, percent } from "./words.js";

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
  const points = shownPoints(nowMs);
  const could = total(points, (point) => point.context_cache.achievable_tokens);
  const did = total(points, (point) => point.context_cache.reused_tokens);
  const computed = total(points, (point) => point.tokens.prefill);
  const ended = state.requests.map(summary).filter(({ ttft }) => ttft !== null);
  const hits = ended.filter(({ path }) => path !== "root");
  const roots = ended.filter(({ path }) => path === "root");
  return [
    ["Running", count(state.cache?.requests_running ?? last?.scheduler.running), "requests"],
    ["Waiting", count(state.cache?.requests_waiting ?? last?.scheduler.waiting), "requests"],
    ["Writing", perSecond(last, "decode"), "tokens/s"],
    ["Reading", perSecond(last, "prefill"), "tokens/s computed"],
    ["Reused", could > 0 ? percent(did / could) : NONE, "of the achievable"],
    ["Not computed", did + computed > 0 ? percent(did / (did + computed)) : NONE, "of all prompt tokens"],
    ["TTFT, reused", duration(median(hits.map(({ ttft }) => ttft))), `median of ${count(hits.length)}`],
    ["TTFT, from the start", duration(median(roots.map(({ ttft }) => ttft))), `median of ${count(roots.length)}`],
  ];
}

const perSecond = (point, kind) => (point ? count(point.tokens[kind] / point.interval_seconds) : NONE);

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
}
