// A conversation: its messages and the box for the next one.

import { el, icon, setText, show } from "./dom.js";
import { ImagePicker } from "./images.js";
import { messageView } from "./message_view.js";
import { words } from "./words.js";

const said = words.chat;
const DRAFT = "embedlm.draft";
const NEAR = 80; // pixels from the end that still count as the end

export class ChatView {
  /** `actions`: `send(text, images)`, `tell(text)`, `stop()`, `clear()`, `edit`, `regenerate`, `results`. */
  constructor(actions, notices) {
    this.actions = actions;
    this.views = new Map();
    this.messages = el("div", { class: "messages" });
    this.empty = el("div", { class: "empty" }, el("p", { class: "large" }, said.empty), el("p", {}, said.emptyHint));
    this.scroller = el(
      "div",
      { class: "scroller", tabindex: "0", role: "region", "aria-label": said.label, onscroll: () => this.scrolled() },
      this.empty,
      this.messages,
    );
    this.toEnd = el("button", { type: "button", class: "to-end", hidden: true, onclick: () => this.jump() }, said.toEnd);
    this.form = this.composer();
    const files = (event) => event.dataTransfer?.types.includes("Files");
    const dropping = (event) => {
      if (files(event)) event.preventDefault(); // or the browser leaves the page for the file
    };
    const drop = (event) => {
      if (!files(event)) return;
      event.preventDefault();
      this.picker.addFrom(event.dataTransfer);
      this.input.focus();
    };
    this.node = el("div", { class: "chat", ondragover: dropping, ondrop: drop }, this.scroller, el("div", { class: "bottom" }, this.toEnd, notices, this.form));
    this.follows = true;
    new ResizeObserver(() => this.follow()).observe(this.scroller); // notices and panels come and go
  }

  composer() {
    this.input = el("textarea", { id: "message", rows: "2", dir: "auto", placeholder: said.placeholder, "aria-describedby": "message-hint" });
    this.sendButton = el("button", { type: "submit", class: "primary" }, icon("send"), said.send);
    this.stopButton = el("button", { type: "button", class: "primary", hidden: true, onclick: () => this.stop() }, icon("stop"), said.stop);
    this.clearButton = el("button", { type: "button", class: "quiet", onclick: () => this.actions.clear() }, said.clear);
    this.input.addEventListener("keydown", (event) => {
      // Enter that ends the composition of a character (Chinese, Japanese, Korean) sends nothing.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.picker = new ImagePicker((text) => this.actions.tell(text), () => this.input.focus());
    this.input.addEventListener("paste", (event) => {
      if (this.picker.addFrom(event.clipboardData)) event.preventDefault();
    });
    this.input.addEventListener("input", () => this.keepDraft());
    this.input.value = sessionStorage.getItem(DRAFT) ?? "";
    const send = (event) => {
      event.preventDefault();
      this.send();
    };
    return el(
      "form",
      { class: "composer", onsubmit: send },
      el("label", { for: "message", class: "off-screen" }, said.input),
      this.picker.node,
      this.picker.spoken,
      this.input,
      el("div", { class: "actions" }, el("p", { id: "message-hint", class: "hint" }, said.hint), this.picker.file, this.picker.button, this.clearButton, this.sendButton, this.stopButton),
    );
  }

  send() {
    const text = this.input.value;
    const { images } = this.picker;
    if ((!text.trim() && !images.length) || this.busy || !this.actions.send(text, images)) return;
    this.picker.take();
    this.input.value = "";
    this.keepDraft();
    this.follows = true;
    this.input.focus();
  }

  // What was typed is there after a reload.
  keepDraft() {
    try {
      sessionStorage.setItem(DRAFT, this.input.value);
    } catch {
      // without storage it is lost
    }
  }

  stop() {
    this.actions.stop();
    this.input.focus();
  }

  /**
   * Shows a conversation; `busy`: whether an answer runs; `sees`: whether the model reads images.
   * Views of known messages are kept.
   */
  show(conversation, busy, sees = false) {
    this.busy = busy;
    this.picker.allow(sees);
    const { messages } = conversation;
    const last = messages.findLast((one) => one.role === "assistant");
    const isLast = (message) => message === last && message === messages[messages.length - 1];
    const views = messages.map((message) => [message, this.views.get(message) ?? messageView(message, this.actions)]);
    const nodes = views.map(([, view]) => view.node);
    const same = nodes.length === this.messages.childNodes.length && nodes.every((node, i) => node === this.messages.childNodes[i]);
    if (!same) this.messages.replaceChildren(...nodes);
    this.views = new Map(views);
    for (const [message, view] of views) view.update({ last: isLast(message), busy });
    show(this.empty, messages.length === 0);
    this.buttons(messages.length > 0);
    this.follow();
  }

  /** Shows what is new of one message. */
  update(message) {
    this.views.get(message)?.update({ last: true, busy: true });
    this.follow();
  }

  /** Seconds to wait are counted down. */
  tick() {
    for (const [message, view] of this.views) {
      if (message.error?.until) view.update({ last: view.again && !view.again.hidden, busy: this.busy });
    }
  }

  buttons(any) {
    // The focus must not stay on a button that disappears.
    const had = document.activeElement === this.stopButton || document.activeElement === this.sendButton;
    show(this.sendButton, !this.busy);
    show(this.stopButton, this.busy);
    show(this.clearButton, any && !this.busy);
    if (had && document.activeElement !== this.input) this.input.focus();
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR;
    show(this.toEnd, !this.follows);
  }

  follow() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  jump() {
    this.follows = true;
    this.follow();
    this.input.focus();
  }

  /** Shows another conversation from its end. */
  reset() {
    this.views = new Map();
    this.messages.replaceChildren();
    this.follows = true;
    setText(this.toEnd, said.toEnd);
  }
}
