// The live view: what the server does now. It is connected only while somebody looks.

import { PartsBar, Tile } from "./charts.js";
import { el, setText, show } from "./dom.js";
import { History, SPAN } from "./live_model.js";
import { endedTable, unfinishedTable } from "./request_table.js";
import { duration, percent, short, whole } from "./text.js";
import { endedTimeline, seenTimeline, TimelineView } from "./timeline_view.js";
import { words } from "./words.js";

const said = words.live;

export class LiveView {
  constructor(client) {
    this.client = client;
    this.histories = new Map();
    this.abort = null;
    this.looked = false;
    this.paused = false;
    this.chosen = "";
    this.selected = null;
    this.makeParts();
    addEventListener("visibilitychange", () => this.connect());
  }

  makeParts() {
    this.pause = el("button", { type: "button", onclick: () => this.toggle() }, said.pause);
    this.state = el("p", { class: "hint" });
    this.models = el("select", { id: "live-model", onchange: () => this.choose(this.models.value) });
    this.modelField = el("div", { class: "field" }, el("label", { for: "live-model" }, said.model), this.models);
    this.tiles = {
      speed: new Tile(said.speed, short),
      prefill: new Tile(said.prefill, short),
      running: new Tile(said.running, whole),
      waiting: new Tile(said.waiting, whole),
      kv: new Tile(said.kv, percent, { top: 1 }),
      ttft: new Tile(said.ttft, duration, { chart: false }),
      itl: new Tile(said.itl, duration, { chart: false }),
      hits: new Tile(said.hitRate, percent, { top: 1 }),
      preemptions: new Tile(said.preemptions, whole),
    };
    this.pages = new PartsBar(said.pages);
    this.timeline = new TimelineView();
    this.unfinished = unfinishedTable((id) => this.select(id));
    this.ended = endedTable((id) => this.select(id));
    const tiles = el("div", { class: "tiles" }, Object.values(this.tiles).map(({ node }) => node));
    this.body = el("div", { class: "live-body", hidden: true }, tiles, this.pages.node, this.unfinished.node, this.ended.node, this.timeline.node);
    this.node = el(
      "div",
      { class: "live", tabindex: "0", role: "region", "aria-label": said.label },
      el("div", { class: "bar" }, this.modelField, this.pause, this.state),
      this.body,
    );
  }

  open() {
    this.looked = true;
    this.connect();
  }

  close() {
    this.looked = false;
    this.connect();
  }

  /** After another key, or when the server is back. */
  restart() {
    this.abort?.abort();
    this.abort = null;
    this.connect();
  }

  toggle() {
    this.paused = !this.paused;
    setText(this.pause, this.paused ? said.resume : said.pause);
    if (this.paused) this.tell(said.paused);
    this.connect();
  }

  // A hidden tab costs the server nothing.
  connect() {
    const wanted = this.looked && !this.paused && !document.hidden;
    if (wanted === Boolean(this.abort)) return;
    if (wanted) {
      this.abort = new AbortController();
      this.run(this.abort);
    } else {
      this.abort.abort();
      this.abort = null;
    }
  }

  async run(abort) {
    this.tell(said.connecting);
    try {
      for await (const state of this.client.live(abort.signal)) this.add(state);
      if (!abort.signal.aborted) setTimeout(() => abort === this.abort && this.restart(), 1000);
    } catch (error) {
      if (abort.signal.aborted) return;
      const refused = error.kind === "key" || error.kind === "forbidden";
      this.tell(said.stopped(refused ? said.noRole : error.message));
      // When the server is back, the page calls restart().
      if (error.kind === "busy") setTimeout(() => abort === this.abort && this.restart(), 1000 * (error.retryAfter ?? 5));
    }
  }

  tell(text) {
    setText(this.state, text);
  }

  add({ time, models }) {
    for (const model of models.filter(isReady)) {
      if (!this.histories.has(model.name)) this.histories.set(model.name, new History());
      this.histories.get(model.name).add(time, model);
    }
    this.last = { time, models };
    this.draw();
  }

  choose(name) {
    this.chosen = name;
    this.selected = null;
    this.draw();
  }

  select(id) {
    this.selected = id;
    this.draw();
  }

  draw() {
    const { models, time } = this.last;
    this.listModels(models.map(({ name }) => name));
    const model = models.find(({ name }) => name === this.chosen) ?? models[0];
    show(this.body, isReady(model));
    this.tell(isReady(model) ? "" : said.notReady(model.name, model.state));
    if (!isReady(model)) return;
    const history = this.histories.get(model.name);
    for (const [name, tile] of Object.entries(this.tiles)) {
      tile.update(history.now(name), history.points(name), SPAN, this.note(name, history));
    }
    this.pages.update(pageParts(model.metrics));
    this.unfinished.update(model.requests, this.selected, model.more);
    this.ended.update(model.ended, this.selected);
    this.timeline.update(this.timelineOf(model, history, time));
  }

  // What the engine says is exact; it says so when a request has ended.
  timelineOf({ ended }, history, time) {
    const exact = ended.find(({ id }) => id === this.selected);
    if (exact) return endedTimeline(exact);
    const seen = history.requests.get(this.selected);
    return seen ? seenTimeline(seen, time) : null;
  }

  note(name, history) {
    if (name === "ttft" || name === "itl") return said.latency(history.metric(`${name}_p95`), history.metric(`${name}_p99`));
    if (name === "preemptions") return `${whole(history.growth("num_preemptions"))} in the ${said.last(SPAN)}`;
    if (name === "hits") return said.since;
    return "";
  }

  listModels(names) {
    const state = JSON.stringify(names);
    if (state !== this.listed) {
      this.listed = state;
      this.models.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
      show(this.modelField, names.length > 1);
    }
    if (names.includes(this.chosen)) this.models.value = this.chosen;
  }
}

const isReady = ({ state }) => state === "ready";

// Pages by type where a kv_policy has several types; else by use.
function pageParts(metrics) {
  const total = metrics.num_pages || 1;
  const used = metrics.num_pages_used ?? 0;
  const cached = metrics.num_pages_cached ?? 0;
  const types = ["16bit", "8bit", "4bit"].filter((type) => metrics[`num_pages_${type}`] !== undefined);
  const counts = types.length
    ? types.map((type) => [type, metrics[`num_pages_${type}`]])
    : [["used", used], ["cached", cached]];
  const rest = total - counts.reduce((sum, [, count]) => sum + count, 0);
  counts.push(["free", Math.max(0, rest)]);
  const parts = counts.map(([kind, count]) => [kind, `${said.pageTypes[kind]}: ${whole(count)}`, count / total]);
  if (metrics.swap_pages_used) parts.push(["swap", `${said.pageTypes.swap}: ${whole(metrics.swap_pages_used)}`, 0]);
  return parts;
}

