/**
 * The figures at the top: speed, sessions, KV, pools, what sharing saved.
 *
 * Law: each tile is a title and a function of the store; a new one is a line in TILES.
 */

import { el, setText } from "./dom.js";
import { Gauge } from "./gauge.js";
import { count, duration, plural, rate } from "./words.js";

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
  { title: "Prompt tokens saved", value: ({ facts }) => count(facts.tps?.saved_tokens), note: savedNote },
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
      gauge.draw(store.facts);
    });
  }
}

/** @param {Store} store */
function sessionsNote({ facts, sessions }) {
  return facts.tps ? `of ${count(sessions.length)}, ${count(facts.tps.n_warming)} warming` : plural(sessions.length, "session");
}

/** @param {Store} store */
function poolsNote({ facts }) {
  const ids = facts.tree.seq_ids_max ? `, ids ${count(facts.tree.seq_ids_used)} of ${count(facts.tree.seq_ids_max)}` : "";
  return `of ${count(facts.pools.length)}${ids}`;
}

/** @param {Store} store */
function savedNote({ facts }) {
  return `about ${duration(facts.tps?.saved_s)} of computing`;
}
