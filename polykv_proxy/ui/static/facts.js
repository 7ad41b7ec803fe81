/**
 * What is told of one pool or session, name by name.
 *
 * Law: pure.
 */

import { ago, bytes, clock, count, duration, KEPT_BY, plural, RESIDENCIES, rate, UNKNOWN } from "./words.js";

/** @param {any} pool @param {number} now @returns {[string, string][]} */
export function poolFacts(pool, now) {
  const residency = RESIDENCIES[pool.residency];
  const pinned = pool.pin_until_ts ? `until ${clock(pool.pin_until_ts)}` : "until unpinned";
  return [
    ["Residency", `${pool.residency}${residency ? `: ${residency}` : ""}${pool.reason ? ` (${pool.reason})` : ""}`],
    [
      "Tokens",
      `${count(pool.prefix_len)}${pool.parent === null ? "" : `, ${count(pool.prefix_len - pool.branch_pos)} of its own from ${count(pool.branch_pos)} of pool ${pool.parent}`}`,
    ],
    ["KV", `${bytes(pool.own_kv_bytes)} own, ${bytes(pool.subtree_kv_bytes)} with all below`],
    ["On disk", pool.saved_bytes ? bytes(pool.saved_bytes) : "no copy"],
    ["Stays because", pool.kept_by ? (KEPT_BY[pool.kept_by] ?? pool.kept_by) : "nothing keeps it"],
    [
      "Pin",
      pool.pinned
        ? `${pool.pin_owner ? `${pool.pin_owner}, ` : ""}${pinned}${pool.orphaned_pin ? "; nobody uses it" : ""}`
        : "none",
    ],
    [
      "Requests",
      `${count(pool.n_queries)}, ${count(pool.n_hits)} hit, ${count(pool.n_rebuilds)} rebuilt it, ${count(pool.n_restores)} read it from disk, ${count(pool.n_running)} running`,
    ],
    [
      "Saved",
      `${count(pool.savings.n_tokens)} tokens, about ${duration(pool.savings.seconds)}, in ${plural(pool.savings.n_requests, "request")}`,
    ],
    ["Misses", missWords(pool.savings.misses)],
    ["Admission", policyWords(pool.policy)],
    ["Used", ago(pool.last_access_ts, now)],
    ["Made", `${ago(pool.created_ts, now)} from ${pool.source}`],
    ["Time to live", pool.ttl_s === null ? "no end" : duration(pool.ttl_s)],
    ["Prefix hash", pool.prefix_hash],
  ];
}

/** @param {any} session @returns {[string, string][]} */
export function sessionFacts(session) {
  return [
    ["State", session.state],
    ["Pool", session.pool_id === null ? "none" : String(session.pool_id)],
    ["Tokens per second", rate(session.tps_ewma)],
    ["Time to first token", session.ttft_ms === null || session.ttft_ms === undefined ? UNKNOWN : duration(session.ttft_ms / 1000)],
    ["Context", `${count(session.ctx_used)} of ${count(session.ctx_total)}, room for ${count(session.ctx_headroom_tokens)}`],
    ["Own KV", bytes(session.marginal_kv_bytes)],
  ];
}

/** @param {any} policy as a pool has it, null without one */
function policyWords(policy) {
  if (!policy) return "no floor";
  const from = policy.inherited_from === null ? "" : `, of pool ${policy.inherited_from}`;
  return `floor ${rate(policy.target_tps_per_session)} tok/s, ${modeWords(policy)}${from}`;
}

/** @param {any} policy @returns {string} whether it acts, and how */
export function modeWords({ mode, on_saturation }) {
  return mode === "enforced" ? `enforced: ${on_saturation}` : `${mode}: would ${on_saturation}`;
}

/** @param {Record<string, any>} misses by reason */
function missWords(misses) {
  const found = Object.entries(misses).map(([reason, { n_requests }]) => `${reason.replaceAll("_", " ")} ${count(n_requests)}`);
  return found.join(", ") || "none";
}
