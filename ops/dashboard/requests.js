// The last requests, newest first; each leads to why it was slow.

import { byId, element, setShare, setText, syncChildren, table } from "./dom.js";
import { summary } from "./record.js";
import { state } from "./state.js";
import { clock, count, duration, NONE, number, PATHS, percent, plain } from "./words.js";

const COLUMNS = [
  { title: "Started", kind: "wide" },
  { title: "Request" },
  { title: "State" },
  { title: "Went on from", kind: "wide" },
  { title: "Cached / prompt", kind: "number" },
  { title: "TTFT", kind: "number" },
  { title: "tok/s", kind: "number wide" },
  { title: "Total", kind: "number wide" },
  { title: "Outcome", kind: "wide" },
];

const FILTERS = {
  all: () => true,
  running: (each) => each.state === "running",
  missed: (each) => each.hasMissed,
  failed: (each) => each.state === "failed" || each.state === "cancelled",
};

const MARKS = { running: "▸", done: "✓", cancelled: "–", failed: "✕" };

let rows = null;
let nothing = null;

export const requestAddress = (id) => `#request/${encodeURIComponent(id)}`;

export function showRequests() {
  if (!rows) {
    rows = table("The last requests, newest first", COLUMNS, "requests");
    nothing = element("p", { class: "muted" });
    byId("requests").append(rows, nothing);
    byId("filter").addEventListener("change", showRequests);
  }
  const wanted = FILTERS[byId("filter").value];
  const shown = state.requests.map(summary).filter(wanted);
  syncChildren(rows.tBodies[0], shown, (each) => `${each.id} ${each.startedMs}`, buildRow, updateRow);
  rows.hidden = shown.length === 0;
  setText(nothing, shown.length ? "" : state.requests.length ? "None of the last requests is one of those." : "No request yet.");
}

function buildRow(each) {
  const cells = COLUMNS.map(({ kind }, place) => element(place === 1 ? "th" : "td", { class: kind, scope: place === 1 ? "row" : null }));
  cells[1].append(element("a", { href: requestAddress(each.id), title: each.id }, shortName(each.id)), element("small", { class: "muted" }));
  cells[2].append(element("span", { class: "state" }));
  cells[4].append(element("span"), element("span", { class: "meter", "aria-hidden": "true" }));
  return element("tr", {}, ...cells);
}

function updateRow(row, each) {
  const [started, name, stateCell, path, cached, ttft, rate, total, outcome] = row.cells;
  row.dataset.state = each.state;
  setText(started, clock(each.startedMs));
  setText(name.lastElementChild, each.answers > 1 ? `${each.endpoint}, ${each.answers} answers` : each.endpoint);
  setText(stateCell.firstElementChild, `${MARKS[each.state]} ${each.state}`);
  stateCell.firstElementChild.dataset.state = each.state;
  setText(path, each.path === null ? NONE : plain(each.path, PATHS));
  setText(cached.firstElementChild, each.prompt === null ? NONE : `${count(each.cached)} / ${count(each.prompt)}`);
  cached.dataset.missed = String(each.hasMissed);
  cached.title = each.prompt ? `${percent(each.cached / each.prompt)} cached${each.hasMissed ? "; more was achievable" : ""}` : "";
  cached.lastElementChild.hidden = each.prompt === null;
  setShare(cached.lastElementChild, each.prompt ? each.cached / each.prompt : 0);
  setText(ttft, duration(each.ttft));
  setText(rate, number(each.rate === null ? null : Math.round(each.rate * 10) / 10));
  setText(total, duration(each.total));
  setText(outcome, each.outcome || NONE);
}

/** Ids made by the daemon differ in their first characters; a client's own id is shown as it is, as far as it fits. */
function shortName(id) {
  const own = /^req-([0-9a-f]{8})[0-9a-f]{24}$/.exec(id);
  return own ? own[1] : id.length > 24 ? `${id.slice(0, 23)}…` : id;
}
