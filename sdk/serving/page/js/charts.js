// Small charts in SVG.

import { el, setText, svg } from "./dom.js";
import { words } from "./words.js";

const WIDTH = 240;
const HEIGHT = 48;

/** A number, its name, and its course over the last minutes. */
export class Tile {
  /** `format(value)`: the text of a value. `top`: the end of the scale, or null for the highest. */
  constructor(name, format, { top = null, chart = true } = {}) {
    this.name = name;
    this.format = format;
    this.top = top;
    this.value = el("dd", {});
    this.note = el("dd", { class: "hint" });
    this.area = svg("polygon", { class: "area" });
    this.line = svg("polyline", { class: "line" });
    this.chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.area, this.line);
    this.node = el("div", { class: "tile" }, el("dl", {}, el("dt", {}, name), this.value, this.note), chart && this.chart);
  }

  /** `points`: `[seconds before now, value]`, oldest first; a value may be null. */
  update(value, points, span, note = "") {
    const text = value === null ? "–" : this.format(value);
    setText(this.value, text);
    setText(this.note, note);
    const known = points.filter(([, one]) => one !== null);
    const values = known.map(([, one]) => one);
    const highest = Math.max(...values, 0);
    const scale = this.top ?? (highest || 1);
    const corner = ([ago, one]) => [WIDTH * (1 - ago / span), HEIGHT - 2 - (HEIGHT - 4) * Math.min(1, one / scale)];
    const corners = known.map(corner);
    const line = corners.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
    this.line.setAttribute("points", line);
    const [left] = corners[0] ?? [0];
    const [right] = corners[corners.length - 1] ?? [0];
    this.area.setAttribute("points", line ? `${left.toFixed(1)},${HEIGHT} ${line} ${right.toFixed(1)},${HEIGHT}` : "");
    const lowest = values.length ? Math.min(...values) : 0;
    this.chart.setAttribute("aria-label", words.live.chart(this.name, text, this.format(lowest), this.format(highest)));
  }
}

/** Parts of a whole as one bar with a legend. */
export class PartsBar {
  constructor(title) {
    this.title = el("h3", {}, title);
    this.bar = el("div", { class: "parts", "aria-hidden": "true" }); // the legend has the numbers
    this.legend = el("ul", { class: "legend" });
    this.node = el("section", { class: "card" }, this.title, this.bar, this.legend);
  }

  /** `parts`: `[kind, text, share]` with shares that sum up to at most 1. */
  update(parts) {
    const kinds = parts.map(([kind]) => kind).join();
    if (kinds !== this.kinds) {
      this.kinds = kinds;
      this.pieces = parts.map(([kind]) => el("div", { "data-kind": kind }));
      this.texts = parts.map(() => el("span", {}));
      this.bar.replaceChildren(...this.pieces);
      this.legend.replaceChildren(
        ...parts.map(([kind], i) => el("li", {}, el("span", { class: "swatch", "data-kind": kind, "aria-hidden": "true" }), this.texts[i])),
      );
    }
    parts.forEach(([, text, share], i) => {
      this.pieces[i].style.flexGrow = String(Math.max(0, share)); // an attribute would need 'unsafe-inline'
      setText(this.texts[i], text);
    });
  }
}
