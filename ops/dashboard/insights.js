// Cards for what is worth an operator's attention; they come and go as the daemon says.

import { byId, element, setText, syncChildren } from "./dom.js";
import { age, clock, figure } from "./words.js";

const SEVERITIES = ["critical", "warning", "notice", "info"];
const KEPT_CLEARED = 5;

let shown = new Map();
let cleared = [];

/** The daemon behind the page is another one: what the old one said is gone, not cleared. */
export function forgetInsights() {
  shown = new Map();
  cleared = [];
}

export function showInsights(body, nowMs) {
  const insights = [...(body?.insights ?? [])].sort(
    (one, other) => SEVERITIES.indexOf(one.severity) - SEVERITIES.indexOf(other.severity) || other.since_unix_ms - one.since_unix_ms,
  );
  noteChanges(insights, nowMs);
  byId("no-insights").hidden = insights.length > 0 || !body;
  syncChildren(byId("insights"), insights, (each) => each.id, buildCard, (card, each) => updateCard(card, each, nowMs));
  syncChildren(byId("cleared"), cleared, (each) => each.key, () => element("li"), (node, each) => setText(node, each.text));
}

function noteChanges(insights, nowMs) {
  const current = new Map(insights.map((each) => [each.id, each]));
  const said = [];
  for (const [id, each] of shown) {
    if (current.has(id)) continue;
    const lasted = age((nowMs - each.since_unix_ms) / 1000);
    cleared = [{ key: `${id} ${nowMs}`, text: `${clock(nowMs)} cleared after ${lasted}: ${each.title}` }, ...cleared].slice(0, KEPT_CLEARED);
    said.push(`Cleared: ${each.title}.`);
  }
  for (const [id, each] of current) {
    if (!shown.has(id)) said.push(`New ${each.severity} insight: ${each.title}.`);
  }
  shown = current;
  if (said.length > 0) setText(byId("announcer"), said.join(" "));
}

function buildCard(insight) {
  const name = `insight-${insight.id}`;
  return element(
    "article",
    { class: "card", "aria-labelledby": name },
    element("header", {}, element("span", { class: "badge" }), element("h3", { id: name }), element("span", { class: "since muted" })),
    element("p", { class: "statement" }),
    element("p", { class: "advice" }, element("strong", {}, "What to do: "), element("span")),
    element("dl", { class: "evidence" }),
  );
}

function updateCard(card, insight, nowMs) {
  card.dataset.severity = insight.severity;
  setText(card.querySelector(".badge"), insight.severity);
  setText(card.querySelector("h3"), insight.title);
  setText(card.querySelector(".since"), `since ${clock(insight.since_unix_ms)}, ${age((nowMs - insight.since_unix_ms) / 1000)}`);
  setText(card.querySelector(".statement"), insight.statement);
  setProse(card.querySelector(".advice span"), insight.recommendation);
  const evidence = Object.entries(insight.evidence ?? {});
  const over = Object.entries(insight.measured_over ?? {}).map(([name, value]) => [name, value, "over "]);
  syncChildren(card.querySelector("dl"), [...evidence, ...over], ([name, , before]) => (before ?? "") + name, buildFigure, updateFigure);
}

/** A command to this daemon, or what stands between backquotes. */
const COMMANDS = /(curl -X POST \S*[\w/](?: -H '[^']*')?(?: -d '[^']*')?|`[^`]+`)/;

/** Text with its commands set apart, as they are to be typed: the daemon does not know under which address it is seen. */
function setProse(node, text) {
  if (node.dataset.text === text) return;
  node.dataset.text = text;
  const parts = text.split(COMMANDS);
  node.replaceChildren(...parts.map((part, place) => (place % 2 ? element("code", {}, asTyped(part)) : part)));
}

const asTyped = (command) => command.replaceAll("`", "").replace(/http:\/\/[^/\s]+(?=\/admin\/)/, location.origin);

const buildFigure = () => element("div", {}, element("dt"), element("dd"));

function updateFigure(node, [name, value, before = ""]) {
  const [title, text] = figure(name, value);
  setText(node.firstElementChild, before + title);
  setText(node.lastElementChild, text);
}
