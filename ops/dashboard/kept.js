// What is remembered: the conversations that hold the most, without a word of what is in them.

import { byId, element, setText, syncChildren, table } from "./dom.js";
import { age, count, PATHS, plain, plural } from "./words.js";

const COLUMNS = [
  { title: "Conversation" },
  { title: "Newest checkpoint", kind: "wide" },
  { title: "Tokens", kind: "number" },
  { title: "Turns", kind: "number wide" },
  { title: "Uses", kind: "number" },
  { title: "Idle for", kind: "number" },
  { title: "Where", kind: "wide" },
];

let rows = null;

export function showKept(cache) {
  const conversations = cache?.conversations ?? [];
  const tree = cache?.tree;
  const words = tree
    ? `${plural(tree.checkpoints, "checkpoint")} over ${plural(tree.nodes, "page")} of prompts, the longest ${count(tree.depth_tokens)} tokens; ` +
      `${count(tree.ghosts)} that were computed once are remembered by their tokens alone.`
    : "";
  setText(byId("kept-summary"), conversations.length ? words : "Nothing yet.");
  byId("kept").hidden = conversations.length === 0;
  if (conversations.length === 0) return;
  if (!rows) {
    rows = table("Conversations by tokens", COLUMNS, "kept");
    byId("kept").append(rows);
  }
  syncChildren(rows.tBodies[0], conversations, (each) => each.id, buildRow, updateRow);
}

const buildRow = () =>
  element("tr", {}, ...COLUMNS.map(({ kind }, place) => element(place ? "td" : "th", { class: kind, scope: place ? null : "row" })));

function updateRow(row, each) {
  const cells = [
    each.id, plain(each.kind, PATHS), count(each.tokens), count(each.turns), count(each.uses), age(each.idle_seconds), each.tiers.join(", "),
  ];
  cells.forEach((text, place) => setText(row.cells[place], String(text)));
}
