// Numbers, times and the daemon's names, in words for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const clockFormat = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const NONE = "–";

export const POOLS = {
  device_state_slots: { title: "Device state slots", unit: "slots" },
  device_kv_pages: { title: "Device KV pages", unit: "pages" },
  host_state_slots: { title: "Host state images", unit: "images" },
  host_units: { title: "Host memory", unit: "units" },
};

export const PATHS = {
  root: "from the first token",
  private_turn_closure: "last turn of the chat",
  private_endpoint: "end of a request",
  private_long_anchor: "point inside a long prompt",
  shared_stable_prefix: "tools and system text",
  shared_branch: "where prompts part",
};

export const LOSSES = {
  cold: "never seen before",
  diverged: "history rewritten by the client",
  evicted_state: "state evicted",
  evicted_kv: "KV evicted",
  no_checkpoint: "no checkpoint there",
  publish_skipped: "not published",
  restore_failed: "restore failed",
  structural: "too short to be worth it",
  bypass: "reuse is off",
};

/** Losses that no cache could have avoided: the tokens were new. */
export const UNAVOIDABLE = new Set(["cold", "diverged", "structural", "bypass"]);

export const plain = (name, names = {}) => names[name] ?? name.replaceAll("_", " ").replaceAll(".", " ");

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));

export const number = (value) => {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) >= 1000 || Number.isInteger(value) ? whole.format(value) : short.format(value);
};

export const percent = (share) => {
  if (share === null || share === undefined || Number.isNaN(share)) return NONE;
  const value = share * 100;
  return `${value > 0 && value < 1 ? "<1" : value > 99 && value < 100 ? ">99" : Math.round(value)} %`;
};

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  let rest = value;
  while (rest >= 1024 && step < units.length - 1) {
    rest /= 1024;
    step += 1;
  }
  return `${rest >= 100 || step === 0 ? Math.round(rest) : rest.toPrecision(2)} ${units[step]}`;
}

/** 0.0123 -> "12 ms", 75 -> "1 min 15 s". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 1) return `${seconds < 0.01 ? (seconds * 1000).toFixed(1) : Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min${Math.round(seconds % 60) ? ` ${Math.round(seconds % 60)} s` : ""}`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** In whole seconds: how long something has lasted. */
export function age(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 60 ? `${whole} s` : duration(whole);
}

export const clock = (unixMs) => clockFormat.format(unixMs);

/** A figure of an insight, by its name, whose end says the unit: ("idle_seconds", 75) -> ["idle", "1 min 15 s"]. */
export function figure(name, value) {
  if (typeof value === "string") return [plain(name), plain(value, { ...POOL_NAMES, ...PATHS, ...LOSSES })];
  if (typeof value === "boolean") return [plain(name), value ? "yes" : "no"];
  if (typeof value !== "number") return [plain(name), value === null ? NONE : JSON.stringify(value)];
  if (name === "seconds") return ["time", age(value)];
  for (const [end, format] of FORMATS) {
    if (name.endsWith(end)) return [plain(name.slice(0, -end.length)) + (end === "_tokens" ? " tokens" : ""), format(value)];
  }
  return [plain(name), number(value)];
}

const POOL_NAMES = Object.fromEntries(Object.entries(POOLS).map(([name, { title }]) => [name, title.toLowerCase()]));

const FORMATS = [
  ["_seconds", duration],
  ["_bytes", bytes],
  ["_share", percent],
  ["_ratio", percent],
  ["_tokens", count],
  ["_unix_ms", clock],
];
