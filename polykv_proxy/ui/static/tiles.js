/**
 * The figures at the top: speed, sessions, KV, pools, what sharing saved.
 *
 * Law: each tile is a title and a function of the store; a new one is a line in TILES.
 */

import { el, setAttribute, setStyle, setText } from "./dom.js";
import { bytes, count, isNumber, percent, plural, rate, UNKNOWN } from "./words.js";

/** @typedef {{title: string, value: (store: Store) => string, note: (store: Store) => string}} Tile */
/** @typedef {import("./store.js").Store} Store */

/** @type {Tile[]} */
const TILES = [
  {
    title: "Generation, tok/s",
    value: ({ facts }) => rate(facts.tps?.aggregate_tps),
    note: ({ facts }) => `mean per session ${rate(facts.tps?.mean_active_tps)}`,
  },
  { title: "Sessions active", value: ({ facts }) => count(facts.tps?.n_active), note: sessionsNote },
  {
    title: "Pools resident",
    value: ({ facts }) => count(facts.pools.filter((pool) => pool.residency === "resident").length),
    note: poolsNote,
  },
  { title: "Prompt tokens saved", value: ({ facts }) => count(sum(facts.pools, "n_tokens_shared")), note: hitsNote },
];

export class Tiles {
  /** @param {HTMLElement} root @param {Store} store */
  constructor(root, store) {
    const tiles = TILES.map((tile) => ({ tile, value: el("p", { class: "value" }), note: el("p", { class: "soft" }) }));
    const gauge = new Gauge();
    root.append(
      ...tiles.map(({ tile, value, note }) => el("section", { class: "panel tile" }, el("h2", {}, tile.title), value, note)),
      gauge.root,
    );
    store.watch(() => {
      for (const { tile, value, note } of tiles) {
        setText(value, tile.value(store));
        setText(note, tile.note(store));
      }
      gauge.draw(store);
    });
  }
}

const PARTS = ["pools", "private", "other", "free"];

/** KV in use by whom, as a bar. */
class Gauge {
  #bar = el("div", { class: "gauge", role: "img" }, ...PARTS.map((part) => el("i", { class: part })));
  #value = el("p", { class: "value" });
  #legend = el("ul", { class: "legend" }, ...PARTS.map((part) => el("li", {}, el("i", { class: `swatch ${part}` }), el("span"))));
  root = el("section", { class: "panel tile wide" }, el("h2", {}, "KV cache"), this.#value, this.#bar, this.#legend);

  /** @param {Store} store */
  draw(store) {
    const parts = kvParts(store.facts);
    const total = Object.values(parts).reduce((all, part) => all + part, 0);
    const used = total - parts.free;
    const pressure = store.facts.tps?.compaction_pressure;
    setText(
      this.#value,
      total
        ? `${percent(used / total)} of ${bytes(total)}${isNumber(pressure) && pressure > 0 ? `, pressure ${percent(pressure)}` : ""}`
        : UNKNOWN,
    );
    setAttribute(this.#bar, "aria-label", PARTS.map((part) => `${part} ${bytes(parts[part])}`).join(", "));
    PARTS.forEach((part, n) => {
      setStyle(/** @type {HTMLElement} */ (this.#bar.children[n]), "--part", String(total ? parts[part] / total : 0));
      setText(/** @type {Element} */ (this.#legend.children[n].lastElementChild), `${part} ${bytes(parts[part])}`);
    });
  }
}

/** @param {import("./store.js").Facts} facts @returns {Record<string, number>} bytes by part; all 0 while nothing is known */
function kvParts({ pools, tree, capacity, health }) {
  const perToken = health?.pools?.engine?.kv?.bytes_per_token ?? 0;
  const all = (capacity?.cells_total ?? 0) * perToken;
  const own = sum(pools, "own_kv_bytes");
  const session = pools.reduce((bytesOf, pool) => bytesOf + sum(pool.sessions, "marginal_kv_bytes"), 0);
  const other = tree.other_kv_bytes ?? 0;
  return { pools: own, private: session, other, free: Math.max(0, all - own - session - other) };
}

/** @param {any[]} items @param {string} field */
function sum(items, field) {
  return items.reduce((total, item) => total + (item[field] ?? 0), 0);
}

/** @param {Store} store */
function sessionsNote({ facts, sessions }) {
  return facts.tps
    ? `${count(facts.tps.n_warming)} warming, ${plural(sessions.length, "session")} in all`
    : plural(sessions.length, "session");
}

/** @param {Store} store */
function poolsNote({ facts }) {
  const ids = facts.tree.seq_ids_max ? `, ids ${count(facts.tree.seq_ids_used)} of ${count(facts.tree.seq_ids_max)}` : "";
  return `of ${count(facts.pools.length)}${ids}`;
}

/** @param {Store} store */
function hitsNote({ facts }) {
  return `${count(sum(facts.pools, "n_hits"))} of ${plural(sum(facts.pools, "n_queries"), "request")} hit`;
}
