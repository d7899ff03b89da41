// A Markdown text on the page. While it grows, only its last blocks are rendered again.

import { copyButton } from "./copy.js";
import { el } from "./dom.js";
import { blocks } from "./markdown.js";
import { words } from "./words.js";

const FIRST_LEVEL = 4; // headings of an answer are below the heading of its message (h3)

export class MarkdownView {
  constructor() {
    this.node = el("div", { class: "markdown" });
    this.text = "";
    this.settled = 0; // where the text of the blocks begins that may still change
    this.kept = 0; // nodes of the blocks before
  }

  update(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) this.settled = this.kept = 0;
    this.text = text;
    const rest = text.slice(this.settled);
    const found = blocks(rest);
    while (this.node.childNodes.length > this.kept) this.node.lastChild.remove();
    for (const block of found) this.node.append(blockNode(block));
    // The last block may grow, and a list before it may go on after a blank line.
    const stable = found.findLastIndex((block, i) => i < found.length - 1 && block.type !== "list");
    if (stable < 0 || found[stable + 1] === undefined) return;
    const lines = rest.split(/(?<=\r\n|\n|\r(?!\n))/);
    this.settled += lines.slice(0, found[stable + 1].from).join("").length;
    this.kept += stable + 1;
  }
}

function blockNode(block) {
  switch (block.type) {
    case "code":
      return codeNode(block);
    case "heading":
      return el(`h${Math.min(6, FIRST_LEVEL + block.level - 1)}`, { dir: "auto" }, inlineNodes(block.children));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, block.children.map(blockNode));
    case "list":
      return listNode(block);
    case "table":
      return tableNode(block);
    default:
      return el("p", { dir: "auto" }, inlineNodes(block.children));
  }
}

/** Code with its language and a button that copies it. */
export function codeNode({ language = "", text }) {
  const label = language ? words.code.of(language) : words.code.plain;
  // A region that scrolls must be reachable by keyboard.
  const code = el("pre", { tabindex: "0", role: "region", "aria-label": label }, el("code", {}, text));
  const bar = el("div", { class: "code-bar" }, el("span", { class: "language" }, language), copyButton(() => text));
  return el("div", { class: "code" }, bar, code);
}

function listNode({ ordered, start, loose, items }) {
  const nodes = items.map(({ task, children }) => {
    const inside = children.flatMap((child) =>
      !loose && child.type === "paragraph" ? inlineNodes(child.children) : [blockNode(child)],
    );
    if (task === null) return el("li", { dir: "auto" }, inside);
    const box = el("span", { class: "task", role: "img", "aria-label": words.task(task) }, task ? "☑" : "☐");
    return el("li", { class: "with-task", dir: "auto" }, box, " ", inside);
  });
  if (!ordered) return el("ul", {}, nodes);
  return el("ol", start === 1 ? {} : { start }, nodes);
}

function tableNode({ aligns, head, rows }) {
  const cell = (tag, nodes, i) => el(tag, { class: aligns[i] && `align-${aligns[i]}`, dir: "auto" }, inlineNodes(nodes));
  const top = el("tr", {}, head.map((nodes, i) => cell("th", nodes, i)));
  const body = rows.map((row) => el("tr", {}, row.map((nodes, i) => cell("td", nodes, i))));
  const table = el("table", {}, el("thead", {}, top), el("tbody", {}, body));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": words.table }, table);
}

const TAGS = { strong: "strong", em: "em", strike: "del" };

function inlineNodes(nodes) {
  return nodes.map((node) => {
    switch (node.type) {
      case "text":
        return node.text;
      case "code":
        return el("code", {}, node.text);
      case "math":
        return el("span", { class: "math" }, node.text);
      case "break":
        return el("br");
      case "link":
        return linkNode(node.href, inlineNodes(node.children));
      case "image":
        // Not loaded: an address that a model wrote could carry the conversation away.
        return linkNode(node.href, [words.image(node.text || node.href)]);
      default:
        return el(TAGS[node.type], {}, inlineNodes(node.children));
    }
  });
}

const SAFE = ["http:", "https:", "mailto:"];

/** The address if a link may lead there, or null. Relative addresses would lead to this server. */
export function safeAddress(href) {
  try {
    const url = new URL(href);
    return SAFE.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function linkNode(href, children) {
  const address = safeAddress(href);
  if (!address) return el("span", {}, children, href ? ` (${href})` : "");
  const safe = { rel: "noopener noreferrer nofollow", target: "_blank", referrerpolicy: "no-referrer" };
  return el("a", { href: address, title: address, ...safe }, children);
}
