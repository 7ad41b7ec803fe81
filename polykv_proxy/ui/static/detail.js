/**
 * One pool or session in full, beside the tree; over it on a phone.
 *
 * Law: follows the store while it is open.
 */

import { byId, el, mirror, setText } from "./dom.js";
import { poolFacts, sessionFacts } from "./facts.js";
import { folded } from "./folded.js";
import { Sheet } from "./sheet.js";
import { poolTitle, sessionTitle } from "./tree.js";
import { bytes, rate } from "./words.js";

export class Detail {
  #root = byId("detail");
  #store;
  #api;
  #actions;
  #closed;
  #key = "";
  /** @type {Sheet | null} */
  #sheet = null;

  /**
   * @param {import("./store.js").Store} store @param {import("./api.js").Api} api @param {import("./actions.js").Actions} actions
   * @param {(key: string) => void} closed hears which row it was about
   */
  constructor(store, api, actions, closed) {
    this.#store = store;
    this.#api = api;
    this.#actions = actions;
    this.#closed = closed;
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.close();
    });
    store.watch(() => this.#draw());
  }

  /** @param {{kind: string, it: any, key: string}} row */
  show({ kind, it, key }) {
    this.#key = key;
    this.#sheet = kind === "pool" ? this.#poolSheet(it) : this.#sessionSheet(it);
    const close = el("button", { type: "button", class: "quiet", "aria-label": "Close", click: () => this.close() }, "✕");
    const title = el("h2", { id: "detail-title", tabindex: -1 }, this.#sheet.title);
    this.#root.replaceChildren(
      el("header", {}, el("div", {}, el("p", { class: "soft" }, this.#sheet.kind), title), close),
      this.#sheet.root,
    );
    this.#root.hidden = false;
    this.#draw();
    title.focus();
  }

  close() {
    if (this.#root.hidden) return;
    this.#root.hidden = true;
    this.#root.replaceChildren();
    this.#sheet = null;
    this.#closed(this.#key);
  }

  /** What had the focus may be gone after it: then the title has it. */
  #draw() {
    const held = this.#root.contains(document.activeElement);
    this.#sheet?.draw();
    if (held && !this.#root.contains(document.activeElement)) byId("detail-title").focus();
  }

  /** @param {any} pool @returns {Sheet} */
  #poolSheet(pool) {
    const find = () => this.#store.pool(pool.pool_id);
    const sheet = new Sheet(`Pool ${pool.pool_id}`, poolTitle(pool), find, poolFacts, (now) => this.#actions.ofPool(now));
    const rows = el("tbody");
    const heads = ["Session", "State", "tok/s", "Own KV"].map((title) => el("th", { scope: "col" }, title));
    const table = el("table", {}, el("caption", {}, "Sessions"), el("thead", {}, el("tr", {}, ...heads)), rows);
    sheet.root.append(
      el("div", { class: "table" }, table),
      folded("Text", async () => (await this.#api.get(`pools/${pool.pool_id}/text`))?.body.text),
      folded("Tokens", async () => (await this.#api.get(`pools/${pool.pool_id}/tokens`))?.body.tokens.join(" ")),
    );
    sheet.also = () => {
      const sessions = this.#store.sessions.filter((session) => session.pool_id === pool.pool_id);
      table.hidden = sessions.length === 0;
      mirror(
        rows,
        sessions,
        (session) => session.key,
        (session) => this.#sessionRow(session),
        fillSession,
      );
    };
    return sheet;
  }

  /** @param {any} session */
  #sessionRow(session) {
    const open = el(
      "button",
      { type: "button", class: "link", click: () => this.show({ kind: "session", it: session, key: session.key }) },
      sessionTitle(session),
    );
    return el("tr", {}, el("td", {}, open), el("td"), el("td"), el("td"));
  }

  /** @param {any} session @returns {Sheet} */
  #sessionSheet(session) {
    return new Sheet(
      "Session",
      sessionTitle(session),
      () => this.#store.session(session.key),
      sessionFacts,
      (now) => this.#actions.ofSession(now),
    );
  }
}

/** @param {HTMLElement} row @param {any} session */
function fillSession(row, session) {
  setText(row.children[1], session.state);
  setText(row.children[2], rate(session.tps_ewma));
  setText(row.children[3], bytes(session.marginal_kv_bytes));
}
