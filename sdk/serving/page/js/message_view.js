// One message of a conversation on the page.

import { copyButton } from "./copy.js";
import { el, freshId, setText, show } from "./dom.js";
import { imageNode } from "./images.js";
import { pretty } from "./json_text.js";
import { codeNode, MarkdownView } from "./markdown_view.js";
import { StructuredView } from "./structured_view.js";
import { words } from "./words.js";

/** A view of `message`. `actions`: what its buttons do (`edit`, `regenerate`, `results`). */
export function messageView(message, actions) {
  return message.role === "assistant" ? new AnswerView(message, actions) : new SaidView(message, actions);
}

/** What the user wrote, or the result of a tool. */
class SaidView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const tool = message.role === "tool";
    const id = freshId("message");
    this.title = el("h3", { id, class: "who" }, tool ? words.chat.toolResult : words.chat.you);
    this.body = el("div", { class: "said", dir: "auto" }, message.content);
    this.edit = el("button", { type: "button", class: "quiet", onclick: () => this.startEdit() }, words.chat.edit);
    this.bar = el("div", { class: "actions" }, !tool && this.edit, copyButton(() => message.content));
    this.images = el("div", { class: "images" }, (message.images ?? []).map(imageNode));
    this.node = el("article", { class: `message ${message.role}`, "aria-labelledby": id }, this.title, message.images?.length ? this.images : "", this.body, this.bar);
    show(this.body, message.content !== "");
  }

  update({ busy }) {
    this.edit.disabled = busy;
  }

  startEdit() {
    const input = el("textarea", { id: freshId("edit"), rows: "3", dir: "auto" });
    input.value = this.message.content;
    const done = (form) => {
      form.replaceWith(this.body);
      show(this.body, this.message.content !== "");
      show(this.bar, true);
      this.edit.focus();
    };
    const save = (event) => {
      event.preventDefault();
      if (input.value.trim()) this.actions.edit(this.message, input.value);
    };
    const keys = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // it would stop an answer
        done(form);
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        save(event);
      }
    };
    const hint = freshId("hint");
    input.setAttribute("aria-describedby", hint);
    const form = el(
      "form",
      { class: "edit", onsubmit: save, onkeydown: keys },
      el("label", { for: input.id, class: "off-screen" }, words.chat.editLabel),
      input,
      el("p", { id: hint, class: "hint" }, words.chat.editHint),
      el(
        "div",
        { class: "actions" },
        el("button", { type: "submit", class: "primary" }, words.chat.save),
        el("button", { type: "button", onclick: () => done(form) }, words.cancel),
      ),
    );
    this.body.replaceWith(form);
    show(this.bar, false);
    input.focus();
  }
}

/** An answer: reasoning, text or JSON, calls of tools, what went wrong, and how fast it was. */
class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const id = freshId("message");
    const title = el("h3", { id, class: "who" }, words.chat.answerOf(""), el("bdi", {}, message.model));
    this.reasoning = new ReasoningView();
    this.text = message.schema ? new StructuredView(message.schema) : new MarkdownView();
    this.calls = el("div", { class: "calls" });
    this.waiting = el("p", { class: "waiting" }, words.chat.waiting);
    this.note = el("p", { class: "note" });
    this.error = el("p", { class: "error-text" });
    this.stats = el("p", { class: "stats" });
    this.again = el("button", { type: "button", class: "quiet", onclick: () => actions.regenerate(message) });
    this.copy = copyButton(() => message.content);
    this.bar = el("div", { class: "actions" }, this.copy, this.again, this.stats);
    const parts = [this.reasoning.node, this.text.node, this.calls, this.waiting, this.note, this.error, this.bar];
    this.node = el("article", { class: "message assistant", "aria-labelledby": id }, title, ...parts);
  }

  /** `last`: whether this is the last answer. `busy`: whether an answer of the conversation runs. */
  update({ last, busy }) {
    const { message } = this;
    const running = Boolean(message.running);
    const begun = message.content || message.reasoning || message.tool_calls.length;
    this.reasoning.update(message.reasoning, running && !message.content);
    this.text.update(message.content, running);
    show(this.waiting, running && !begun);
    this.updateCalls(last && !busy);
    const note = noteOf(message);
    setText(this.note, note);
    show(this.note, note !== "");
    setText(this.error, errorOf(message));
    show(this.error, Boolean(message.error));
    setText(this.stats, statsOf(message));
    show(this.copy, message.content !== "");
    setText(this.again, message.error ? words.chat.retry : words.chat.regenerate);
    show(this.again, last && !busy);
    show(this.bar, !running || Boolean(begun));
    this.node.setAttribute("aria-busy", String(running));
  }

  updateCalls(open) {
    const state = JSON.stringify([this.message.tool_calls, open]);
    if (state === this.callsState) return;
    this.callsState = state;
    const calls = this.message.tool_calls;
    const nodes = calls.map((call) => {
      const name = el("h4", {}, words.tool.call(""), el("bdi", {}, call.name));
      return el("div", { class: "call" }, name, codeNode({ language: "json", text: pretty(call.arguments || "{}") }));
    });
    this.calls.replaceChildren(...nodes);
    if (open && calls.length) this.calls.append(this.resultForm(calls));
  }

  resultForm(calls) {
    const inputs = calls.map(() => el("textarea", { id: freshId("result"), rows: "2", required: true }));
    const send = (event) => {
      event.preventDefault();
      this.actions.results(calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: inputs[i].value })));
    };
    const fields = calls.map((call, i) => [
      el("label", { for: inputs[i].id }, words.tool.result(call.name)),
      inputs[i],
    ]);
    const hint = el("p", { class: "hint" }, words.tool.resultHint);
    const button = el("button", { type: "submit", class: "primary" }, words.tool.send(calls.length));
    return el("form", { class: "results", onsubmit: send }, hint, fields, button);
  }
}

/** The reasoning before an answer, folded. */
class ReasoningView {
  constructor() {
    this.title = el("summary", {});
    this.view = new MarkdownView();
    this.node = el("details", { class: "reasoning", ontoggle: () => this.fill() }, this.title, this.view.node);
    this.text = "";
  }

  update(text, running) {
    this.text = text;
    show(this.node, text !== "");
    setText(this.title, running ? words.chat.reasoningNow : words.chat.reasoning);
    this.fill();
  }

  // A folded text costs nothing.
  fill() {
    if (this.node.open) this.view.update(this.text);
  }
}

function noteOf(message) {
  if (message.stopped) return words.chat.stopped;
  if (message.interrupted) return words.chat.interrupted;
  if (message.finish_reason === "length") return words.chat.tooLong;
  return "";
}

function errorOf({ error }) {
  if (!error) return "";
  const seconds = error.until ? Math.ceil((error.until - Date.now()) / 1000) : 0;
  return seconds > 0 ? `${error.text} ${words.chat.wait(seconds)}` : error.text;
}

/** "120 tokens · 58 tokens/s · first after 0.2 s · prompt 34" */
export function statsOf({ stats }) {
  if (!stats) return "";
  const parts = [];
  if (stats.generated !== undefined) parts.push(words.stats.generated(stats.generated));
  if (stats.speed) parts.push(words.stats.speed(stats.speed));
  if (stats.first_seconds !== undefined) parts.push(words.stats.first(stats.first_seconds));
  if (stats.prompt !== undefined) parts.push(words.stats.prompt(stats.prompt, stats.cached));
  return parts.join(" · ");
}
