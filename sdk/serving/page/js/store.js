// Conversations in the browser's local storage: each under its own name, so that two tabs do not
// overwrite each other's. Without storage they are kept in memory.

import { cleanImages } from "./images.js";
import { shorten } from "./text.js";

const PREFIX = "embedlm.conversation.";
const SETTINGS = "embedlm.settings";
const TITLE_LENGTH = 60;

/** A random id; crypto.randomUUID exists only in secure contexts. */
export function randomId() {
  const numbers = crypto.getRandomValues(new Uint32Array(4));
  return Array.from(numbers, (number) => number.toString(36)).join("");
}

export class Store {
  /** `onProblem(kind)`: "full" if a conversation could not be saved, "none" without storage. */
  constructor(onProblem = () => {}) {
    this.onProblem = onProblem;
    this.memory = new Map();
    this.works = storageWorks();
    this.problem = null;
    for (const [id, text] of this.stored()) this.read(id, text);
    addEventListener("storage", (event) => this.changedElsewhere(event));
    this.onChange = () => {};
  }

  /** All conversations, the latest first. */
  list() {
    return [...this.memory.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.memory.get(id) ?? null;
  }

  /** A new conversation with the last settings. It is saved when it has a message. */
  create(model) {
    const now = Date.now();
    return { id: randomId(), created: now, updated: now, model, settings: this.lastSettings(), messages: [] };
  }

  save(conversation, { touch = true } = {}) {
    if (touch) conversation.updated = Date.now();
    this.memory.set(conversation.id, conversation);
    this.write(PREFIX + conversation.id, JSON.stringify(conversation));
  }

  remove(id) {
    this.memory.delete(id);
    if (this.works) localStorage.removeItem(PREFIX + id);
  }

  lastSettings() {
    try {
      return cleanSettings(JSON.parse(this.works ? localStorage.getItem(SETTINGS) : this.settings)) ?? {};
    } catch {
      return {};
    }
  }

  saveSettings(settings) {
    this.settings = JSON.stringify(settings);
    this.write(SETTINGS, this.settings);
  }

  write(name, text) {
    if (!this.works) return void this.report("none");
    try {
      localStorage.setItem(name, text);
      this.problem = null;
    } catch {
      this.report("full");
    }
  }

  report(kind) {
    if (this.problem === kind) return; // once is enough
    this.problem = kind;
    this.onProblem(kind);
  }

  *stored() {
    if (!this.works) return;
    for (let i = 0; i < localStorage.length; i += 1) {
      const name = localStorage.key(i);
      if (name.startsWith(PREFIX)) yield [name.slice(PREFIX.length), localStorage.getItem(name)];
    }
  }

  // What is in the storage may be from another version of the page, or damaged.
  read(id, text) {
    try {
      const value = JSON.parse(text);
      const messages = value.messages.map(cleanMessage);
      const settings = cleanSettings(value.settings) ?? {};
      const model = typeof value.model === "string" ? value.model : "";
      const conversation = { id, model, messages, settings, created: Number(value.created), updated: Number(value.updated) };
      if (Number.isNaN(conversation.updated)) conversation.updated = 0;
      this.memory.set(id, conversation);
    } catch {
      // not a conversation: it is left alone
    }
  }

  changedElsewhere({ key, newValue }) {
    if (!key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    if (newValue === null) this.memory.delete(id);
    else this.read(id, newValue);
    this.onChange(id);
  }
}

/** The beginning of the first message. */
export function titleOf(conversation) {
  const first = conversation.messages.find((one) => one.role === "user");
  return first ? shorten(first.content || first.images?.[0]?.name || "", TITLE_LENGTH) : "";
}

function storageWorks() {
  try {
    localStorage.setItem("embedlm.test", "");
    localStorage.removeItem("embedlm.test");
    return true;
  } catch {
    return false;
  }
}

function cleanMessage(one) {
  if (!["user", "assistant", "tool"].includes(one.role)) throw new TypeError("role");
  const message = { ...one, content: String(one.content ?? "") };
  delete message.images;
  const images = cleanImages(one.images);
  if (one.role === "user" && images.length) message.images = images;
  if (one.role !== "assistant") return message;
  message.reasoning = String(one.reasoning ?? "");
  message.tool_calls = (one.tool_calls ?? []).map(({ id, name, arguments: text }) => ({
    id: String(id),
    name: String(name),
    arguments: String(text),
  }));
  if (!isJson(message.schema)) delete message.schema;
  // The page was closed while the answer came.
  if (one.running) {
    delete message.running;
    message.interrupted = true;
  }
  return message;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const TEXTS = ["stop", "system", "schema", "tools", "tool_choice"];

function cleanSettings(value) {
  if (value === null || typeof value !== "object") return null;
  const settings = {};
  for (const name of NUMBERS) if (typeof value[name] === "number") settings[name] = value[name];
  for (const name of TEXTS) if (typeof value[name] === "string" && value[name]) settings[name] = value[name];
  return settings;
}
