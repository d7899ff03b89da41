// Asks for the key of the server.

import { el, freshId, setText, show } from "./dom.js";
import { words } from "./words.js";

export class KeyDialog {
  constructor() {
    const ids = { title: freshId("key"), input: freshId("key"), hint: freshId("key"), error: freshId("key") };
    this.title = el("h2", { id: ids.title });
    this.error = el("p", { id: ids.error, class: "error-text", role: "alert" });
    this.input = el("input", {
      id: ids.input,
      type: "password",
      autocomplete: "off",
      spellcheck: "false",
      "aria-describedby": `${ids.error} ${ids.hint}`,
    });
    this.forget = el("button", { type: "button", onclick: () => this.end("") }, words.key.forget);
    const form = el(
      "form",
      { onsubmit: (event) => this.submit(event) },
      this.title,
      el("label", { for: ids.input }, words.key.label),
      this.input,
      this.error,
      el("p", { id: ids.hint, class: "hint" }, words.key.hint),
      el(
        "div",
        { class: "actions" },
        el("button", { type: "submit", class: "primary" }, words.key.save),
        el("button", { type: "button", onclick: () => this.end(null) }, words.cancel),
        this.forget,
      ),
    );
    this.node = el("dialog", { "aria-labelledby": ids.title, oncancel: () => this.end(null), onclose: () => this.end(null) }, form);
    this.resolve = () => {};
  }

  /**
   * A key, "" to forget it, or null. `needed`: the server asked for one. `refused`: a key was sent and
   * not accepted. `stored`: there is one to forget.
   */
  ask({ needed = false, refused = false, stored = false }) {
    setText(this.title, needed ? words.key.title : words.key.change);
    setText(this.error, refused ? words.key.refused : "");
    show(this.forget, stored);
    this.input.value = "";
    this.node.showModal();
    this.input.focus();
    return new Promise((resolve) => {
      this.resolve = resolve;
    });
  }

  submit(event) {
    event.preventDefault();
    const key = this.input.value.trim();
    if (key) this.end(key);
    else setText(this.error, words.key.empty);
  }

  end(result) {
    const { resolve } = this;
    this.resolve = () => {};
    this.input.value = "";
    if (this.node.open) this.node.close();
    resolve(result);
  }
}
