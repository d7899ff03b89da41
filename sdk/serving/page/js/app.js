// The page: its parts, and what they tell each other.

import { Announcer } from "./announcer.js";
import { ChatView } from "./chat_view.js";
import { Client } from "./client.js";
import { Connection } from "./connection.js";
import { Conversations } from "./conversations.js";
import { el, icon, setText, show } from "./dom.js";
import { KeyDialog } from "./key_dialog.js";
import { LiveView } from "./live_view.js";
import { Notices } from "./notices.js";
import { Panels } from "./panels.js";
import { SettingsView } from "./settings_view.js";
import { Sidebar } from "./sidebar.js";
import { Store, titleOf } from "./store.js";
import { Theme } from "./theme.js";
import { words } from "./words.js";

const BASE = new URL(".", document.baseURI);
const SHOW_BACK_MS = 5000;

class Page {
  constructor() {
    this.dialog = new KeyDialog();
    this.announcer = new Announcer();
    this.notices = new Notices();
    this.client = new Client(BASE, {
      askForKey: (refused) => this.dialog.ask({ needed: true, refused }),
      onGone: () => this.lost(),
    });
    this.connection = new Connection(() => this.client.answers(), (state) => this.showConnection(state));
    this.store = new Store((kind) => this.notices.tell(words.conversations[kind === "full" ? "full" : "noStorage"]));
    const { store, client, announcer, notices } = this;
    this.conversations = new Conversations({ store, client, announcer, notices, page: this });
    this.store.onChange = (id) => this.conversations.changedElsewhere(id);
    this.makeViews();
    document.body.append(...this.layout());
    this.makePanels();
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("pagehide", () => this.conversations.leave());
    setInterval(() => this.chat.tick(), 1000);
  }

  start() {
    this.route();
    this.changed();
    this.chat.input.focus();
    this.loadModels();
  }

  makeViews() {
    const all = this.conversations;
    this.chat = new ChatView(
      {
        send: (text, images) => all.send(text, images),
        tell: (text) => this.notices.tell(text),
        stop: () => all.stop(),
        clear: () => all.clear(),
        edit: (message, text) => all.edit(message, text),
        regenerate: (message) => this.then(() => all.regenerate(message)),
        results: (messages) => this.then(() => all.results(messages)),
      },
      this.notices.node,
    );
    this.sidebar = new Sidebar({
      create: () => this.openThen(() => all.create()),
      open: (id) => this.openThen(() => all.open(id)),
      remove: (id) => this.removeThen(id),
      removeAll: () => {
        all.removeAll();
        this.sidebar.focus(null);
      },
    });
    this.settings = new SettingsView(
      (settings) => all.setSettings(settings),
      (undo) => this.wasReset(undo),
    );
    this.live = new LiveView(this.client);
  }

  layout() {
    const said = words;
    this.listButton = button("menu", said.conversations.toggle);
    this.settingsButton = button("sliders", said.settings.toggle);
    for (const node of [this.listButton, this.settingsButton]) node.classList.add("chat-only");
    this.keyButton = button("key", said.key.button);
    this.keyButton.addEventListener("click", () => this.changeKey());
    this.model = el("select", { id: "model", onchange: () => this.conversations.setModel(this.model.value) });
    this.links = ["chat", "live"].map((name) => el("a", { href: `#${name}` }, said.views[name]));
    const header = el(
      "header",
      { class: "top" },
      this.listButton,
      el("h1", {}, said.title),
      el("nav", { class: "views", "aria-label": said.views.label }, this.links),
      el("div", { class: "model" }, el("label", { for: "model" }, said.model.label), this.model),
      el("div", { class: "tools" }, new Theme().button, this.keyButton, this.settingsButton),
    );
    this.list = el("div", { id: "conversations", class: "panel left" }, this.sidebar.node);
    this.side = el("aside", { id: "settings", class: "panel right", "aria-label": said.settings.label }, el("h2", {}, said.settings.label), this.settings.node);
    this.heading = el("h2", { class: "off-screen", tabindex: "-1" });
    this.main = el("main", { id: "main" }, this.heading, this.chat.node, this.live.node);
    this.status = el("span", {});
    this.tryNow = el("button", { type: "button", onclick: () => this.connection.tryNow() }, said.connection.tryNow);
    this.banner = el("div", { class: "banner", hidden: true }, this.status, this.tryNow);
    // Hidden nodes are no live regions: what is announced has its own.
    this.spoken = el("div", { class: "off-screen", role: "status" });
    const skip = el("a", { class: "skip", href: "#message", onclick: (event) => this.skip(event) }, said.skip);
    const columns = el("div", { class: "columns" }, this.list, this.main, this.side);
    return [skip, header, this.banner, this.spoken, columns, this.announcer.node, this.dialog.node];
  }

