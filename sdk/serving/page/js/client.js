// The server's interface: every request of the page is made here, with the key and clear errors.

import { events } from "./events.js";
import { words } from "./words.js";

const KEY = "embedlm.key";

/**
 * A request that failed. `kind`: "key", "forbidden", "missing", "busy", "unavailable", "request",
 * "server" (by status), "gone" (no answer), "broken" (the answer ended early), "reported" (the
 * answer was an error). `retryAfter`: seconds, or null.
 */
export class ApiError extends Error {
  constructor(kind, message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.kind = kind;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const KINDS = { 401: "key", 403: "forbidden", 404: "missing", 429: "busy", 503: "unavailable" };

export class Client {
  /**
   * `base`: where the server is; it ends with a slash. `askForKey(refused)`: resolves to a key, or
   * to null if the user cancels; `refused` says whether a key was sent. `onGone()`: perhaps nobody answers any more.
   */
  constructor(base, { askForKey, onGone }) {
    this.base = base;
    this.askForKey = askForKey;
    this.onGone = onGone;
    this.asking = null;
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  /** The models and adapters: `[{id, parent, sees}]`; `parent` is the model of an adapter, or null; `sees`: it reads images. */
  async models() {
    const response = await this.send("v1/models");
    const { data } = await response.json();
    return data.map((one) => ({ id: one.id, parent: one.parent ?? null, sees: one.input_modalities?.includes("image") ?? false }));
  }

  /** The chunks of a streamed chat. Leaving the loop closes the connection. */
  async *chat(body, signal) {
    const response = await this.send("v1/chat/completions", { body, signal });
    for await (const chunk of this.read(response)) yield chunk;
  }

  /** The states of the server, until the caller leaves the loop. */
  async *live(signal) {
    const response = await this.send("live", { signal, ask: false });
    for await (const state of this.read(response, false)) yield state;
  }

  /** Whether the server answers at all. */
  async answers() {
    try {
      const response = await fetch(new URL("health", this.base), { cache: "no-store" });
      return ![502, 504].includes(response.status);
    } catch {
      return false;
    }
  }

  async *read(response, ends = true) {
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) {
          this.onGone(); // a server that stops says so in its last event
          throw new ApiError("reported", chunk.error.message || words.errors.server(""));
        }
        yield chunk;
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      this.onGone();
      throw new ApiError("broken", words.errors.broken);
    }
    if (ends) throw new ApiError("broken", words.errors.broken);
  }

  async send(path, { body = null, signal = null, ask = true } = {}) {
    for (;;) {
      const key = this.key;
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      if (body) headers["Content-Type"] = "application/json";
      const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
      if (body) options.body = JSON.stringify(body);
      let response;
      try {
        response = await fetch(new URL(path, this.base), options);
      } catch (error) {
        if (error.name === "AbortError") throw error;
        this.onGone();
        throw new ApiError("gone", words.errors.gone);
      }
      if (response.ok) return response;
      const error = await read_error(response);
      if (error.kind === "gone") this.onGone();
      if (error.kind !== "key" || !ask) throw error;
      if (this.key === key && !(await this.newKey(key !== ""))) throw error;
    }
  }

  /** One dialog, however many requests were refused. */
  async newKey(refused) {
    this.asking ??= this.askForKey(refused);
    const key = await this.asking;
    this.asking = null;
    if (key) this.key = key;
    return Boolean(key);
  }
}

async function read_error(response) {
  const { status } = response;
  const kind = [502, 504].includes(status) ? "gone" : (KINDS[status] ?? (status < 500 ? "request" : "server"));
  let message = "";
  try {
    message = String((await response.json()).error.message ?? "");
  } catch {
    // not in OpenAI's shape: from a proxy in between
  }
  const retryAfter = retry_after(response.headers.get("Retry-After"));
  const said = words.errors[kind];
  const text = typeof said === "function" ? said(message, status) : said;
  return new ApiError(kind, text, { status, retryAfter });
}

/** Seconds of a Retry-After header, which has seconds or a date. */
export function retry_after(header) {
  if (!header) return null;
  const seconds = /^\d+(\.\d+)?$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}
