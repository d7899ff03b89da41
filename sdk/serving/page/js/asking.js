// One answer while it runs: the request, its message, and how it ends.

import { AnswerReader, newAnswer, requestBody } from "./answer.js";
import { ApiError } from "./client.js";
import { words } from "./words.js";

export class Asking {
  constructor(client, conversation) {
    this.client = client;
    this.conversation = conversation;
    this.abort = new AbortController();
    this.message = newAnswer(conversation.model);
    this.message.running = true;
    if (conversation.settings.schema) this.message.schema = conversation.settings.schema;
  }

  /** Runs to its end; failures are written into the message. `onChunk` is called for each chunk. */
  async run(onChunk) {
    const { message, conversation } = this;
    const body = requestBody(conversation);
    conversation.messages.push(message);
    const reader = new AnswerReader(message);
    try {
      for await (const chunk of this.client.chat(body, this.abort.signal)) {
        reader.add(chunk);
        onChunk();
      }
    } catch (error) {
      if (this.abort.signal.aborted) message.stopped = !message.interrupted;
      else message.error = described(error);
    } finally {
      delete message.running;
    }
  }

  /** The page is left. What was written so far stays. */
  leave() {
    this.message.interrupted = true;
    delete this.message.running;
    this.stop();
  }

  /** Closes the connection: the server aborts the request. */
  stop() {
    this.abort.abort();
  }
}

function described(error) {
  if (!(error instanceof ApiError)) return { kind: "page", text: words.errors.page(String(error)) };
  const { kind, message: text, retryAfter } = error;
  return retryAfter === null ? { kind, text } : { kind, text, until: Date.now() + 1000 * retryAfter };
}
