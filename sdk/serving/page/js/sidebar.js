// The list of conversations.

import { el, icon } from "./dom.js";
import { titleOf } from "./store.js";
import { words } from "./words.js";

const said = words.conversations;

export class Sidebar {
  /** `actions`: `create()`, `open(id)`, `remove(id)`, `removeAll()`. */
  constructor(actions) {
    this.actions = actions;
    this.list = el("ul", { class: "conversations" });
    this.create = el("button", { type: "button", class: "wide", onclick: () => actions.create() }, icon("plus"), said.create);
    this.removeAll = el("button", { type: "button", class: "quiet", onclick: () => actions.removeAll() }, said.removeAll);
    this.node = el(
      "nav",
      { class: "sidebar", "aria-label": said.label },
      this.create,
      this.list,
      el("div", { class: "foot" }, el("p", { class: "hint" }, said.local), this.removeAll),
    );
  }

  show(conversations, currentId, isRunning) {
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    this.list.replaceChildren(...conversations.map((one) => this.item(one, one.id === currentId, isRunning(one.id))));
    this.removeAll.hidden = conversations.length === 0;
    if (focused) this.focus(focused);
  }

  /** Focus on a conversation, or on the button that makes one. */
  focus(id) {
    const node = id ? this.list.querySelector(`[data-id="${CSS.escape(id)}"]`) : null;
    (node ?? this.create).focus();
  }

  item(conversation, current, running) {
    const { id } = conversation;
    const title = titleOf(conversation) || said.untitled;
    const open = el(
      "button",
      { type: "button", class: "open", "data-id": id, "aria-current": current ? "true" : null, onclick: () => this.actions.open(id) },
      el("span", { class: "title", dir: "auto" }, title),
      running && el("span", { class: "badge" }, said.answering),
    );
    const remove = el(
      "button",
      { type: "button", class: "remove quiet", "aria-label": said.remove(title), onclick: () => this.actions.remove(id) },
      icon("trash"),
    );
    return el("li", {}, open, remove);
  }
}
