// Asking the daemon: JSON with the operator's key, and failures that say which of three things happened.

const STORED_AS = "dalsegno-key";
const TIME_LIMIT_MS = 10_000;
const ACTION_LIMIT_MS = 60_000; // an audit waits for the step that runs

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
export const get = (path, options) => send(path, {}, options);

async function send(path, request, { signal, expected = [] } = {}) {
  const headers = { ...request.headers, ...(key.get() ? { authorization: `Bearer ${key.get()}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...request, headers, signal, cache: "no-store" });
  } catch (error) {
    throw new Unreachable("the daemon does not answer", { cause: error });
  }
  if (response.ok || expected.includes(response.status)) return response;
  const message = await messageOf(response);
  if (response.status === 401 || response.status === 403) throw new Refused(response.status, message);
  throw new Failed(response.status, message);
}

export const getJson = async (path, options = {}) => jsonOf(await get(path, { ...options, signal: AbortSignal.timeout(TIME_LIMIT_MS) }));

/** POST of a JSON body. Throws as `get` does. */
export async function postJson(path, body, options = {}) {
  const request = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  return jsonOf(await send(path, request, { ...options, signal: AbortSignal.timeout(ACTION_LIMIT_MS) }));
}

async function jsonOf(response) {
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
