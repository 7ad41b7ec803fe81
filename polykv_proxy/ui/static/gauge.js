/**
 * The KV cache as a bar: whose it is, and what is free.
 *
 * Law: each byte is counted for one owner, as the proxy counts it. Without the size of the cache there is no free part, and it says so.
 */

import { el, setAttribute, setStyle, setText } from "./dom.js";
import { bytes, percent, sum } from "./words.js";

const PARTS = ["pools", "private", "other", "free"];

export class Gauge {
  #bar = el("div", { class: "gauge", role: "img" }, ...PARTS.map((part) => el("i", { class: part })));
  #value = el("p", { class: "value" });
  #legend = el("ul", { class: "legend" }, ...PARTS.map((part) => el("li", {}, el("i", { class: `swatch ${part}` }), el("span"))));
  root = el("section", { class: "panel tile wide" }, el("h2", {}, "KV cache"), this.#value, this.#bar, this.#legend);

  /** @param {import("./store.js").Facts} facts */
  draw(facts) {
    const parts = kvParts(facts);
    const total = PARTS.reduce((all, part) => all + (parts[part] ?? 0), 0);
    setText(this.#value, gaugeWords(parts, facts.tps?.compaction_pressure));
    setAttribute(this.#bar, "aria-label", PARTS.map((part) => `${part} ${bytes(parts[part])}`).join(", "));
    PARTS.forEach((part, n) => {
      setStyle(/** @type {HTMLElement} */ (this.#bar.children[n]), "--part", String(total ? (parts[part] ?? 0) / total : 0));
      setText(/** @type {Element} */ (this.#legend.children[n].lastElementChild), `${part} ${bytes(parts[part])}`);
    });
  }
}

/** @param {import("./store.js").Facts} facts @returns {Record<string, number | null>} bytes by part; `free` is null while the size is not known */
export function kvParts({ pools, tree, tps, health }) {
  const size = (tps?.cells_total ?? 0) * (health?.pools?.engine?.kv?.bytes_per_token ?? 0);
  const own = sum(pools, "own_kv_bytes");
  const session = pools.reduce((all, pool) => all + sum(pool.sessions, "marginal_kv_bytes"), 0);
  const other = tree.other_kv_bytes ?? 0;
  return { pools: own, private: session, other, free: size ? Math.max(0, size - own - session - other) : null };
}

/** @param {Record<string, number | null>} parts @param {number | undefined} pressure 0 to 1 */
export function gaugeWords(parts, pressure) {
  const used = (parts.pools ?? 0) + (parts.private ?? 0) + (parts.other ?? 0);
  if (parts.free === null) return `${bytes(used)} in use`;
  const more = pressure ? `, pressure ${percent(pressure)}` : "";
  return `${percent(used / (used + parts.free))} of ${bytes(used + parts.free)}${more}`;
}
