// The panels at both sides of the page: beside it where there is room, over it where there is not.

import { show } from "./dom.js";

const NARROW = matchMedia("(max-width: 62rem)"); // as in base.css

export class Panels {
  /** `behind`: the part of the page that an open panel covers on a narrow screen. */
  constructor(behind) {
    this.behind = behind;
    this.all = [];
    NARROW.addEventListener("change", () => this.update());
  }

  /** A panel and the button that opens it. `open`: where there is room. `focus()`: into the panel. */
  add(node, button, { open, focus }) {
    const panel = { node, button, focus, wide: open, over: false };
    this.all.push(panel);
    button.setAttribute("aria-controls", node.id);
    button.addEventListener("click", () => {
      if (isOpen(panel)) return this.close(panel);
      this.open(panel);
      return panel.focus();
    });
    node.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !NARROW.matches) return;
      event.preventDefault(); // it would also stop an answer
      this.close(panel);
    });
    this.update();
    return panel;
  }

  /** Opens a panel, without moving the focus. Only one can cover a narrow page. */
  open(panel) {
    if (NARROW.matches) for (const one of this.all) one.over = one === panel;
    else panel.wide = true;
    this.update();
  }

  close(panel) {
    if (NARROW.matches) panel.over = false;
    else panel.wide = false;
    this.update();
    panel.button.focus();
  }

  /** Uncovers the page, where a panel covers it. */
  uncover() {
    for (const one of this.all) one.over = false;
    this.update();
  }

  update() {
    for (const panel of this.all) {
      show(panel.node, isOpen(panel));
      panel.button.setAttribute("aria-expanded", String(isOpen(panel)));
    }
    this.behind.inert = NARROW.matches && this.all.some(({ over }) => over);
  }
}

const isOpen = (panel) => (NARROW.matches ? panel.over : panel.wide);
