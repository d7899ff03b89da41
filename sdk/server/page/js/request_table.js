// The running and waiting requests.

import { el, setText, show } from "./dom.js";
import { duration, whole } from "./text.js";
import { words } from "./words.js";

const said = words.live;
const COLUMNS = ["id", "state", "prompt", "computed", "generated", "pages", "age", "tenant", "adapter"];
const NUMBERS = ["prompt", "computed", "generated", "pages", "age"];

export class RequestTable {
  /** `onSelect(id)`: a request was chosen. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.rows = new Map(); // nodes of a row by the id of its request: the focus stays while numbers change
    this.body = el("tbody", {});
    const head = COLUMNS.map((name) => el("th", { scope: "col", class: NUMBERS.includes(name) && "number" }, said.columns[name]));
    const title = el("h3", { id: "requests" }, said.requests);
    this.table = el("table", { "aria-labelledby": "requests" }, el("thead", {}, el("tr", {}, head)), this.body);
    this.scroller = el("div", { class: "table", tabindex: "0", role: "region", "aria-labelledby": "requests" }, this.table);
    this.none = el("p", { class: "hint" }, said.noRequests);
    this.more = el("p", { class: "hint" });
    this.node = el("section", { class: "card" }, title, this.none, this.scroller, this.more);
  }

  update({ requests, more }, selected) {
    const ids = new Set(requests.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    requests.forEach((request, i) => {
      const row = this.rows.get(request.id) ?? this.add(request.id);
      if (this.body.children[i] !== row.node) this.body.insertBefore(row.node, this.body.children[i] ?? null);
      this.fill(row, request, request.id === selected);
    });
    show(this.none, requests.length === 0);
    show(this.scroller, requests.length > 0);
    setText(this.more, more ? said.more(more) : "");
  }

  add(id) {
    const cells = Object.fromEntries(COLUMNS.map((name) => [name, el("td", { class: NUMBERS.includes(name) && "number" })]));
    const button = el("button", { type: "button", class: "link", "aria-label": said.showTimeline(id), onclick: () => this.onSelect(id) }, el("bdi", {}, id));
    cells.id.append(button);
    const row = { node: el("tr", {}, Object.values(cells)), cells, button };
    this.rows.set(id, row);
    return row;
  }

  fill({ cells, button, node }, request, selected) {
    button.setAttribute("aria-pressed", String(selected));
    node.classList.toggle("selected", selected);
    setText(cells.state, said.states[request.state] ?? request.state);
    cells.state.dataset.state = request.state;
    setText(cells.tenant, request.tenant ?? "–");
    setText(cells.adapter, request.adapter ?? "–");
    setText(cells.prompt, whole(request.prompt_tokens));
    setText(cells.computed, whole(request.computed_tokens));
    setText(cells.generated, whole(request.generated_tokens));
    setText(cells.pages, pagesText(request.pages));
    setText(cells.age, duration(request.age));
  }
}

function pagesText(pages) {
  const parts = Object.entries(pages ?? {}).filter(([, count]) => count > 0);
  if (parts.length === 0) return "0";
  if (parts.length === 1) return whole(parts[0][1]);
  return parts.map(([type, count]) => `${said.pageTypes[type] ?? type}: ${whole(count)}`).join(", ");
}
