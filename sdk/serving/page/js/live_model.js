// What the live view knows: states of the server over the last minutes.

export const SPAN = 120; // seconds

/** The course of one model. */
export class History {
  constructor() {
    this.samples = []; // {time, metrics, values}
    this.requests = new Map(); // what was seen of each request
  }

  /** One state of the model, at `time` in seconds. */
  add(time, { metrics, requests }) {
    const before = this.samples[this.samples.length - 1];
    // A counter that fell or a clock that went back: the server is another one.
    if (before && (time <= before.time || metrics.num_steps < before.metrics.num_steps)) {
      this.samples = [];
      this.requests.clear();
    }
    this.samples.push({ time, metrics, values: values(metrics) });
    while (this.samples[0].time < time - SPAN) this.samples.shift();
    this.follow(time, requests);
  }

  /** `[seconds before now, value]` of one value. */
  points(name) {
    const { time } = this.samples[this.samples.length - 1];
    return this.samples.map((sample) => [time - sample.time, sample.values[name] ?? null]);
  }

  /** A value now. */
  now(name) {
    return this.samples[this.samples.length - 1]?.values[name] ?? null;
  }

  /** A metric of the engine now. */
  metric(name) {
    return this.samples[this.samples.length - 1].metrics[name];
  }

  /** How much a counter grew over the last minutes. */
  growth(name) {
    const first = this.samples[0].metrics[name];
    return this.samples[this.samples.length - 1].metrics[name] - first;
  }

  // The phases of each request as they were seen; those that ended stay for the span.
  follow(time, requests) {
    const here = new Set();
    for (const one of requests) {
      here.add(one.id);
      const known = this.requests.get(one.id) ?? { began: time - one.age, phases: [] };
      this.requests.set(one.id, { ...known, ...one, seen: time, phases: phases(known, one, time) });
    }
    for (const [id, known] of this.requests) {
      if (here.has(id)) continue;
      if (!known.ended) known.ended = time;
      if (time - known.ended > SPAN) this.requests.delete(id);
    }
  }
}

function values(metrics) {
  return {
    speed: metrics.generation_tokens_per_second,
    prefill: metrics.prompt_tokens_per_second,
    running: metrics.num_running,
    waiting: metrics.num_waiting,
    kv: metrics.kv_usage,
    hits: metrics.prefix_queries ? metrics.cache_hit_rate : null,
    preemptions: metrics.num_preemptions,
    ttft: metrics.ttft_p50 || null,
    itl: metrics.itl_p50 || null,
  };
}

// A phase goes on, or another one begins. What was before the first look counts as waiting.
function phases(known, { state }, time) {
  const last = known.phases[known.phases.length - 1];
  if (last?.state === state) return known.phases;
  if (!last) return [{ state, from: known.began }];
  return [...known.phases, { state, from: time }];
}
