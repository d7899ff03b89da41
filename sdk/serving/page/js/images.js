// Images for the next message: chosen, dropped or pasted, shown small, and removed again.

import { el, icon, show } from "./dom.js";
import { words } from "./words.js";

const said = words.images;
const MAX_SIDE = 2048; // pixels: the towers of models read less
const MAX_BYTES = 2 ** 19; // a file below this is sent as it is; a server takes 4 MiB by default
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SHOWN = /^data:image\/[a-z.+-]{1,20};base64,[A-Za-z0-9+/=]+$/;

export class ImagePicker {
  /** `tell(text)`: says what went wrong; `focus()`: where the focus goes when a button is gone. */
  constructor(tell, focus) {
    this.tell = tell;
    this.focus = focus;
    this.images = [];
    this.allowed = false;
    this.file = el("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => this.chosen() });
    this.button = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.file.click() }, icon("image"), said.add);
    this.node = el("ul", { class: "images", "aria-label": said.label, hidden: true });
    this.spoken = el("div", { class: "off-screen", role: "status" });
  }

  /** Whether the model reads images. */
  allow(allowed) {
    this.allowed = allowed;
    show(this.button, allowed);
  }

  /** What was chosen so far; nothing is left. */
  take() {
    const { images } = this;
    this.images = [];
    this.draw();
    return images;
  }

  /** The images among what was dropped or pasted are added. Whether there were any. */
  addFrom(transfer) {
    const files = [...(transfer?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
    if (files.length === 0) return false;
    if (this.allowed) this.add(files);
    else this.tell(said.textOnly);
    return true;
  }

  async chosen() {
    const files = [...this.file.files];
    this.file.value = ""; // the same file may be chosen again
    await this.add(files);
    this.focus();
  }

  async add(files) {
    for (const file of files) {
      try {
        this.images.push({ name: file.name || said.pasted, url: await dataUrl(file) });
        this.spoken.textContent = said.added(file.name || said.pasted);
      } catch {
        this.tell(said.broken(file.name || said.pasted));
      }
    }
    this.draw();
  }

  remove(image) {
    this.images = this.images.filter((one) => one !== image);
    this.spoken.textContent = said.removed(image.name);
    this.draw();
    this.focus();
  }

  draw() {
    const items = this.images.map((image) =>
      el(
        "li",
        {},
        imageNode(image),
        el("button", { type: "button", class: "quiet", "aria-label": said.remove(image.name), onclick: () => this.remove(image) }, icon("close")),
      ),
    );
    this.node.replaceChildren(...items);
    show(this.node, items.length > 0);
  }
}

/** A picture of an image of a message. */
export function imageNode({ name, url }) {
  return el("img", { src: url, alt: name, title: name });
}

/** The images of a message from the storage; what is none is left out. */
export function cleanImages(value) {
  if (!Array.isArray(value)) return [];
  const known = value.filter((one) => typeof one?.url === "string" && SHOWN.test(one.url));
  return known.map(({ name, url }) => ({ name: String(name ?? said.pasted), url }));
}

/** The file as a data URL; a large one, or one of another type, as a smaller JPEG. */
async function dataUrl(file) {
  const bitmap = await createImageBitmap(file); // fails if it is no image
  const { width, height } = bitmap;
  if (file.size <= MAX_BYTES && TYPES.includes(file.type)) {
    bitmap.close();
    return await read(file);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  const canvas = el("canvas", { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // as the server does: JPEG has no opacity
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
