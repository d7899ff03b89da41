// The phases of one request: a bar, and a table with the same numbers.

import { el, setText, svg } from "./dom.js";
import { duration } from "./text.js";
import { words } from "./words.js";

const WIDTH = 600;
const HEIGHT = 24;
const said = words.live;

export class TimelineView {
  constructor() {
    this.title = el("h3", {});
    this.bar = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "phases", "aria-hidden": "true" });
    this.rows = el("tbody", {});
    const head = [said.phase, said.from, said.lasted].map((text) => el("th", { scope: "col" }, text));
    this.table = el("table", {}, el("caption", { class: "off-screen" }, said.timelineOf), el("thead", {}, el("tr", {}, head)), this.rows);
    this.hint = el("p", { class: "hint" }, said.timelineHint);
    this.node = el("section", { class: "card timeline" }, this.title, this.hint, this.bar, this.table);
    this.update(null, 0);
  }

  /** `request`: what the history knows of it, or null. */
  update(request, now) {
    for (const node of [this.bar, this.table]) node.classList.toggle("gone", request === null);
    this.hint.hidden = request !== null;
    setText(this.title, request ? said.timeline(request.id) : said.timeline("…"));
    this.title.hidden = request === null;
    if (request === null) return;
    const end = request.ended ?? now;
    const spans = request.phases.map(({ state, from }, i) => ({ state, from, to: request.phases[i + 1]?.from ?? end }));
    const whole = Math.max(end - request.began, 1e-3);
    const place = (time) => (WIDTH * (time - request.began)) / whole;
    this.bar.replaceChildren(
      ...spans.map(({ state, from, to }) =>
        svg("rect", { x: place(from).toFixed(1), y: 0, width: Math.max(1, place(to) - place(from)).toFixed(1), height: HEIGHT, "data-state": state }),
      ),
    );
    const rows = spans.map(({ state, from, to }) => [said.states[state] ?? state, duration(from - request.began), duration(to - from)]);
    if (request.ended) rows.push([said.states.finished, duration(request.ended - request.began), ""]);
    this.rows.replaceChildren(...rows.map((row) => el("tr", {}, row.map((text) => el("td", {}, text)))));
  }
}
