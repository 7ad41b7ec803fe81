/**
 * Events of `/polykv/events` in words.
 *
 * Law: pure; an event of a kind that is not known here is shown by its fields, so that nothing that happens is hidden.
 */

import { count, duration, isNumber, rate } from "./words.js";

/** @typedef {{topic: string, type: string, ts: number, seq: number, [fact: string]: any}} HappenedEvent */

/** What is shown of all that happens. */
export const CHOICES = /** @type {Record<string, (event: HappenedEvent) => boolean>} */ ({
  Changes: (event) => event.topic !== "request" && !["active", "warming", "idle"].includes(event.type),
  Requests: (event) => event.topic === "request" && event.type !== "released",
  Everything: () => true,
});

const TOPICS = /** @type {Record<string, (event: HappenedEvent) => string>} */ ({
  pool: poolWords,
  session: sessionWords,
  request: requestWords,
  engine: engineWords,
  decision: decisionWords,
  policy: policyWords,
  peer: peerWords,
  resync: () => "some events were missed",
});
const HEAD = new Set(["ts", "seq", "topic", "type"]);

/** @param {HappenedEvent} event @returns {string} one line */
export function eventWords(event) {
  return TOPICS[event.topic]?.(event) ?? fields(event);
}

/** @param {HappenedEvent} event */
function poolWords({ type, pool_id, name, parent, prefix_len, reason }) {
  const what = name ? `${name} (${pool_id})` : `pool ${pool_id}`;
  const more = type === "created" ? `, ${count(prefix_len)} tokens${parent === null ? "" : ` below pool ${parent}`}` : "";
  if (reason?.startsWith(type)) return `${what} ${reason}`;
  return `${what} ${type}${more}${reason ? `: ${reason}` : ""}`;
}

/** @param {HappenedEvent} event */
function sessionWords({ type, session_id, pool_id }) {
  return `session ${session_id} ${type}${pool_id === null ? "" : `, pool ${pool_id}`}`;
}

/** @param {HappenedEvent} event */
function requestWords(event) {
  const { type, session_id, pool_id, slot } = event;
  const who = session_id ?? "unnamed request";
  const where = `${pool_id === null ? "" : `, pool ${pool_id}`}${slot === null ? "" : `, slot ${slot}`}`;
  return `${who} ${type.replace("_", " ")}${where}${requestFigures(event)}`;
}

/** @param {HappenedEvent} event */
function requestFigures({ type, n_prompt, n_shared, n_decoded, miss, reason, ttft_ms, tps }) {
  if (type === "launched") return `: ${count(n_prompt)} prompt tokens`;
  const shared = `${count(n_shared)} of ${count(n_prompt)} from the pool${miss ? ` (${miss})` : ""}`;
  if (type === "first_token") return `: ${shared}, after ${duration(ttft_ms === null ? null : ttft_ms / 1000)}`;
  return `: ${count(n_decoded)} tokens${tps === null ? "" : ` at ${rate(tps)} tok/s`}${reason ? `, ${reason}` : ""}`;
}

/** @param {HappenedEvent} event */
function peerWords({ type, name, pid, weight, ours }) {
  const who = `${ours ? "our engine" : name || `process ${pid}`}`;
  return type === "weight"
    ? `${who} has weight ${weight} on the device`
    : `${who} ${type} the device${type === "joined" ? `, weight ${weight}` : ""}`;
}

/** @param {HappenedEvent} event */
function engineWords({ type, reason }) {
  return `engine ${type}${reason ? `: ${reason}` : ""}`;
}

/** @param {HappenedEvent} event */
function decisionWords(event) {
  const who = event.session_id ?? `request ${event.req}`;
  const where = event.pool_id === null ? "" : `, pool ${event.pool_id}`;
  const waited = event.waited_ms ? ` after ${duration(event.waited_ms / 1000)}` : "";
  const would = event.would ? `; enforced, it would be ${event.would}` : "";
  return `${who} ${event.type.replaceAll("_", " ")}${where}${waited}: ${groundWords(event)}${would}`;
}

/** @param {HappenedEvent} event */
function policyWords({ type, name, pool_id, policy }) {
  const whose = pool_id === null ? "default policy" : `policy of ${name ?? "pool"} (${pool_id})`;
  return type === "removed"
    ? `${whose} removed`
    : `${whose}: ${rate(policy.target_tps_per_session)} tok/s a session, ${policy.mode}`;
}

/** The ground of a decision, with what was measured. @param {any} found @returns {string} */
export function groundWords({ reason, value, threshold }) {
  const measured = isNumber(value) && isNumber(threshold) ? ` (${rate(value)} against ${rate(threshold)})` : "";
  return `${reason}${measured}`;
}

/** @param {HappenedEvent} event */
function fields(event) {
  const parts = Object.entries(event).filter(([name, value]) => !HEAD.has(name) && value !== null && value !== "");
  return [event.type, ...parts.map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`)].join(
    ", ",
  );
}
