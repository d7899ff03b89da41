// A structured answer: indented, and checked against its schema while it is written.

import { el, setText, show } from "./dom.js";
import { partial, pretty } from "./json_text.js";
import { validate } from "./schema.js";
import { words } from "./words.js";

export class StructuredView {
  /** `schema`: JSON text. */
  constructor(schema) {
    this.schema = JSON.parse(schema);
    this.code = el("code", {});
    const pre = el("pre", { tabindex: "0", role: "region", "aria-label": words.structured.label }, this.code);
    this.box = el("div", { class: "code" }, pre);
    this.state = el("p", { class: "state" });
    this.node = el("div", { class: "structured" }, this.box, this.state);
    this.shown = null;
  }

  update(text, running) {
    const now = `${running} ${text}`;
    if (now === this.shown) return;
    this.shown = now;
    show(this.node, text !== "");
    setText(this.code, pretty(text));
    const { kind, words: said } = this.check(text, running);
    setText(this.state, said);
    this.state.dataset.kind = kind;
  }

  check(text, running) {
    const found = partial(text);
    if (!found || (!found.complete && !running)) return { kind: "invalid", words: words.structured.notJson };
    const { errors, unchecked } = validate(found.value, this.schema, found.open);
    const rest = unchecked.length ? ` ${words.structured.unchecked(unchecked)}` : "";
    if (errors.length) return { kind: "invalid", words: words.structured.invalid(errors) + rest };
    return running ? { kind: "open", words: words.structured.writing } : { kind: "valid", words: words.structured.valid + rest };
  }
}
