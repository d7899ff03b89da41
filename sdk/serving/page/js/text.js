// Texts, numbers and times as they are shown.

/** The text without the characters of `set` at its end. A regular expression would take quadratic time. */
export function trimEnd(text, set) {
  let end = text.length;
  while (end > 0 && set.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

/** At most `length` characters, on one line. */
export function shorten(text, length) {
  const line = text.slice(0, 4 * length).replace(/\s+/g, " ").trim();
  const characters = Array.from(line);
  return characters.length <= length ? line : characters.slice(0, length - 1).join("").trimEnd() + "…";
}

const GROUPED = new Intl.NumberFormat("en");

/** 12,345 */
export const whole = (number) => GROUPED.format(Math.round(number));

/** Three significant digits: 0.123, 12.3, 1,230. */
export function short(number) {
  if (!Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size >= 100) return whole(number);
  return String(Number(number.toFixed(size >= 10 ? 1 : size >= 1 ? 2 : 3)));
}

/** 85 ms, 1.2 s, 3 min 20 s, 2 h 5 min. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${short(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  const rest = Math.floor(seconds % 60);
  if (minutes < 60) return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const percent = (share) => `${short(100 * share)} %`;
