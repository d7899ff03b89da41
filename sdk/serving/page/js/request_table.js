// Tables of requests: those that run or wait, and those that ended last.

import { el, setText, show } from "./dom.js";
import { duration, whole } from "./text.js";
import { words } from "./words.js";

const said = words.live;

/** The unfinished requests. `onSelect(id)`: one was chosen. */
export function unfinishedTable(onSelect) {
  const names = { ...said.columns };
  return new RequestTable({ title: said.requests, none: said.noRequests, names, cells: unfinishedCells, onSelect });
}

/** The requests that ended last. */
export function endedTable(onSelect) {
  return new RequestTable({ title: said.ended, none: said.noneEnded, names: said.endedColumns, cells: endedCells, onSelect });
}

const NUMBERS = new Set(["prompt", "computed", "generated", "pages", "age", "took"]);

class RequestTable {
  constructor({ title, none, names, cells, onSelect }) {
    this.onSelect = onSelect;
    this.cells = cells;
    this.names = Object.keys(names);
    this.rows = new Map(); // by the id of the request: the focus stays while numbers change
    this.body = el("tbody", {});
    const id = `requests-${this.names.length}`;
    const head = this.names.map((name) => el("th", { scope: "col", class: NUMBERS.has(name) && "number" }, names[name]));
    const table = el("table", { "aria-labelledby": id }, el("thead", {}, el("tr", {}, head)), this.body);
    this.scroller = el("div", { class: "table", tabindex: "0", role: "region", "aria-labelledby": id }, table);
    this.none = el("p", { class: "hint" }, none);
    this.more = el("p", { class: "hint" });
    this.node = el("section", { class: "card" }, el("h3", { id }, title), this.none, this.scroller, this.more);
  }

  update(requests, selected, more = 0) {
    const ids = new Set(requests.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    requests.forEach((request, i) => {
      const row = this.rows.get(request.id) ?? this.add(request.id);
      if (this.body.children[i] !== row.node) this.body.insertBefore(row.node, this.body.children[i] ?? null);
      row.button.setAttribute("aria-pressed", String(request.id === selected));
      row.node.classList.toggle("selected", request.id === selected);
      for (const [name, text] of Object.entries(this.cells(request))) setText(row.nodes[name], text);
      if (request.state) row.nodes.state.dataset.state = request.state;
    });
    show(this.none, requests.length === 0);
    show(this.scroller, requests.length > 0);
    setText(this.more, more ? said.more(more) : "");
  }

  add(id) {
    const nodes = Object.fromEntries(this.names.map((name) => [name, el("td", { class: NUMBERS.has(name) && "number" })]));
    const button = el("button", { type: "button", class: "link", "aria-label": said.showTimeline(id), onclick: () => this.onSelect(id) }, el("bdi", {}, id));
    nodes.id.append(button);
    const row = { node: el("tr", {}, Object.values(nodes)), nodes, button };
    this.rows.set(id, row);
    return row;
  }
}

function unfinishedCells(request) {
  return {
    state: said.states[request.state] ?? request.state,
    prompt: whole(request.prompt_tokens),
    computed: whole(request.computed_tokens),
    generated: whole(request.generated_tokens),
    pages: pagesText(request.pages),
    age: duration(request.age),
    tenant: request.tenant ?? "–",
    adapter: request.adapter ?? "–",
  };
}

function pagesText(pages) {
  const parts = Object.entries(pages).filter(([, count]) => count > 0);
  if (parts.length === 0) return "0";
  if (parts.length === 1) return whole(parts[0][1]);
  return parts.map(([type, count]) => `${said.pageTypes[type] ?? type}: ${whole(count)}`).join(", ");
}

function endedCells({ reasons, generated_tokens: generated, seconds }) {
  const known = reasons.filter(Boolean).map((reason) => said.reasons[reason] ?? reason);
  return {
    reason: known.length ? known.join(", ") : said.left,
    generated: generated === null ? "–" : whole(generated),
    took: duration(seconds),
  };
}
