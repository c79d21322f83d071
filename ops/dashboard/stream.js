// Server-sent events over fetch, because EventSource cannot send a key; it connects again by itself.

import { get } from "./api.js";

const SILENCE_LIMIT_MS = 45_000; // three of the daemon's comments
const GRACE_MS = 2_000;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;

/** Text that comes in pieces, cut anywhere -> events {name, data}. */
export class EventParser {
  #rest = "";
  #name = "";
  #data = [];

  /** The events that this piece completes. */
  push(text) {
    // A carriage return at the end may be half of a line end.
    const [whole, rest] = /^([\s\S]*?)(\r?)$/.exec(this.#rest + text).slice(1);
    const lines = whole.split(/\r\n|\n|\r/);
    this.#rest = lines.pop() + rest;
    return lines.flatMap((line) => this.#take(line));
  }

  #take(line) {
    if (line === "") {
      const event = { name: this.#name || "message", data: this.#data.join("\n") };
      const isEmpty = this.#data.length === 0;
      this.#name = "";
      this.#data = [];
      return isEmpty ? [] : [event];
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.#name = value;
    if (field === "data") this.#data.push(value);
    return [];
  }
}

/**
 * Read `path` for ever: `onEvent` gets each event, `onFailure` each reason why it had to begin again; when that answers
 * false, it ends. Gives back a function that ends it.
 */
export function follow(path, onEvent, onFailure) {
  const stop = new AbortController();
  run(path, onEvent, onFailure, stop.signal);
  return () => stop.abort();
}

async function run(path, onEvent, onFailure, stopped) {
  let wait = FIRST_WAIT_MS;
  while (!stopped.aborted) {
    try {
      await readOnce(path, stopped, (event) => {
        wait = FIRST_WAIT_MS;
        onEvent(event);
      });
    } catch (error) {
      if (stopped.aborted || onFailure(error) === false) return;
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, LONGEST_WAIT_MS);
  }
}

async function readOnce(path, stopped, onEvent) {
  const silence = new AbortController();
  let watch;
  const heard = () => {
    clearTimeout(watch);
    // A page that was busy or asleep has yet to read what came meanwhile.
    watch = setTimeout(() => (watch = setTimeout(() => silence.abort(), GRACE_MS)), SILENCE_LIMIT_MS);
  };
  heard();
  try {
    const response = await get(path, { signal: AbortSignal.any([stopped, silence.signal]) });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new EventParser();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      parser.push(value).forEach(onEvent);
    }
  } finally {
    clearTimeout(watch);
  }
}
