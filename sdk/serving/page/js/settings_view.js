// The settings of a conversation: sampling, system prompt, structured answers and tools.

import { toolDefinitions } from "./answer.js";
import { el, freshId, setText } from "./dom.js";
import { words } from "./words.js";

const said = words.settings;

// name, least, most, step
const NUMBERS = [
  ["temperature", 0, 10, "any"],
  ["top_p", 0, 1, "any"],
  ["top_k", 0, null, 1],
  ["max_tokens", 1, null, 1],
  ["seed", 0, null, 1],
];

export class SettingsView {
  /**
   * `onChange(settings)`: values that were set; what is left out has the model's default.
   * `onReset(undo)`: all were taken back.
   */
  constructor(onChange, onReset) {
    this.onChange = onChange;
    this.onReset = onReset;
    this.fields = new Map();
    const numbers = NUMBERS.map(([name, least, most, step]) => this.number(name, least, most, step));
    this.node = el(
      "form",
      { class: "settings", onsubmit: (event) => event.preventDefault() },
      el("p", { class: "hint" }, said.stored),
      group(said.sampling, el("div", { class: "numbers" }, numbers), this.text("stop", 2, said.stopHint)),
      group(null, this.text("system", 4)),
      group(said.structured, this.text("schema", 6, said.schemaHint, checkSchema)),
      group(said.toolsGroup, this.text("tools", 6, said.toolsHint, checkTools), this.choice()),
      el("button", { type: "button", onclick: () => this.reset() }, said.reset),
    );
  }

  /** Whether every field can be used. */
  get valid() {
    return [...this.fields.values()].every(({ error }) => error.textContent === "");
  }

  /** Moves the focus to the first field that is wrong. */
  focusError() {
    for (const { input, error } of this.fields.values()) {
      if (error.textContent) return input.focus();
    }
    return undefined;
  }

  show(settings) {
    for (const [name, field] of this.fields) {
      field.input.value = settings[name] ?? (name === "tool_choice" ? "auto" : "");
      this.check(field);
    }
  }

  reset() {
    const before = [...this.fields.values()].map(({ input }) => input.value);
    this.show({});
    this.changed();
    this.onReset(() => {
      [...this.fields.values()].forEach((field, i) => {
        field.input.value = before[i];
        this.check(field);
      });
      this.changed();
    });
  }

  changed() {
    if (!this.valid) return;
    const settings = {};
    for (const [name, { input, read }] of this.fields) {
      const value = read(input.value);
      if (value !== undefined) settings[name] = value;
    }
    this.onChange(settings);
  }

  number(name, least, most, step) {
    const limits = { min: least, max: most, step };
    const input = el("input", { type: "number", inputmode: "decimal", placeholder: said.defaultValue, ...limits });
    const wrong = said.number(least, most, step === 1);
    const check = () => (input.validity.valid ? "" : wrong);
    const read = (text) => (text === "" ? undefined : Number(text));
    return this.field(name, input, check, read, name === "temperature" ? said.temperatureHint : "");
  }

  text(name, rows, hint = "", check = () => "") {
    const input = el("textarea", { rows, dir: "auto", spellcheck: name === "system" ? null : "false" });
    const read = (text) => (text.trim() === "" ? undefined : text);
    return this.field(name, input, (text) => (text.trim() ? check(text) : ""), read, hint);
  }

  choice() {
    const options = Object.entries(said.choices).map(([value, label]) => el("option", { value }, label));
    const read = (value) => (value === "auto" ? undefined : value);
    return this.field("tool_choice", el("select", {}, options), () => "", read, "");
  }

  field(name, input, test, read, hint) {
    const ids = { input: `setting-${name}`, error: freshId("error"), hint: freshId("hint") };
    const error = el("p", { id: ids.error, class: "error-text" });
    const field = { input, error, test, read };
    input.id = ids.input;
    input.setAttribute("aria-describedby", `${ids.error} ${ids.hint}`);
    input.addEventListener("input", () => {
      this.check(field);
      this.changed();
    });
    this.fields.set(name, field);
    const about = el("p", { id: ids.hint, class: "hint" }, hint);
    return el("div", { class: "field" }, el("label", { for: ids.input }, said[name]), input, error, about);
  }

  check({ input, error, test }) {
    const wrong = test(input.value);
    setText(error, wrong);
    if (wrong) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
}

function group(title, ...children) {
  if (!title) return el("div", { class: "group" }, children);
  return el("fieldset", { class: "group" }, el("legend", {}, title), children);
}

function checkJson(text, check) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return said.badJson(error.message);
  }
  return check(value);
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const checkSchema = (text) => checkJson(text, (value) => (isObject(value) ? "" : said.badSchema));

function checkTools(text) {
  return checkJson(text, (value) => {
    const list = Array.isArray(value) ? value : [value];
    const fine = list.length > 0 && list.every(isObject);
    return fine && toolDefinitions(list).every((one) => one.function?.name) ? "" : said.badTools;
  });
}
