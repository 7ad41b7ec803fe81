/**
 * Events as they happen, newest first.
 *
 * Law: a bounded list of what the store has; pausing holds the picture, not the events.
 */

import { byId, el, mirror, setAttribute } from "./dom.js";
import { CHOICES, eventWords } from "./event_words.js";
import { clock } from "./words.js";

const SHOWN = 150;

export class LogView {
  #root = byId("log");
  #empty = byId("log-empty");
  #hold = byId("log-hold");
  #choice = /** @type {HTMLSelectElement} */ (byId("log-choice"));
  #held = false;
  #store;

  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.#store = store;
    this.#choice.append(...Object.keys(CHOICES).map((choice) => el("option", {}, choice)));
    this.#choice.addEventListener("change", () => this.#draw());
    this.#hold.addEventListener("click", () => {
      this.#held = !this.#held;
      setAttribute(this.#hold, "aria-pressed", String(this.#held));
      this.#draw();
    });
    store.watch(() => this.#draw());
  }

  #draw() {
    if (this.#held) return;
    const events = this.#store.events.filter(CHOICES[this.#choice.value]).slice(-SHOWN).reverse();
    this.#empty.hidden = events.length > 0;
    mirror(
      this.#root,
      events,
      (event) => String(event.seq),
      line,
      () => undefined,
    );
  }
}

/** @param {import("./event_words.js").HappenedEvent} event */
function line(event) {
  return el("li", { class: event.topic }, el("time", {}, clock(event.ts)), el("span", {}, eventWords(event)));
}