  makePanels() {
    this.panels = new Panels(this.main);
    const current = () => this.sidebar.focus(this.conversations.current.id);
    const first = () => this.side.querySelector("input").focus();
    this.panels.add(this.list, this.listButton, { open: true, focus: current });
    this.settingsPanel = this.panels.add(this.side, this.settingsButton, { open: false, focus: first });
  }

  // ---- what the parts tell ---------------------------------------------------------------------

  /** A conversation, or which one is shown, has changed. */
  changed() {
    const { current, busy, running, sees } = this.conversations;
    const other = this.shown !== current;
    if (other) {
      this.shown = current;
      this.chat.reset();
      this.settings.show(current.settings);
    }
    this.chat.show(current, busy, sees);
    this.sidebar.show(this.store.list(), current.id, (id) => running.has(id));
    this.showModels();
    const title = titleOf(current) || words.conversations.untitled;
    setText(this.heading, title);
    document.title = `${title} – ${words.title}`;
  }

  /** A message has grown: the page is drawn once per frame. */
  streamed(conversation, message) {
    if (conversation !== this.conversations.current || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (conversation !== this.conversations.current) return;
      if (message.running) this.chat.update(message);
      if (message.running && !message.schema) this.announcer.read(message.content, false);
    });
  }

  /** Whether the settings can be used; if not, the page says so. */
  settingsFine() {
    if (this.settings.valid) return true;
    this.panels.open(this.settingsPanel);
    this.notices.tell(words.settings.fix);
    this.settings.focusError();
    return false;
  }

  wasReset(undo) {
    this.notices.tell(words.settings.wasReset, undo);
    this.panels.uncover(); // the notice is below
  }

  // The button that was pressed is gone afterwards.
  then(action) {
    action();
    this.chat.input.focus();
  }

  openThen(action) {
    location.hash = "#chat";
    action();
    this.panels.uncover();
    this.chat.input.focus();
  }

  removeThen(id) {
    const ids = this.store.list().map((one) => one.id);
    const next = ids[ids.indexOf(id) + 1] ?? ids[ids.indexOf(id) - 1] ?? null;
    this.conversations.remove(id);
    this.sidebar.focus(next);
  }

  // ---- the server ------------------------------------------------------------------------------

  async loadModels() {
    try {
      this.conversations.setModels(await this.client.models());
    } catch (error) {
      if (error.kind !== "gone") this.notices.tell(error.message);
    }
  }

  showModels() {
    const { models, current } = this.conversations;
    const options = models.map(({ id, parent }) => [id, parent ? words.model.adapter(id, parent) : id]);
    if (current.model && !models.some(({ id }) => id === current.model)) {
      options.push([current.model, models.length ? words.model.gone(current.model) : current.model]);
    }
    if (options.length === 0) options.push(["", words.model.loading]);
    const state = JSON.stringify(options);
    if (state !== this.modelState) {
      this.modelState = state;
      this.model.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
    }
    this.model.value = current.model;
  }

  async changeKey() {
    const key = await this.dialog.ask({ stored: this.client.key !== "" });
    if (key === null) return;
    this.client.key = key;
    this.keyButton.focus();
    this.loadModels();
    this.live.restart();
  }

  lost() {
    this.connection.lost();
  }

  showConnection({ up, seconds }) {
    const text = up ? words.connection.back : seconds ? words.connection.down(seconds) : words.connection.trying;
    show(this.banner, true);
    this.banner.dataset.state = up ? "up" : "down";
    setText(this.status, text);
    show(this.tryNow, !up);
    setText(this.spoken, up ? words.connection.back : words.errors.gone); // not every second
    if (!up) return;
    this.loadModels();
    this.live.restart();
    setTimeout(() => show(this.banner, !this.connection.up), SHOW_BACK_MS);
  }

  // ---- views and keys --------------------------------------------------------------------------

  route() {
    const live = location.hash === "#live";
    document.body.dataset.view = live ? "live" : "chat";
    show(this.chat.node, !live);
    show(this.live.node, live);
    this.links.forEach((link, i) => {
      if ((i === 1) === live) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
    if (live) this.live.open();
    else this.live.close();
  }

  skip(event) {
    event.preventDefault();
    location.hash = "#chat";
    this.chat.input.focus();
  }

  key(event) {
    if (event.key === "Escape" && !event.defaultPrevented && !this.dialog.node.open && this.conversations.busy) this.chat.stop();
  }
}

function button(name, label) {
  return el("button", { type: "button", class: "quiet" }, icon(name), el("span", { class: "label" }, label));
}

new Page().start();
