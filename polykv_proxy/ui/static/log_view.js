/**
 * Events as they happen, newest first.
 *
 * Law: a bounded list of what the store has; pausing holds the picture, not the events.
 */

import { byId, el, mirror, setAttribute } from "./dom.js";
import { clock } from "./words.js";

const SHOWN = 150;
const DULL = new Set(["ts", "seq", "kind", "id", "type"]);

export class LogView {
  #root = byId("log");
  #empty = byId("log-empty");
  #hold = byId("log-hold");
  #held = false;
  #store;

  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.#store = store;
    this.#hold.addEventListener("click", () => {
      this.#held = !this.#held;
      setAttribute(this.#hold, "aria-pressed", String(this.#held));
      this.#draw();
    });
    store.watch(() => this.#draw());
  }

  #draw() {
    if (this.#held) return;
    const events = this.#store.events.slice(-SHOWN).reverse();
    this.#empty.hidden = events.length > 0;
    mirror(
      this.#root,
      events,
      (event) => event.id,
      line,
      () => undefined,
    );
  }
}

/** @param {any} event */
function line(event) {
  return el("li", {}, el("time", {}, clock(event.ts)), el("b", {}, event.kind), el("span", {}, sentence(event)));
}

/** @param {any} event @returns {string} what else the event says */
export function sentence(event) {
  const parts = Object.entries(event).filter(([name, value]) => !DULL.has(name) && value !== null && value !== "");
  return parts.map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
}
