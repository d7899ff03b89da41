// What happens to conversations: asking, stopping, editing, deleting, and undoing that.

import { Asking } from "./asking.js";
import { words } from "./words.js";
import { statsOf } from "./message_view.js";

const SAVE_MS = 1000; // while an answer is streamed

export class Conversations {
  /** `page`: `changed()`, `streamed(message)`, `problem(text)`, `settingsWrong()`. */
  constructor({ store, client, announcer, notices, page }) {
    Object.assign(this, { store, client, announcer, notices, page });
    this.running = new Map(); // Asking by the id of its conversation
    this.models = [];
    this.current = store.list()[0] ?? store.create("");
  }

  get busy() {
    return this.running.has(this.current.id);
  }

  /** The models of the server have been listed. A conversation without one gets the first. */
  setModels(models) {
    this.models = models;
    if (!this.current.model) this.current.model = this.newModel();
    this.page.changed();
  }

  /** Whether the model of the conversation reads images. */
  get sees() {
    return this.models.some(({ id, sees }) => sees && id === this.current.model);
  }

  newModel() {
    const known = new Set(this.models.map(({ id }) => id));
    const last = this.store.list().find(({ model }) => known.has(model));
    return last?.model ?? this.models[0]?.id ?? "";
  }

  setModel(model) {
    this.current.model = model;
    this.saveIfKept();
    this.page.changed();
  }

  setSettings(settings) {
    this.current.settings = settings;
    this.store.saveSettings(settings);
    this.saveIfKept();
  }

  saveIfKept() {
    if (this.current.messages.length) this.store.save(this.current, { touch: false });
  }

  create() {
    this.current = this.store.create(this.newModel());
    this.page.changed();
  }

  open(id) {
    this.current = this.store.get(id) ?? this.current;
    this.page.changed();
  }

  /** Asks with one more message of the user. Whether it could. */
  send(text, images = []) {
    if (!this.current.model) {
      this.notices.tell(words.chat.noModel);
      return false;
    }
    if (!this.page.settingsFine()) return false;
    this.notices.clear();
    this.current.messages.push(said(text, images));
    this.ask();
    return true;
  }

  /** Asks with the results of tools. */
  results(messages) {
    this.current.messages.push(...messages);
    this.ask();
  }

  edit(message, text) {
    this.replaceFrom(message, [said(text, message.images)], words.chat.edited);
  }

  regenerate(message) {
    this.replaceFrom(message, [], words.chat.regenerated);
  }

  replaceFrom(message, replacement, said) {
    if (this.busy || !this.page.settingsFine()) return;
    const { current } = this;
    const before = current.messages;
    const at = before.indexOf(message);
    const lost = before.slice(at).some((one) => one.role !== "assistant" || one.content || one.tool_calls?.length);
    current.messages = [...before.slice(0, at), ...replacement];
    if (lost) this.notices.tell(said, () => this.restore(current, before));
    else this.notices.clear();
    this.ask();
  }

  clear() {
    const { current } = this;
    const before = current.messages;
    current.messages = [];
    this.store.remove(current.id);
    this.notices.tell(words.chat.cleared, () => this.restore(current, before));
    this.page.changed();
  }

  restore(conversation, messages) {
    this.running.get(conversation.id)?.stop();
    conversation.messages = messages;
    this.store.save(conversation);
    this.current = conversation;
    this.page.changed();
  }

  remove(id) {
    const removed = this.store.get(id);
    this.forget([removed]);
    this.notices.tell(words.conversations.removed, () => this.bringBack([removed]));
  }

  removeAll() {
    const removed = this.store.list();
    this.forget(removed);
    this.notices.tell(words.conversations.removedAll, () => this.bringBack(removed));
  }

  forget(removed) {
    for (const one of removed) {
      this.running.get(one.id)?.stop();
      this.store.remove(one.id);
    }
    if (removed.includes(this.current)) this.current = this.store.list()[0] ?? this.store.create(this.newModel());
    this.page.changed();
  }

  bringBack(removed) {
    for (const one of removed) this.store.save(one, { touch: false });
    [this.current] = removed;
    this.page.changed();
  }

  /** Another tab has changed a conversation. */
  changedElsewhere(id) {
    if (this.running.has(id)) return;
    if (this.current.id === id) this.current = this.store.get(id) ?? this.store.create(this.newModel());
    this.page.changed();
  }

  stop() {
    this.running.get(this.current.id)?.stop();
  }

  /** The page is closed or left: there is no time for more than saving. */
  leave() {
    for (const asking of this.running.values()) {
      asking.leave();
      this.saveRunning(asking.conversation, asking);
    }
    this.saveIfKept();
  }

  async ask() {
    const conversation = this.current;
    const asking = new Asking(this.client, conversation);
    this.running.set(conversation.id, asking);
    let saved = performance.now();
    const ended = asking.run(() => {
      this.page.streamed(conversation, asking.message);
      if (performance.now() - saved < SAVE_MS) return;
      saved = performance.now();
      this.saveRunning(conversation, asking);
    });
    this.store.save(conversation);
    this.announcer.begin();
    this.announcer.say(words.announce.started);
    this.page.changed();
    await ended;
    if (this.running.get(conversation.id) === asking) this.running.delete(conversation.id);
    this.saveRunning(conversation, asking);
    if (conversation === this.current) this.announceEnd(asking.message);
    this.page.changed();
  }

  // Not if the conversation was deleted, or the answer undone, meanwhile.
  saveRunning(conversation, { message }) {
    if (this.store.get(conversation.id) === conversation && conversation.messages.includes(message)) {
      this.store.save(conversation);
    }
  }

  announceEnd(message) {
    if (!message.schema) this.announcer.read(message.content, true);
    if (message.error) this.announcer.say(words.announce.failed(message.error.text));
    else if (message.stopped) this.announcer.say(words.announce.stopped);
    else if (message.tool_calls.length) this.announcer.say(words.announce.calls(message.tool_calls.map(({ name }) => name)));
    else this.announcer.say(words.announce.finished(statsOf(message)));
  }
}

function said(text, images = []) {
  return images.length ? { role: "user", content: text, images } : { role: "user", content: text };
}
