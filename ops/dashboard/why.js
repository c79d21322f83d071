// "Why was this slow?": one request, where its time went and where its prompt came from.

import { getJson, Failed } from "./api.js";
import { byId, element } from "./dom.js";
import { hasMissed, summary } from "./record.js";
import { clock, count, duration, LOSSES, PATHS, percent, plain, UNAVOIDABLE } from "./words.js";

const PHASES = [
  ["queue", "waited in the queue"],
  ["restore", "copied back what it reuses"],
  ["stalled", "stood behind other prompts"],
  ["prefill", "prefill: computed the prompt"],
  ["preempted", "set aside for others, and brought back"],
  ["decode", "decode: wrote the answer"],
];

const REFRESH_MS = 1000;

let shownId = null;
let timer = null;
let opener = null;

/** Open or close the view as the address says: `#request/ID`. */
export function installWhy() {
  const dialog = byId("why");
  byId("why-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", leave);
  window.addEventListener("hashchange", followAddress);
  followAddress();
}

function followAddress() {
  const found = /^#request\/(.+)$/.exec(location.hash);
  const dialog = byId("why");
  if (!found) return dialog.open && dialog.close();
  shownId = decode(found[1]);
  byId("why-body").replaceChildren(element("p", { class: "muted" }, "Asking the daemon …"));
  if (!dialog.open) {
    opener = document.activeElement;
    dialog.showModal();
  }
  refresh();
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function leave() {
  clearTimeout(timer);
  shownId = null;
  if (location.hash.startsWith("#request/")) history.replaceState(null, "", location.pathname);
  if (opener?.isConnected) opener.focus();
}

/** Once more, as long as it runs: what is not known yet comes. */
export async function refresh() {
  clearTimeout(timer);
  const id = shownId;
  if (id === null) return;
  try {
    const record = await getJson(`/admin/requests/${encodeURIComponent(id)}`);
    if (id !== shownId) return;
    byId("why-body").replaceChildren(...view(record));
    if (summary(record).state === "running") timer = setTimeout(refresh, REFRESH_MS);
  } catch (error) {
    if (id !== shownId) return;
    byId("why-body").replaceChildren(element("p", {}, error.message));
    if (!(error instanceof Failed)) timer = setTimeout(refresh, REFRESH_MS * 3);
  }
}

function view(record) {
  const { state, outcome } = summary(record);
  const facts = element(
    "p", { class: "muted facts" },
    element("code", {}, record.request_id), ` ${record.endpoint}, started ${clock(record.started_unix_ms)}, ${state}${outcome ? `: ${outcome}` : ""}`,
  );
  return [facts, ...record.answers.map((answer, place) => answerView(answer, record.answers.length > 1 ? place + 1 : 0))];
}

function answerView(answer, place) {
  const sentences = answer.explanation ?? [];
  return element(
    "section", { class: "answer" },
    place ? element("h3", {}, `Answer ${place}`) : null,
    sentences.length ? element("ul", { class: "explanation" }, ...sentences.map((each) => element("li", {}, each))) : null,
    ...timeline(answer.timings_seconds),
    ...prompt(answer.result),
    answer.timings_seconds || answer.result ? null : element("p", {}, "It still runs, or left nothing behind: its figures come with its end."),
  );
}

function timeline(timings) {
  if (!timings) return [];
  const total = timings.total ?? 0;
  const told = PHASES.map(([name, title]) => ({ id: name, title, value: timings[name] ?? null })).filter(({ value }) => value !== null);
  const parts = told.length ? told : [{ id: "queue", title: "waited in the queue, and was never let in", value: total }];
  return bar("Where the time went", parts, total, duration, [
    ["to the first token", duration(timings.ttft)],
    ["in all", duration(timings.total)],
  ]);
}

function prompt(result) {
  if (!result) return [];
  const sources = Object.entries(result.source).filter(([, tokens]) => tokens > 0);
  const parts = sources.map(([tier, tokens]) => ({ id: `tier-${tier}`, title: tier === "device" ? "reused, on the device" : `reused, from ${tier}`, value: tokens }));
  const losses = Object.entries(result.lost).filter(([, tokens]) => tokens > 0).sort((one, other) => other[1] - one[1]);
  for (const [reason, tokens] of losses) {
    parts.push({ id: UNAVOIDABLE.has(reason) ? "lost-unavoidable" : "lost", title: `computed: ${plain(reason, LOSSES)}`, value: tokens });
  }
  const rest = result.prompt_tokens - parts.reduce((sum, { value }) => sum + value, 0);
  if (rest > 0) parts.push({ id: "tail", title: "computed: the end of a prompt always is", value: rest });
  const facts = [
    ["reused", `${count(result.cached_tokens)} (${percent(result.cached_tokens / result.prompt_tokens)})`],
    ["a cache of this size could have", result.expected_tokens === undefined ? null : count(result.expected_tokens)],
    ["endless memory could have", count(result.achievable_tokens)],
    ["went on from", plain(result.reuse, PATHS)],
    ["parts from what was known at token", result.diverged_at === null ? null : count(result.diverged_at)],
    ["answer", `${count(result.completion_tokens)} tokens`],
  ].filter(([, value]) => value !== null);
  const title = hasMissed(result) ? "Where the prompt came from: more could have been reused" : "Where the prompt came from";
  return bar(title, parts, result.prompt_tokens, (tokens) => `${count(tokens)} tokens`, facts);
}

/** A bar for the eyes, the same as a table for everybody, and facts below. */
function bar(title, parts, total, format, facts) {
  const segments = parts.map(({ id, value }) => {
    const segment = element("span", { "data-part": id });
    segment.style.setProperty("flex-grow", String(value));
    return segment;
  });
  const rows = parts.map(({ id, title: words, value }) =>
    element(
      "tr", {},
      element("th", { scope: "row" }, element("i", { class: "swatch", "data-part": id, "aria-hidden": "true" }), words),
      element("td", { class: "number" }, format(value)), element("td", { class: "number" }, total > 0 ? percent(value / total) : ""),
    ),
  );
  return [
    element("h3", {}, title),
    element("div", { class: "stack", "aria-hidden": "true" }, ...segments),
    element("table", { class: "parts" }, element("caption", { class: "unseen" }, title), element("tbody", {}, ...rows)),
    element("dl", { class: "evidence" }, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
  ];
}
