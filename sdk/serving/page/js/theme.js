// Light or dark colors: as the system has them, or as chosen here.

import { el, icon } from "./dom.js";
import { words } from "./words.js";

const NAME = "embedlm.theme";
const ORDER = ["auto", "light", "dark"];

export class Theme {
  constructor() {
    this.value = this.stored();
    this.button = el("button", { type: "button", class: "quiet icon-only", onclick: () => this.next() });
    this.apply();
  }

  stored() {
    try {
      const value = localStorage.getItem(NAME);
      return ORDER.includes(value) ? value : "auto";
    } catch {
      return "auto";
    }
  }

  next() {
    this.value = ORDER[(ORDER.indexOf(this.value) + 1) % ORDER.length];
    try {
      localStorage.setItem(NAME, this.value);
    } catch {
      // without storage the choice lasts until the page is left
    }
    this.apply();
  }

  apply() {
    document.documentElement.dataset.theme = this.value;
    this.button.replaceChildren(icon(this.value));
    this.button.setAttribute("aria-label", words.theme[this.value]);
    this.button.title = words.theme[this.value];
  }
}
