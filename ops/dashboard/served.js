// What is served, by what, and for how long.

import { byId, setText } from "./dom.js";
import { age, count } from "./words.js";

export function showServed(served, nowMs) {
  setText(byId("served"), served?.model ? words(served, nowMs) : "");
}

const words = (served, nowMs) =>
  `${served.model} (${served.architecture}, ${count(served.max_context_tokens)} tokens of context) · backend ${served.backend} · ` +
  `${count(served.max_concurrency)} requests at once · dalsegno ${served.version} · up ${age((nowMs - served.startedMs) / 1000)}`;
