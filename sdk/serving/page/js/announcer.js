// What a screen reader hears of a streamed answer: whole paragraphs, not tokens.

import { el } from "./dom.js";
import { blocks } from "./markdown.js";
import { textOf } from "./markdown_inline.js";
import { words } from "./words.js";

const PAUSE_MS = 1500; // between two announcements of one answer
const KEPT_MS = 10_000; // then it is gone: who reads the page finds the answer once

export class Announcer {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.node = el("div", { class: "off-screen", role: "log", "aria-live": "polite" });
    this.begin();
  }

  begin() {
    this.said = 0; // blocks of the answer
    this.last = this.now();
  }

  /** Reads the blocks of the answer that are complete; all of them at its end. */
  read(text, ended) {
    if (!ended && this.now() - this.last < PAUSE_MS) return;
    const found = blocks(text);
    const complete = ended ? found.length : found.length - 1;
    if (complete <= this.said) return;
    this.say(found.slice(this.said, complete).map(spoken).join(" "));
    this.said = complete;
    this.last = this.now();
  }

  say(text) {
    if (!text) return;
    const said = el("p", {}, text);
    this.node.append(said);
    setTimeout(() => said.remove(), KEPT_MS);
  }
}

function spoken(block) {
  switch (block.type) {
    case "code":
      return `${block.language ? words.code.of(block.language) : words.code.plain}.`;
    case "quote":
      return block.children.map(spoken).join(" ");
    case "list":
      return block.items.map((item) => item.children.map(spoken).join(" ")).join(" ");
    case "table":
      return `${words.table}: ${block.head.map(textOf).join(", ")}.`;
    default:
      return block.children ? textOf(block.children) : "";
  }
}
