// The chunks of one streamed answer become a message.

/** An empty message of the assistant. */
export function newAnswer(model) {
  return { role: "assistant", model, content: "", reasoning: "", tool_calls: [] };
}

/** Adds the chunks of a stream to a message; knows when its tokens came. */
export class AnswerReader {
  constructor(message, now = () => performance.now()) {
    this.message = message;
    this.now = now;
    this.began = now();
    this.first = null;
    this.last = null;
    this.pieces = 0;
  }

  add(chunk) {
    const message = this.message;
    if (chunk.usage) this.usage(chunk.usage);
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (delta.content || reasoning || delta.tool_calls?.length) {
      this.last = this.now();
      this.first ??= this.last;
      this.pieces += 1;
    }
    message.content += delta.content ?? "";
    message.reasoning += reasoning;
    for (const call of delta.tool_calls ?? []) this.call(call);
    if (choice.finish_reason) message.finish_reason = choice.finish_reason;
    this.times();
  }

  call({ index = 0, id, function: part = {} }) {
    const calls = this.message.tool_calls;
    while (calls.length <= index) calls.push({ id: "", name: "", arguments: "" });
    const call = calls[index];
    if (id) call.id = id;
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
  }

  usage(usage) {
    const stats = (this.message.stats ??= {});
    stats.prompt = usage.prompt_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    stats.generated = usage.completion_tokens;
    this.times();
  }

  /** Tokens per second count from the first token: the wait before it has its own number. */
  times() {
    if (this.first === null) return;
    const stats = (this.message.stats ??= {});
    stats.first_seconds = (this.first - this.began) / 1000;
    const seconds = (this.last - this.first) / 1000;
    const tokens = stats.generated ?? this.pieces;
    // Below 50 ms the clock and the network say more than the engine.
    stats.speed = tokens > 1 && seconds > 0.05 ? (tokens - 1) / seconds : null;
  }
}

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

/** The body of the request that continues a conversation. */
export function requestBody({ model, messages, settings }) {
  const body = {
    model,
    messages: sent(messages, settings.system),
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) if (settings[name] !== undefined) body[name] = settings[name];
  const stop = stopStrings(settings.stop);
  if (stop.length) body.stop = stop;
  if (settings.schema) {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (settings.tools) {
    body.tools = toolDefinitions(JSON.parse(settings.tools));
    body.tool_choice = settings.tool_choice ?? "auto";
  }
  return body;
}

/** Functions may be written alone or in OpenAI's {"type": "function", "function": ...}. */
export function toolDefinitions(value) {
  const list = Array.isArray(value) ? value : [value];
  return list.map((one) => (one.function ? one : { type: "function", function: one }));
}

/** One stop string per line; a backslash and n are a line break. */
export function stopStrings(text) {
  const lines = (text ?? "").split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
}

function sent(messages, system) {
  const list = system ? [{ role: "system", content: system }] : [];
  for (const one of messages) {
    const last = list[list.length - 1];
    if (one.role === "user" && last?.role === "user") {
      // The answer between them failed. Many chat templates reject two messages of the user in a row.
      last.content = joined(last.content, content(one));
    } else if (one.role !== "assistant") {
      const { role, tool_call_id } = one;
      const said = content(one);
      list.push(tool_call_id ? { role, content: said, tool_call_id } : { role, content: said });
    } else if (one.content || one.tool_calls?.length) {
      const message = { role: "assistant", content: one.content };
      if (one.tool_calls?.length) {
        message.tool_calls = one.tool_calls.map(({ id, name, arguments: text }) => ({
          id,
          type: "function",
          function: { name, arguments: text },
        }));
      }
      list.push(message);
    }
  }
  return list;
}

/** A text, or the images of a message before its text. */
function content({ content: text, images = [] }) {
  if (images.length === 0) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function joined(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  const parts = (one) => (typeof one === "string" ? [{ type: "text", text: one }] : one);
  return [...parts(first), ...parts(second)];
}
