// Copying to the clipboard, also where the page has no secure context (plain HTTP from another machine).

import { el } from "./dom.js";
import { words } from "./words.js";

/** Whether the text is in the clipboard now. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const before = document.activeElement;
    const box = el("textarea", { class: "off-screen", readonly: true, "aria-hidden": "true" });
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    before?.focus();
    return done;
  }
}

const SHOWN_MS = 2000;

/** A button that copies what `text()` returns, and says so in its own words. */
export function copyButton(text, label = words.copy.label) {
  const button = el("button", { type: "button", class: "quiet" }, label);
  const said = el("span", { class: "off-screen", role: "status" });
  button.addEventListener("click", async () => {
    const result = (await copy(text())) ? words.copy.done : words.copy.failed;
    button.textContent = said.textContent = result;
    setTimeout(() => {
      button.textContent = label;
      said.textContent = "";
    }, SHOWN_MS);
  });
  return el("span", {}, button, said);
}
