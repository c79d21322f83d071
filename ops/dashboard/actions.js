// What an operator can do from the page: each action asks once more, and says what came of it.

import { postJson } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { count, plural } from "./words.js";

const ACTIONS = [
  {
    id: "audit",
    title: "Audit the books",
    question: "Pools, trees and leases are compared from scratch, and what nobody holds is given back. Every stream waits for it, a fraction of a second as a rule.",
    path: "/admin/cache/audit",
    said: ({ violations, reclaimed, remaining }) =>
      violations.length === 0
        ? "The books are sound."
        : `${plural(violations.length, "violation")} found, ${plural(total(reclaimed), "unit")} given back, ${count(remaining.length)} not mended.`,
  },
  { ...reset("device"), title: "Reset the device tier" },
  { ...reset("host"), title: "Reset host memory" },
  {
    id: "drain",
    title: "Drain",
    question: "Running requests finish, and new ones are turned away until this is undone.",
    path: "/admin/drain",
    isThere: ({ health }) => health?.status === "ok" || health?.status === "degraded",
    said: ({ requests_running, requests_waiting }) => `Draining: ${plural(requests_running + requests_waiting, "request")} to finish.`,
  },
  {
    id: "undrain",
    title: "Undo the drain",
    question: "Requests are taken again.",
    path: "/admin/undrain",
    isThere: ({ health }) => health?.drained === true,
    said: () => "Requests are taken again.",
  },
];

const END_DRILL = {
  title: "End the drill",
  question: "All faults that were switched on are switched off.",
  path: "/admin/faults",
  body: { faults: [] },
  said: () => "The drill is over.",
};

function reset(tier) {
  return {
    id: `reset-${tier}`,
    question: "What is remembered there is forgotten and computed again when it is asked for. What is in use stays.",
    path: "/admin/cache/reset",
    body: { tiers: [tier] },
    expected: [409],
    said: ({ tiers }) => {
      const { checkpoints, pinned_checkpoints: pinned } = tiers[tier];
      return `${plural(checkpoints, "checkpoint")} forgotten${pinned ? `, ${count(pinned)} in use stayed` : ""}.`;
    },
  };
}

const total = (units) => Object.values(units).reduce((sum, value) => sum + value, 0);

/** `onDone` is called after each: what is shown may have changed. */
export function installActions(onDone) {
  for (const action of ACTIONS) {
    const button = element("button", { type: "button", id: `action-${action.id}` }, action.title);
    button.addEventListener("click", () => act(action, onDone));
    byId("actions").append(button);
  }
  byId("end-drill").addEventListener("click", () => act(END_DRILL, onDone));
}

export function showActions(known) {
  for (const { id, isThere } of ACTIONS) if (isThere) byId(`action-${id}`).hidden = !isThere(known);
  const faults = known.health?.faults ?? [];
  byId("drill").hidden = faults.length === 0;
  setText(byId("drill-detail"), `This daemon fails on purpose: ${faults.join(", ")}. Nothing is to be mended while it lasts.`);
}

async function act(action, onDone) {
  if (!(await isConfirmed(action))) return;
  const result = byId("action-result");
  setText(result, `${action.title} …`);
  try {
    setText(result, `${action.title}: ${action.said(await postJson(action.path, action.body ?? {}, { expected: action.expected }))}`);
  } catch (error) {
    setText(result, `${action.title} failed: ${error.message}.`);
  }
  onDone();
}

function isConfirmed({ title, question }) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), `${title}?`);
  setText(byId("confirm-text"), question);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}
