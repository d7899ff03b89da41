// JSON while it is still being written.

import { trimEnd } from "./text.js";

/**
 * The text with line breaks and two spaces per level. Strings and numbers stay as they are written:
 * JSON.parse would change large numbers and drop repeated names.
 */
export function pretty(text) {
  let out = "";
  let level = 0;
  for (const token of tokens(text)) {
    const last = out[out.length - 1];
    if (token === "}" || token === "]") {
      level = Math.max(0, level - 1);
      out += (last === "{" && token === "}") || (last === "[" && token === "]") ? token : line(level) + token;
      continue;
    }
    if (last === "{" || last === "[") out += line(level);
    if (token === "{" || token === "[") {
      out += token;
      level += 1;
    } else if (token === ",") {
      out += "," + line(level);
    } else {
      out += token === ":" ? ": " : token;
    }
  }
  return out;
}

const line = (level) => "\n" + "  ".repeat(Math.min(level, 40));

// Strings (the last may be open), punctuation, and runs of anything else.
function* tokens(text) {
  for (const [token] of text.matchAll(/"(?:[^"\\]|\\[^])*(?:"|\\?$)|[{}[\],:]|[^\s"{}[\],:]+/g)) yield token;
}

/**
 * The value of a text that may end anywhere: `{value, open, complete}`, or null if it is not the
 * beginning of a JSON text. `open` has the paths (JSON pointers) of what is not finished.
 */
export function partial(text) {
  try {
    return { value: JSON.parse(text), open: new Set(), complete: true };
  } catch {
    const closed = close(text);
    if (closed === null) return null;
    try {
      return { value: JSON.parse(closed.text), open: new Set(closed.open), complete: false };
    } catch {
      return null;
    }
  }
}

// The text with everything closed that is open. What cannot be completed (a name without its value,
// the beginning of a literal) is left out.
function close(text) {
  const stack = []; // {end, key, index, kept}: `kept` is the length of the text up to the last whole member
  let out = "";
  let ended = false;
  const value = (token) => {
    out += token;
    if (stack.length) stack[stack.length - 1].kept = out.length;
    else ended = true;
  };
  let openScalar = null;
  for (const token of tokens(text)) {
    if (ended || openScalar) return null;
    const top = stack[stack.length - 1];
    if (token === "{" || token === "[") {
      out += token;
      stack.push({ end: token === "{" ? "}" : "]", key: null, index: 0, kept: out.length });
    } else if (token === "}" || token === "]") {
      if (top?.end !== token) return null;
      stack.pop();
      value(token);
    } else if (token === ",") {
      if (!top) return null;
      out += token;
      top.key = null;
      top.index += 1;
    } else if (token === ":") {
      out += token;
    } else if (top?.end === "}" && top.key === null) {
      if (token[0] !== '"') return null;
      if (!isWhole(token)) break;
      top.key = JSON.parse(token);
      out += token;
    } else if (isWhole(token) && !(isNumber(token) && text.trimEnd().endsWith(token))) {
      value(token);
    } else {
      openScalar = completed(token);
      if (openScalar === null) break;
      value(openScalar);
    }
  }
  const open = [];
  for (let depth = 0; depth <= stack.length; depth += 1) {
    const inside = depth < stack.length;
    if (inside || openScalar) open.push(pointer(stack.slice(0, depth)));
  }
  while (stack.length) {
    const { kept, end } = stack[stack.length - 1];
    out = out.slice(0, kept) + end;
    stack.pop();
    if (stack.length) stack[stack.length - 1].kept = out.length;
  }
  return { text: out, open };
}

function isWhole(token) {
  try {
    JSON.parse(token);
    return true;
  } catch {
    return false;
  }
}

const isNumber = (token) => /^[-\d]/.test(token);

function completed(token) {
  if (token[0] === '"') {
    const text = token.replace(/\\(u[\da-fA-F]{0,3})?$/, "");
    return isWhole(text + '"') ? text + '"' : null;
  }
  if (!isNumber(token)) return null;
  const number = trimEnd(token, "-+.eE");
  return number && isWhole(number) ? number : null;
}

const escape = (part) => String(part).replaceAll("~", "~0").replaceAll("/", "~1");
const pointer = (stack) => stack.map(({ end, key, index }) => "/" + escape(end === "}" ? (key ?? "") : index)).join("");
