// The form that asks for a key, when the daemon does.

import { key } from "./api.js";
import { byId, setText } from "./dom.js";

export function installKeyForm(onChange) {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(byId("key-input").value.trim());
    byId("key-input").value = "";
    onChange();
  });
  byId("forget-key").addEventListener("click", () => {
    key.forget();
    onChange();
  });
}

const FOR_OPERATORS = "Pools, reuse and requests are for operators: they show with the admin key of this daemon (--admin-key).";
const FOR_CLIENTS = "Insights show with one of the API keys of this daemon (--api-key), or with its admin key (--admin-key).";

function reason({ hadKey, isForOperators }) {
  return (hadKey ? "The key was not the right one. " : "") + (isForOperators ? FOR_OPERATORS : FOR_CLIENTS);
}

/** `refusal`: {status, message, hadKey, isForOperators} or null. */
export function showKeyForm(refusal) {
  byId("key").hidden = refusal === null;
  byId("forget-key").hidden = !key.get();
  if (refusal === null) return;
  const isKeyWanted = refusal.status === 401;
  byId("key-form").hidden = !isKeyWanted;
  setText(byId("key-title"), isKeyWanted ? "This daemon asks for a key" : "This daemon does not show its figures here");
  setText(byId("key-reason"), isKeyWanted ? reason(refusal) : `${refusal.message[0].toUpperCase()}${refusal.message.slice(1)}.`);
}
