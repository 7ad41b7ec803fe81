/**
 * What pools saved, day by day, and what they did not save, by reason.
 *
 * Law: shows `/polykv/savings` as it was last asked for.
 */

import { el, mirror, setText } from "./dom.js";
import { count, duration, plural } from "./words.js";

const DAYS = 7;

export class SavingsView {
  #days = el("tbody");
  #misses = el("tbody");
  #sum = el("p", { class: "readout" });

  /** @param {HTMLElement} root @param {import("./store.js").Store} store */
  constructor(root, store) {
    root.append(
      el("header", {}, el("h2", {}, "Saved by pools"), this.#sum),
      el("div", { class: "table" }, table("By day", ["Day", "Tokens", "Time", "Requests"], this.#days)),
      el("div", { class: "table" }, table("Misses", ["Reason", "Tokens", "Time", "Requests"], this.#misses)),
    );
    store.watch(() => {
      root.hidden = !store.facts.savings;
      if (store.facts.savings) this.#draw(store.facts.savings);
    });
  }

  /** @param {any} savings */
  #draw(savings) {
    setText(this.#sum, `${plural(savings.n_tokens, "token")}, about ${duration(savings.seconds)}`);
    const days = savings.days.slice(-DAYS).reverse();
    mirror(
      this.#days,
      days,
      (day) => day.day,
      row,
      (node, day) => fill(node, day.day, day),
    );
    const misses = Object.entries(savings.misses).sort(([, left], [, right]) => right.n_tokens - left.n_tokens);
    mirror(
      this.#misses,
      misses,
      ([reason]) => reason,
      row,
      (node, [reason, amount]) => fill(node, reason, amount),
    );
    const shown = /** @type {HTMLElement} */ (this.#misses.closest(".table"));
    shown.hidden = misses.length === 0;
  }
}

/** @param {string} title @param {string[]} heads @param {HTMLElement} body */
function table(title, heads, body) {
  const row = el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)));
  return el("table", {}, el("caption", {}, title), el("thead", {}, row), body);
}

function row() {
  return el("tr", {}, el("td"), el("td"), el("td"), el("td"));
}

/** @param {HTMLElement} node @param {string} name @param {any} amount */
function fill(node, name, { n_tokens, seconds, n_requests }) {
  [name.replaceAll("_", " "), count(n_tokens), duration(seconds), count(n_requests)].forEach((text, n) => {
    setText(node.children[n], text);
  });
}
