// Markdown as models write it, into a tree of plain objects. No HTML: a tag is text.
//
// Blocks: paragraphs, headings, fenced code, lists, quotes, tables, rules. The time is linear in the
// length of the text, and depths are bounded, because a text may be hostile.

import { inlines } from "./markdown_inline.js";
import { trimEnd } from "./text.js";

const DEEPEST = 8; // lists and quotes in each other; what is deeper is a paragraph

/** The blocks of a text. Each has `from` and `to`: its lines, for those who render it again. */
export function blocks(text, depth = 0) {
  return parse(text.split(/\r\n|\n|\r/), depth);
}

function parse(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const block = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? table(lines, at) ??
      (depth < DEEPEST ? (quote(lines, at, depth) ?? list(lines, at, depth)) : null) ??
      paragraph(lines, at);
    found.push({ ...block, from: at });
    at = block.to;
  }
  return found;
}

const isBlank = (line) => line.trim() === "";

function fence(lines, at) {
  const opened = /^( {0,3})(`{3,}|~{3,})(.*)$/.exec(lines[at]);
  if (!opened || (opened[2][0] === "`" && opened[3].includes("`"))) return null;
  const [, indent, marks, info] = opened;
  const code = [];
  let to = at + 1;
  let closed = false;
  while (to < lines.length && !closed) {
    const line = lines[to];
    const mark = line.trim();
    closed = mark.length >= marks.length && mark === marks[0].repeat(mark.length) && /^ {0,3}\S/.test(line);
    if (!closed) code.push(line.startsWith(indent) ? line.slice(indent.length) : line.trimStart());
    to += 1;
  }
  return { type: "code", language: info.trim().split(/\s/)[0], text: code.join("\n"), closed, to };
}

function heading(lines, at) {
  const marks = /^ {0,3}(#{1,6})(?=\s|$)/.exec(lines[at]);
  if (!marks) return null;
  let text = lines[at].slice(marks[0].length).trim();
  const closing = trimEnd(text, "#");
  if (closing === "" || /\s$/.test(closing.slice(-1))) text = closing.trimEnd();
  return { type: "heading", level: marks[1].length, children: inlines(text), to: at + 1 };
}

function isRule(line) {
  const marks = line.replace(/\s/g, "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length) &&
    /^ {0,3}\S/.test(line);
}

const rule = (lines, at) => (isRule(lines[at]) ? { type: "rule", to: at + 1 } : null);

const QUOTE = /^ {0,3}> ?/;

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  let to = at;
  const inside = [];
  while (to < lines.length && (QUOTE.test(lines[to]) || continues(lines, to, inside))) {
    inside.push(lines[to].replace(QUOTE, ""));
    to += 1;
  }
  return { type: "quote", children: parse(inside, depth + 1), to };
}

// A line without its own mark continues the paragraph that the line before belongs to.
function continues(lines, at, before) {
  const last = before[before.length - 1];
  return last !== undefined && !isBlank(last) && !isBlank(lines[at]) && !startsBlock(lines, at);
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;

function list(lines, at, depth) {
  const first = item(lines[at]);
  if (!first) return null;
  const items = [];
  let to = at;
  let loose = false;
  while (to < lines.length) {
    const mark = item(lines[to]);
    if (!mark || mark.kind !== first.kind || mark.indent > first.indent + 1 || isRule(lines[to])) break;
    const { inside, end } = itemLines(lines, to, mark);
    loose ||= inside.some((line, i) => isBlank(line) && i < inside.length - 1);
    items.push(itemOf(inside, depth));
    const blanks = end;
    to = end;
    while (to < lines.length && isBlank(lines[to])) to += 1;
    const next = to < lines.length ? item(lines[to]) : null;
    if (!next || next.kind !== first.kind) {
      to = blanks;
      break;
    }
    loose ||= to > blanks;
  }
  return { type: "list", ordered: first.start !== null, start: first.start, loose, items, to };
}

function item(line) {
  const mark = ITEM.exec(line);
  if (!mark) return null;
  const [whole, space, bullet, after] = mark;
  const ordered = bullet.length > 1;
  const width = after.length > 4 || after === "" ? bullet.length + 1 : bullet.length + after.length;
  return {
    indent: columns(space),
    content: columns(space) + width,
    rest: after.length > 4 ? after.slice(1) + line.slice(whole.length) : line.slice(whole.length),
    kind: bullet[bullet.length - 1],
    start: ordered ? Number(bullet.slice(0, -1)) : null,
  };
}

// Models mix tabs and spaces: a tab counts as four columns.
function columns(space) {
  let count = 0;
  for (const character of space) count += character === "\t" ? 4 : 1;
  return count;
}

// The lines of an item: those indented below its mark, and those that continue its paragraph.
function itemLines(lines, at, mark) {
  const inside = [mark.rest];
  let to = at + 1;
  let end = to;
  let fenced = opensFence(mark.rest, null);
  while (to < lines.length) {
    const line = lines[to];
    const indent = columns(/^\s*/.exec(line)[0]);
    // Two columns are enough for what models write below "1. ".
    const below = indent >= Math.min(mark.content, mark.indent + 2);
    if (isBlank(line)) inside.push("");
    else if (below || (fenced && !item(line))) inside.push(dedent(line, mark.content));
    else if (!isBlank(lines[to - 1]) && !startsBlock(lines, to)) inside.push(line.trimStart());
    else break;
    fenced = opensFence(inside[inside.length - 1], fenced);
    to += 1;
    if (!isBlank(line)) end = to;
  }
  return { inside: inside.slice(0, end - at), end };
}

function opensFence(line, open) {
  const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line);
  if (!mark) return open;
  return open ? null : mark[1];
}

function dedent(line, width) {
  let at = 0;
  let seen = 0;
  while (at < line.length && seen < width && (line[at] === " " || line[at] === "\t")) {
    seen += line[at] === "\t" ? 4 : 1;
    at += 1;
  }
  return line.slice(at);
}

function itemOf(inside, depth) {
  const task = /^\[([ xX])\]\s+/.exec(inside[0] ?? "");
  const rest = task ? [inside[0].slice(task[0].length), ...inside.slice(1)] : inside;
  return { task: task ? task[1] !== " " : null, children: parse(rest, depth + 1) };
}

function table(lines, at) {
  const aligns = lines[at].includes("|") && at + 1 < lines.length ? delimiterRow(lines[at + 1]) : null;
  const head = aligns && cells(lines[at]);
  if (!aligns || aligns.length !== head.length) return null;
  const rows = [];
  let to = at + 2;
  while (to < lines.length && !isBlank(lines[to]) && lines[to].includes("|")) {
    const row = cells(lines[to]).slice(0, head.length);
    while (row.length < head.length) row.push("");
    rows.push(row.map((cell) => inlines(cell)));
    to += 1;
  }
  return { type: "table", aligns, head: head.map((cell) => inlines(cell)), rows, to };
}

function delimiterRow(line) {
  if (!line.includes("-") || !line.includes("|")) return null;
  const marks = cells(line);
  if (!marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  return marks.map((mark) => {
    if (mark.endsWith(":")) return mark.startsWith(":") ? "center" : "right";
    return mark.startsWith(":") ? "left" : null;
  });
}

// Bars in code and after a backslash separate no cells.
function cells(line) {
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  if (text.endsWith("|") && !text.endsWith("\\|")) text = text.slice(0, -1);
  const found = [];
  let cell = "";
  let code = false;
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|" && !code) {
      found.push(cell.trim());
      cell = "";
    } else {
      if (text[at] === "`") code = !code;
      cell += text[at];
    }
  }
  found.push(cell.trim());
  return found;
}

function startsBlock(lines, at) {
  const line = lines[at];
  return /^ {0,3}(`{3,}|~{3,}|#{1,6}(\s|$)|>)/.test(line) || isRule(line) || ITEM.test(line);
}

function paragraph(lines, at) {
  let to = at + 1;
  while (to < lines.length && !isBlank(lines[to]) && !startsBlock(lines, to) && !table(lines, to)) to += 1;
  const text = lines.slice(at, to).map((line) => line.trimStart()).join("\n").trimEnd();
  return { type: "paragraph", children: inlines(text), to };
}
