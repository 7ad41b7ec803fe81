/**
 * Admission: the floors that were set and the room above them, who waits, and what was decided last.
 *
 * Law: shows what `/polykv/admission` said last and the decisions that the store has. Hidden where nothing was ever to be decided.
 */

import { el, mirror, setAttribute, setText } from "./dom.js";
import { groundWords } from "./event_words.js";
import { modeWords } from "./facts.js";
import { policyTitle } from "./store.js";
import { clock, count, duration, plural, rate } from "./words.js";

const SHOWN = 20;

export class AdmissionView {
  #sum = el("p", { class: "readout" });
  #policies = el("tbody");
  #queue = el("tbody");
  #decisions = el("tbody");

  /** @param {HTMLElement} root @param {import("./store.js").Store} store */
  constructor(root, store) {
    root.append(
      el("header", {}, el("h2", {}, "Admission"), this.#sum),
      table("Policies", ["For", "Floor", "Policy", "Sessions", "Room", "Now"], this.#policies),
      table("Waiting", ["Place", "Session", "Waited", "For"], this.#queue),
      table("Last decisions", ["Time", "Session", "Outcome", "Why"], this.#decisions),
    );
    store.watch(() => {
      const { admission } = store.facts;
      root.hidden = !admission || !(admission.policies.length || admission.max_running || store.decisions.length);
      if (!root.hidden) this.#draw(admission, store.decisions);
    });
  }

  /** @param {any} admission @param {any[]} decisions newest last */
  #draw(admission, decisions) {
    setText(this.#sum, sumWords(admission));
    rows(this.#policies, admission.policies, (one) => String(one.pool_id), policyCells);
    rows(this.#queue, admission.queue.slice(0, SHOWN), (one) => String(one.req), waitingCells);
    rows(this.#decisions, decisions.slice(-SHOWN).reverse(), (one) => `${one.req} ${one.type}`, decisionCells);
  }
}

/** @param {any} admission @returns {string} who runs and who waits */
export function sumWords({ n_running, max_running, n_queued }) {
  const most = max_running ? ` of ${count(max_running)}` : "";
  return `${count(n_running)}${most} running, ${plural(n_queued, "waits", "wait")}`;
}

/** @param {any} policy @returns {string[]} */
export function policyCells(policy) {
  const settling = policy.settling ? `settling, ${duration(policy.settle_remaining_ms / 1000)} at most` : "";
  return [
    policyTitle(policy),
    `${rate(policy.floor_tps)} tok/s`,
    modeWords(policy),
    count(policy.n_pool_sessions),
    policy.headroom_sessions >= 1_000_000 ? "no limit" : count(policy.headroom_sessions),
    settling || groundWords(policy),
  ];
}

/** @param {any} waiting @returns {string[]} */
function waitingCells(waiting) {
  const where = waiting.pool_id === null ? "" : `, pool ${waiting.pool_id}`;
  return [count(waiting.position), `${named(waiting)}${where}`, duration(waiting.waited_ms / 1000), waiting.reason];
}

/** @param {any} decision @returns {string[]} */
function decisionCells(decision) {
  const would = decision.would ? ` (would be ${decision.would})` : "";
  return [clock(decision.ts), named(decision), `${decision.type.replaceAll("_", " ")}${would}`, groundWords(decision)];
}

/** @param {any} one */
function named({ session_id, req }) {
  return session_id ?? `request ${req}`;
}

/** @param {string} title @param {string[]} heads @param {HTMLElement} body */
function table(title, heads, body) {
  const head = el("tr", {}, ...heads.map((name) => el("th", { scope: "col" }, name)));
  const place = { class: "table words", role: "region", tabindex: 0, "aria-label": title };
  return el("div", place, el("table", {}, el("caption", {}, title), el("thead", {}, head), body));
}

/** @param {HTMLElement} body @param {any[]} items @param {(item: any) => string} key @param {(item: any) => string[]} cells */
function rows(body, items, key, cells) {
  mirror(
    body,
    items,
    key,
    (item) => el("tr", {}, ...cells(item).map(() => el("td"))),
    (node, item) => {
      cells(item).forEach((text, n) => {
        setText(node.children[n], text);
      });
    },
  );
  setAttribute(/** @type {HTMLElement} */ (body.closest(".table")), "hidden", items.length === 0);
}
