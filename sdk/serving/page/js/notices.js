// Short messages above the message box: what happened, and a way to undo it.

import { el } from "./dom.js";
import { words } from "./words.js";

export class Notices {
  constructor() {
    this.node = el("div", { class: "notices", role: "status" });
  }

  /** Replaces the notice before. It stays until it is dismissed: nobody has to hurry. */
  tell(text, undo = null) {
    const close = () => this.clear();
    const back = () => {
      this.clear();
      undo();
    };
    this.node.replaceChildren(
      el("span", {}, text),
      undo ? el("button", { type: "button", onclick: back }, words.undo) : "",
      el("button", { type: "button", class: "quiet", onclick: close }, words.dismiss),
    );
  }

  clear() {
    this.node.replaceChildren();
  }
}
