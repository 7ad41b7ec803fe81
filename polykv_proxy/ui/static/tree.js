/**
 * The tree of pools as rows, and where each row's bar lies.
 *
 * Law: pure. The picture is a map of token positions: a pool's bar lies where its own tokens are, [branch_pos, prefix_len), its parent's
 * to the left; a session's bar is what it added. So length is KV, and what is shared is drawn once.
 */

import { plural } from "./words.js";

/**
 * @typedef {object} Row
 * @property {string} key
 * @property {"pool" | "session" | "group"} kind
 * @property {any} it the pool or session
 * @property {number} level from 1
 * @property {boolean | null} open null: nothing below
 * @property {number} position in its set, from 1
 * @property {number} setSize
 * @property {number} from start of the bar, in tokens
 * @property {number} to end of the bar
 */

/** Sessions that no pool has go below this. */
const NOWHERE = { key: "group none", title: "Without a pool" };

/**
 * Rows in the order in which they are drawn. Work grows with the number of pools and sessions, not faster.
 * @param {any[]} pools @param {import("./store.js").Session[]} sessions
 * @param {{closed?: Set<string>, filter?: string}} [options] rows whose children are hidden; words that must occur in a row, or below it
 * @returns {Row[]}
 */
export function rowsOf(pools, sessions, { closed = new Set(), filter = "" } = {}) {
  const below = childrenOf(pools, sessions);
  const shown = filter.trim() ? matching(below, filter.trim().toLowerCase()) : null;
  /** @type {Row[]} */
  const rows = [];
  const waiting = drawn(below.get("") ?? [], 1, shown);
  while (waiting.length) {
    const row = /** @type {Row} */ (waiting.pop());
    const children = drawn(below.get(row.key) ?? [], row.level + 1, shown);
    row.open = children.length ? !closed.has(row.key) || shown !== null : null;
    rows.push(row);
    if (row.open) for (const child of children) waiting.push(child);
  }
  return rows;
}

/** @param {Row[]} rows @returns {number} how many tokens wide the map is */
export function widthOf(rows) {
  return rows.reduce((width, row) => Math.max(width, row.to), 1);
}

/** Token positions to name above the map, in round steps. @param {number} width in tokens @returns {number[]} */
export function ticks(width) {
  const rough = width / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, power * (rough / power >= 5 ? 5 : rough / power >= 2 ? 2 : 1));
  return Array.from({ length: Math.floor(width / step) + 1 }, (_, n) => n * step);
}

/** @param {any} pool */
export function poolTitle(pool) {
  return pool.name ?? `pool ${pool.pool_id}`;
}

/** @param {any} session */
export function sessionTitle(session) {
  return session.session_id ?? "unnamed request";
}

/** @param {Row} row @returns {string} what a row shows by its shape and colour, for somebody who hears it */
export function spoken({ kind, it }) {
  if (kind === "group") return "";
  if (kind === "session") return "session,";
  return `pool, ${it.residency}${it.pinned ? ", pinned" : ""}, ${plural(it.sessions.length, "session")},`;
}

/** @typedef {{key: string, kind: Row["kind"], it: any, from: number, to: number}} Leaf */

/** @param {any[]} pools @param {import("./store.js").Session[]} sessions @returns {Map<string, Leaf[]>} by the key of what is above, "" at the top */
function childrenOf(pools, sessions) {
  const known = new Map(pools.map((pool) => [pool.pool_id, pool]));
  /** @type {Map<string, Leaf[]>} */
  const below = new Map();
  for (const session of sessions) {
    const pool = known.get(session.pool_id);
    add(below, pool ? `pool ${pool.pool_id}` : NOWHERE.key, {
      key: session.key,
      kind: "session",
      it: session,
      ...span(session, pool),
    });
  }
  for (const pool of pools) {
    const leaf = {
      key: `pool ${pool.pool_id}`,
      kind: /** @type {const} */ ("pool"),
      it: pool,
      from: pool.branch_pos,
      to: pool.prefix_len,
    };
    add(below, known.has(pool.parent) ? `pool ${pool.parent}` : "", leaf);
  }
  if (below.has(NOWHERE.key)) add(below, "", { key: NOWHERE.key, kind: "group", it: NOWHERE, from: 0, to: 0 });
  return below;
}

/** @param {import("./store.js").Session} session @param {any} pool */
function span(session, pool) {
  const end = pool?.prefix_len ?? 0;
  if (session.resident === false) return { from: end, to: end };
  const from = session.n_shared ?? end;
  return { from, to: Math.max(from, session.ctx_used ?? from + (session.suffix_n_tokens ?? 0)) };
}

/** @param {Map<string, Leaf[]>} below @param {string} above @param {Leaf} leaf */
function add(below, above, leaf) {
  const list = below.get(above);
  if (list) list.push(leaf);
  else below.set(above, [leaf]);
}

/** @param {Leaf[]} leaves @param {number} level @param {Set<string> | null} shown @returns {Row[]} last one first, as a stack wants them */
function drawn(leaves, level, shown) {
  const kept = shown ? leaves.filter((leaf) => shown.has(leaf.key)) : leaves;
  return kept.map((leaf, n) => ({ ...leaf, level, open: null, position: n + 1, setSize: kept.length })).reverse();
}

/** @typedef {{leaf: Leaf, above: Step | null, within: boolean}} Step */

/** @param {Map<string, Leaf[]>} below @param {string} words @returns {Set<string>} keys of what matches, of all above it and all below it */
function matching(below, words) {
  /** @type {Set<string>} */
  const shown = new Set();
  /** @type {Step[]} */
  const waiting = (below.get("") ?? []).map((leaf) => ({ leaf, above: null, within: false }));
  for (let step = waiting.pop(); step; step = waiting.pop()) {
    const hit = step.within || text(step.leaf).includes(words);
    for (let up = hit ? step : null; up && !shown.has(up.leaf.key); up = up.above) shown.add(up.leaf.key);
    for (const leaf of below.get(step.leaf.key) ?? []) waiting.push({ leaf, above: step, within: hit });
  }
  return shown;
}

/** @param {Leaf} leaf */
function text({ kind, it }) {
  const words =
    kind === "pool"
      ? [it.name ?? "", `#${it.pool_id}`, it.residency, it.pinned ? "pinned" : ""]
      : [it.session_id ?? it.title ?? "unnamed", it.state ?? ""];
  return words.join(" ").toLowerCase();
}
