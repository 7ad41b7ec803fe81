/**
 * What can be done to a pool or a session, each with its question.
 *
 * Law: nothing is done without a yes; the proxy decides what may be done, its refusal is shown as it comes.
 */

import { ask } from "./ask.js";
import { el } from "./dom.js";
import { poolTitle, sessionTitle } from "./tree.js";
import { bytes, count, plural } from "./words.js";

/** @typedef {{title: string, danger?: boolean, act: () => Promise<void>}} Action */

const LEASES = [
  ["600", "10 minutes"],
  ["3600", "1 hour"],
  ["86400", "1 day"],
  ["none", "until unpinned (admin key)"],
];

export class Actions {
  #api;
  #said;

  /** @param {import("./api.js").Api} api @param {(text: string) => void} said hears what was done */
  constructor(api, said) {
    this.#api = api;
    this.#said = said;
  }

  /** @param {any} pool @returns {Action[]} */
  ofPool(pool) {
    const found = [pool.pinned ? this.#unpin(pool) : this.#pin(pool), this.#evict(pool)];
    if (pool.children.length) found.push(this.#flush(pool));
    return [...found, this.#release(pool)];
  }

  /** @param {any} session @returns {Action[]} */
  ofSession(session) {
    if (session.session_id === null) return [];
    const name = sessionTitle(session);
    return [
      {
        title: "End session",
        danger: true,
        act: () =>
          this.#ask(
            `End session ${name}?`,
            "A running request of it is cancelled, and its KV is freed.",
            "End it",
            true,
            async () => {
              const ended = await this.#api.send("DELETE", `sessions?session_id=${encodeURIComponent(session.session_id)}`);
              return `Session ${name} has ended; ${plural(ended.cells_freed, "cell")} freed.`;
            },
          ),
      },
    ];
  }

  /** @param {any} pool @returns {Action} */
  #pin(pool) {
    const options = LEASES.map(([value, text]) => el("option", { value }, text));
    const fields = [
      el("label", {}, "For", el("select", { name: "lease" }, ...options)),
      el("label", {}, "Owner", el("input", { name: "owner", maxlength: 64, autocomplete: "off", placeholder: "optional" })),
    ];
    const act = () =>
      this.#ask(
        `Pin ${poolTitle(pool)}?`,
        "Its KV is kept when nobody uses it.",
        "Pin",
        false,
        async ({ lease, owner }) => {
          await this.#api.send("POST", `pools/${pool.pool_id}/pin`, {
            lease: lease === "none" ? lease : Number(lease),
            ...(owner.trim() ? { owner: owner.trim() } : {}),
          });
          return `${poolTitle(pool)} is pinned.`;
        },
        fields,
      );
    return { title: "Pin", act };
  }

  /** @param {any} pool @returns {Action} */
  #unpin(pool) {
    const owner = pool.pin_owner ? ` It was pinned by ${pool.pin_owner}.` : "";
    const act = () =>
      this.#ask(`Unpin ${poolTitle(pool)}?`, `Its KV may go when nobody uses it.${owner}`, "Unpin", false, async () => {
        await this.#api.send("POST", `pools/${pool.pool_id}/unpin`, {});
        return `${poolTitle(pool)} is no longer pinned.`;
      });
    return { title: "Unpin", act };
  }

  /** @param {any} pool @returns {Action} */
  #evict(pool) {
    const text = `Drops its ${bytes(pool.own_kv_bytes)} of KV and keeps the tokens. The next request that names it computes ${plural(pool.prefix_len - pool.n_shared, "token")} again.`;
    const act = () =>
      this.#ask(`Evict ${poolTitle(pool)}?`, text, "Evict", true, async () => {
        const { evicted } = await this.#api.send("POST", `pools/${pool.pool_id}/evict`);
        return evicted ? `${poolTitle(pool)} is evicted.` : `${poolTitle(pool)} had no KV.`;
      });
    return { title: "Evict", danger: true, act };
  }

  /** @param {any} pool @returns {Action} */
  #flush(pool) {
    const act = () =>
      this.#ask(
        `Flush ${poolTitle(pool)}?`,
        "Evicts what is idle of it and of everything below it. Tokens are kept.",
        "Flush",
        true,
        async () => {
          const { evicted, kept } = await this.#api.send("POST", `pools/${pool.pool_id}/flush`);
          return `${plural(evicted.length, "pool")} evicted, ${count(kept.length)} kept.`;
        },
      );
    return { title: "Flush", danger: true, act };
  }

  /** @param {any} pool @returns {Action} */
  #release(pool) {
    const all = pool.children.length > 0;
    const fields = all
      ? [
          el(
            "label",
            { class: "check" },
            el("input", { name: "recursive", type: "checkbox", value: "1" }),
            "and everything below it",
          ),
        ]
      : [];
    const act = () =>
      this.#ask(
        `Release ${poolTitle(pool)}?`,
        "The pool is gone after that: requests that name it get 404. Idle sessions keep their own KV.",
        "Release",
        true,
        async ({ recursive }) => {
          const released = await this.#api.send("DELETE", `pools/${pool.pool_id}${recursive ? "?recursive=1" : ""}`);
          return released.released
            ? `${poolTitle(pool)} is released.`
            : `${poolTitle(pool)} goes with its last request (${count(released.n_running)} running).`;
        },
        fields,
      );
    return { title: "Release", danger: true, act };
  }

  /**
   * @param {string} title @param {string} text @param {string} verb @param {boolean} danger
   * @param {(values: Record<string, string>) => Promise<string>} act @param {HTMLElement[]} [fields]
   */
  async #ask(title, text, verb, danger, act, fields = []) {
    const tell = async (/** @type {Record<string, string>} */ values) => this.#said(await act(values));
    await ask({ title, text, verb, danger, fields, act: tell });
  }
}
