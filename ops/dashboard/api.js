// Asking the daemon: JSON with the operator's key, and failures that say which of three things happened.

const STORED_AS = "dalsegno-key";
const TIME_LIMIT_MS = 10_000;

/** Nothing answered. */
export class Unreachable extends Error {}

/** 401: a key is needed, or the one given is wrong. 403: no key would help, the message says what does. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Any other answer than the one expected. */
export class Failed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED_AS) ?? "",
  set: (value) => sessionStorage.setItem(STORED_AS, value),
  forget: () => sessionStorage.removeItem(STORED_AS),
};

/** GET, with the key if there is one. Throws Unreachable, Refused or Failed; statuses in `expected` are answers too. */
export async function get(path, { signal, expected = [] } = {}) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  let response;
  try {
    response = await fetch(path, { headers, signal, cache: "no-store" });
  } catch (error) {
    throw new Unreachable("the daemon does not answer", { cause: error });
  }
  if (response.ok || expected.includes(response.status)) return response;
  const message = await messageOf(response);
  if (response.status === 401 || response.status === 403) throw new Refused(response.status, message);
  throw new Failed(response.status, message);
}

export async function getJson(path, options = {}) {
  const response = await get(path, { ...options, signal: AbortSignal.timeout(TIME_LIMIT_MS) });
  try {
    return await response.json();
  } catch (error) {
    throw new Unreachable("the answer broke off", { cause: error });
  }
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the daemon answered ${response.status}`;
  }
}
