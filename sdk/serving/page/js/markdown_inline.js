// Emphasis, code, links and line breaks within a block (CommonMark's delimiter algorithm).
//
// Nodes: {type: "text" | "code" | "math", text}, {type: "break"},
// {type: "strong" | "em" | "strike", children}, {type: "link", href, children},
// {type: "image", href, text}.

import { trimEnd } from "./text.js";

const DEEPEST = 12; // emphasis in emphasis: deeper marks stay text
const PUNCTUATION = /[\p{P}\p{S}]/u;
const URL_START = /https?:\/\/[^\s<>"`\u{0}-\u{1f}]+/uy;
const SENTENCE = ".,:;!?'*_~]";
const MOST_BRACKETS = 100; // open at the same time; more are text
const ESCAPABLE = "!\"#$%&'*+,-./:;<=>?@[\\]^_`{|}~()";

/** The nodes of a text. */
export function inlines(text) {
  return new Inlines(text).nodes();
}

class Inlines {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.found = []; // nodes, and marks {mark, length, opens, closes}
    this.brackets = []; // indices into found
    this.plain = "";
    this.missing = new Map(); // closers that were searched and do not come any more
  }

  nodes() {
    while (this.at < this.text.length) this.next();
    this.flush();
    return emphasized(this.found);
  }

  next() {
    const { text, at } = this;
    switch (text[at]) {
      case "\\":
        return this.backslash();
      case "`":
        return this.code();
      case "$":
        return text[at + 1] === "$" ? this.verbatim("$$", "$$") : this.literal(1);
      case "*":
      case "_":
      case "~":
        return this.mark();
      case "!":
        return text[at + 1] === "[" ? this.bracket(2) : this.literal(1);
      case "[":
        return this.bracket(1);
      case "]":
        return this.closeBracket();
      case "<":
        return this.angle();
      case "\n":
        return this.newline();
      case "h":
        return this.url();
      default:
        return this.literal(1);
    }
  }

  literal(length) {
    this.plain += this.text.slice(this.at, this.at + length);
    this.at += length;
  }

  push(node) {
    this.flush();
    this.found.push(node);
  }

  flush() {
    if (this.plain) this.found.push({ type: "text", text: this.plain });
    this.plain = "";
  }

  // The position of `closer`, or -1. A closer that was not found once is not searched again: that
  // would take quadratic time.
  find(closer, from) {
    if (this.missing.has(closer)) return -1;
    const end = this.text.indexOf(closer, from);
    if (end < 0) this.missing.set(closer, true);
    return end;
  }

  backslash() {
    const after = this.text[this.at + 1];
    if (after === "(") return this.verbatim("\\(", "\\)");
    if (after === "[") return this.verbatim("\\[", "\\]");
    if (after === "\n") {
      this.push({ type: "break" });
      this.at += 2;
    } else if (after !== undefined && ESCAPABLE.includes(after)) {
      this.plain += after;
      this.at += 2;
    } else {
      this.literal(1);
    }
    return undefined;
  }

  // Formulas are shown as they are written: their stars and underscores are no emphasis.
  verbatim(open, close) {
    const end = this.find(close, this.at + open.length);
    if (end < 0) return this.literal(open.length);
    this.push({ type: "math", text: this.text.slice(this.at, end + close.length) });
    this.at = end + close.length;
    return undefined;
  }

  code() {
    let length = 1;
    while (this.text[this.at + length] === "`") length += 1;
    const end = this.closingTicks(length);
    if (end < 0) return this.literal(length);
    let code = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    this.push({ type: "code", text: code });
    this.at = end + length;
    return undefined;
  }

  // Where the next run of exactly `length` backticks begins. All runs are found once.
  closingTicks(length) {
    if (!this.ticks) {
      this.ticks = new Map();
      for (const run of this.text.matchAll(/`+/g)) {
        const size = run[0].length;
        if (!this.ticks.has(size)) this.ticks.set(size, []);
        this.ticks.get(size).push(run.index);
      }
      for (const starts of this.ticks.values()) starts.reverse();
    }
    const starts = this.ticks.get(length) ?? [];
    while (starts.length && starts[starts.length - 1] < this.at + length) starts.pop();
    return starts.length ? starts[starts.length - 1] : -1;
  }

  mark() {
    const mark = this.text[this.at];
    let length = 1;
    while (this.text[this.at + length] === mark) length += 1;
    if (mark === "~" && length !== 2) return this.literal(length);
    const before = this.at === 0 ? " " : this.text[this.at - 1];
    const after = this.text[this.at + length] ?? " ";
    const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const word = mark === "_"; // an underscore within a word is part of a name
    const opens = left && (!word || !right || PUNCTUATION.test(before));
    const closes = right && (!word || !left || PUNCTUATION.test(after));
    if (!opens && !closes) return this.literal(length);
    this.push({ mark, length, opens, closes });
    this.at += length;
    return undefined;
  }

  bracket(length) {
    this.flush();
    if (this.brackets.length < MOST_BRACKETS) this.brackets.push(this.found.length);
    this.found.push({ type: "text", text: this.text.slice(this.at, this.at + length) });
    this.at += length;
  }

  closeBracket() {
    const opened = this.brackets.pop();
    const target = opened === undefined ? null : this.target();
    if (!target) return this.literal(1);
    this.flush();
    const [bracket, ...inside] = this.found.splice(opened);
    const children = emphasized(inside);
    const image = bracket.text === "![";
    if (image) this.push({ type: "image", href: target.href, text: textOf(children) });
    else this.push({ type: "link", href: target.href, children });
    this.at = target.end;
    // A link contains no other link.
    if (!image) this.brackets = this.brackets.filter((index) => this.found[index].text === "![");
    return undefined;
  }

  // "(address)" or "(<address> "title")" after a closing bracket.
  target() {
    if (this.text[this.at + 1] !== "(") return null;
    const found = /\(\s*(?:<([^<>\n]*)>|([^\s<()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/y;
    found.lastIndex = this.at + 1;
    const match = found.exec(this.text.slice(0, this.at + 4000)); // no address is longer
    return match ? { href: match[1] ?? match[2], end: found.lastIndex } : null;
  }

  angle() {
    const rest = this.text.slice(this.at, this.at + 2000);
    const lineBreak = /^<br\s{0,3}\/?>/i.exec(rest);
    const address = lineBreak ? null : /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(rest);
    if (lineBreak) this.push({ type: "break" });
    else if (address) this.push(link(address[1]));
    else return this.literal(1);
    this.at += (lineBreak ?? address)[0].length;
    return undefined;
  }

  newline() {
    const hard = /(?: {2,})$/.test(this.plain.slice(-3));
    this.plain = this.plain.trimEnd();
    if (!hard) this.plain += "\n";
    this.flush(); // the next line begins a text of its own: trimming all of them would be quadratic
    if (hard) this.found.push({ type: "break" });
    this.at += 1;
  }

  url() {
    const before = this.text[this.at - 1] ?? " ";
    URL_START.lastIndex = this.at;
    const match = /[\p{L}\p{N}]/u.test(before) ? null : URL_START.exec(this.text);
    if (!match) return this.literal(1);
    let address = match[0];
    // Punctuation at the end belongs to the sentence; a bracket only if it was not opened inside.
    address = trimEnd(address, address.includes("(") ? SENTENCE : SENTENCE + ")");
    this.push(link(address));
    this.at += address.length;
    return undefined;
  }
}

const link = (href) => ({ type: "link", href, children: [{ type: "text", text: href.replace(/^mailto:/, "") }] });

/** The text of nodes, without their structure. */
export function textOf(nodes) {
  return nodes.map((node) => node.text ?? (node.children ? textOf(node.children) : " ")).join("");
}

// Marks of emphasis and what is between them become nodes.
function emphasized(found) {
  const done = []; // nodes, and marks that may still open
  const openers = []; // indices of those marks in done
  for (const one of found) {
    if (!one.mark) {
      done.push(one);
      continue;
    }
    let rest = one.length;
    while (one.closes && rest > 0) {
      const at = openerOf(done, openers, one.mark, rest);
      if (at < 0) break;
      const index = openers[at];
      const opener = done[index];
      const used = one.mark === "~" || (opener.length > 1 && rest > 1) ? 2 : 1;
      const children = done.slice(index + 1).map(asText);
      const depth = 1 + children.reduce((most, child) => Math.max(most, child.depth ?? 0), 0);
      if (depth > DEEPEST) {
        openers.splice(0, at + 1); // around the same nodes, those before would be as deep
        break;
      }
      done.length = index + 1;
      openers.length = at + 1;
      opener.length -= used;
      rest -= used;
      if (opener.length === 0) {
        done.pop();
        openers.pop();
      }
      const type = one.mark === "~" ? "strike" : used === 2 ? "strong" : "em";
      done.push({ type, children, depth });
    }
    if (rest > 0 && one.opens) {
      openers.push(done.length);
      done.push({ ...one, length: rest });
    } else if (rest > 0) {
      done.push({ type: "text", text: one.mark.repeat(rest) });
    }
  }
  return done.map(asText);
}

// How many open marks are looked at: hostile texts have thousands of them.
const FARTHEST = 32;

function openerOf(done, openers, mark, length) {
  const last = Math.max(0, openers.length - FARTHEST);
  for (let at = openers.length - 1; at >= last; at -= 1) {
    const opener = done[openers[at]];
    if (opener.mark === mark && (mark !== "~" || opener.length === length)) return at;
  }
  return -1;
}

const asText = (one) => (one.mark ? { type: "text", text: one.mark.repeat(one.length) } : one);
