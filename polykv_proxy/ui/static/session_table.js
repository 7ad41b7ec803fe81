/**
 * All sessions as a table that can be sorted.
 *
 * Law: draws what is in sight; a hidden table costs nothing.
 */

import { el, mirror, setAttribute, setText } from "./dom.js";
import { sessionTitle } from "./tree.js";
import { count, duration, rate, UNKNOWN } from "./words.js";

/** @typedef {{title: string, of: (session: any) => string | number | null, text?: (value: any) => string}} Column */

/** @type {Column[]} */
const COLUMNS = [
  { title: "Session", of: sessionTitle },
  { title: "Pool", of: (session) => session.pool_id ?? null },
  { title: "State", of: (session) => session.state },
  { title: "tok/s", of: (session) => session.tps_ewma ?? null, text: rate },
  { title: "TTFT", of: (session) => session.ttft_ms ?? null, text: (value) => duration(value / 1000) },
  { title: "Context", of: (session) => session.ctx_used ?? null, text: count },
  { title: "Room", of: (session) => session.ctx_headroom_tokens ?? null, text: count },
];

export class SessionTable {
  #store;
  #body = el("tbody");
  #heads;
  #by = COLUMNS[3];
  #down = true;

  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.#store = store;
    this.#heads = COLUMNS.map((column) =>
      el("th", { scope: "col" }, el("button", { type: "button", click: () => this.#sort(column) }, column.title)),
    );
    const table = el(
      "table",
      {},
      el("caption", { class: "unseen" }, "Sessions"),
      el("thead", {}, el("tr", {}, ...this.#heads)),
      this.#body,
    );
    this.root = el("div", { class: "table" }, table);
    new IntersectionObserver(() => this.#draw()).observe(this.root);
    store.watch(() => this.#draw());
  }

  /** @param {Column} column */
  #sort(column) {
    this.#down = this.#by === column ? !this.#down : column.text !== undefined;
    this.#by = column;
    this.#draw();
  }

  #draw() {
    if (!this.root.checkVisibility()) return;
    const direction = this.#down ? "descending" : "ascending";
    COLUMNS.forEach((column, n) => {
      setAttribute(this.#heads[n], "aria-sort", column === this.#by ? direction : null);
    });
    const sorted = [...this.#store.sessions].sort(
      (left, right) => (this.#down ? -1 : 1) * compare(this.#by.of(left), this.#by.of(right)),
    );
    mirror(
      this.#body,
      sorted,
      (session) => session.key,
      () => el("tr", {}, ...COLUMNS.map(() => el("td"))),
      fill,
    );
  }
}

/** @param {HTMLElement} row @param {any} session */
function fill(row, session) {
  COLUMNS.forEach((column, n) => {
    const value = column.of(session);
    setText(row.children[n], value === null ? UNKNOWN : column.text ? column.text(value) : String(value));
  });
}

/** What is not known comes before everything that is. @param {string | number | null} left @param {string | number | null} right */
function compare(left, right) {
  if (left === null || right === null) return Number(left !== null) - Number(right !== null);
  return left < right ? -1 : Number(left > right);
}
