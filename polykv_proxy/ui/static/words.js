/**
 * Figures and states in words.
 *
 * Law: pure; what is not known is a dash, never NaN.
 */

export const UNKNOWN = "–";

/** Residency of a pool: what it means. @type {Record<string, string>} */
export const RESIDENCIES = {
  resident: "KV in the cache",
  materializing: "being computed",
  evicted: "tokens only; rebuilt when used",
  lost: "the engine went away; rebuilt when used",
  releasing: "goes with its last request",
  saved: "KV on disk; read when used",
  quarantined: "failed a check; not used",
  failed: "no KV",
};

/** Why KV stays. @type {Record<string, string>} */
export const KEPT_BY = {
  running: "a request runs on it",
  attached: "sessions are attached",
  materializing: "it is being computed",
  pinned: "it is pinned",
  in_use_below: "a pool below it is in use",
  children: "pools below it have KV",
};

/** @param {unknown} value */
export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** @param {number | null | undefined} value @returns {string} 12,345 */
export function count(value) {
  return isNumber(value) ? Number(value).toLocaleString("en") : UNKNOWN;
}

/** @param {number | null | undefined} value @returns {string} tokens per second, one decimal below 100 */
export function rate(value) {
  if (!isNumber(value)) return UNKNOWN;
  return Number(value) < 100 ? Number(value).toFixed(1) : Math.round(Number(value)).toLocaleString("en");
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (!isNumber(value)) return UNKNOWN;
  let size = Number(value);
  for (const unit of ["B", "KiB", "MiB"]) {
    if (size < 1024) return `${unit === "B" || size >= 100 ? Math.round(size) : size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size >= 100 ? Math.round(size) : size.toFixed(1)} GiB`;
}

/** @param {number | null | undefined} value 0 to 1 */
export function percent(value) {
  return isNumber(value) ? `${Math.round(Number(value) * 100)} %` : UNKNOWN;
}

/** @param {number | null | undefined} seconds a length of time */
export function duration(seconds) {
  if (!isNumber(seconds)) return UNKNOWN;
  const length = Math.max(0, Number(seconds));
  if (length < 1) return `${Math.round(length * 1000)} ms`;
  if (length < 10) return `${length.toFixed(1)} s`;
  for (const [unit, size] of /** @type {[string, number][]} */ ([
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
  ])) {
    if (length >= size) return `${Math.floor(length / size)} ${unit}`;
  }
  return `${Math.floor(length)} s`;
}

/** @param {number | null | undefined} ts Unix time @param {number} now Unix time */
export function ago(ts, now) {
  return isNumber(ts) ? `${duration(Math.max(0, Math.floor(now - Number(ts))))} ago` : UNKNOWN;
}

/** @param {number} ts Unix time @returns {string} 14:03:59 */
export function clock(ts) {
  return new Date(ts * 1000).toLocaleTimeString("en-GB");
}

/** @param {number} n @param {string} one @param {string} [many] */
export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

/** @param {any[]} items @param {string} field a number in each; missing ones are 0 */
export function sum(items, field) {
  return items.reduce((total, item) => total + (item[field] ?? 0), 0);
}
