// The timeline of one request: a bar of its phases, and a table of what happened when.

import { el, setText, svg } from "./dom.js";
import { duration } from "./text.js";
import { words } from "./words.js";

const WIDTH = 600;
const HEIGHT = 24;
const said = words.live;

export class TimelineView {
  constructor() {
    this.title = el("h3", { id: "timeline" });
    this.bar = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "phases", "aria-hidden": "true" });
    this.rows = el("tbody", {});
    const head = el("tr", {}, el("th", { scope: "col", class: "number" }, said.at), el("th", { scope: "col" }, said.whatHappened));
    this.table = el("table", { "aria-labelledby": "timeline" }, el("thead", {}, head), this.rows);
    this.hint = el("p", { class: "hint" }, said.timelineHint);
    this.body = el("div", { hidden: true }, this.title, this.bar, this.table);
    this.node = el("section", { class: "card timeline" }, this.hint, this.body);
  }

  /** `timeline`: `{id, length, phases: [{state, from}], rows: [[seconds, text]]}`, or null. */
  update(timeline) {
    this.hint.hidden = timeline !== null;
    this.body.hidden = timeline === null;
    if (timeline === null) return;
    const { id, length, phases, rows } = timeline;
    setText(this.title, said.timeline(id));
    const place = (seconds) => (WIDTH * seconds) / Math.max(length, 1e-6);
    this.bar.replaceChildren(
      ...phases.map(({ state, from }, i) => {
        const width = place(phases[i + 1]?.from ?? length) - place(from);
        return svg("rect", { x: place(from).toFixed(1), y: 0, width: Math.max(1, width).toFixed(1), height: HEIGHT, "data-state": state });
      }),
    );
    const now = JSON.stringify(rows);
    if (now === this.shown) return;
    this.shown = now;
    this.rows.replaceChildren(...rows.map(([at, text]) => el("tr", {}, el("td", { class: "number" }, duration(at)), el("td", {}, text))));
  }
}

/** The timeline of a request that runs, from its states as they were seen twice a second. */
export function seenTimeline(request, now) {
  const phases = request.phases.map(({ state, from }) => ({ state, from: from - request.began }));
  const rows = phases.map(({ state, from }) => [from, said.states[state] ?? state]);
  return { id: request.id, length: (request.ended ?? now) - request.began, phases, rows };
}

// The phase that an event begins.
const PHASES = { queued: "waiting", admitted: "prefill", first_token: "decoding", preempted: "preempted", resumed: "prefill" };

/** The timeline of a request that has ended, from the events of the engine. */
export function endedTimeline({ id, seconds, events }) {
  const phases = [];
  let decoding = false;
  for (const { kind, at, seconds: lasted = 0 } of events) {
    if (PHASES[kind]) phases.push({ state: PHASES[kind], from: at });
    // After a preemption decoding goes on when what was lost is computed again.
    if (kind === "first_token") decoding = true;
    if (kind === "prefill" && decoding) phases.push({ state: "decoding", from: at + lasted });
  }
  const rows = events.map((event) => [event.at, textOf(event)]);
  return { id, length: seconds, phases, rows };
}

function textOf(event) {
  const text = said.event[event.kind]?.(event) ?? event.kind;
  return event.answer ? said.ofAnswer(text, event.answer) : text;
}
