// Server-sent events read from a response. EventSource cannot send an Authorization header.

/** The `data` of each event of a text/event-stream body, in order. Comments and names are skipped. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      // A line may end with \r\n that two pieces split: a last \r waits for what follows.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = done ? "" : lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    // Also when the caller leaves its loop early: the connection closes, and the server aborts.
    reader.cancel().catch(() => {});
  }
}
