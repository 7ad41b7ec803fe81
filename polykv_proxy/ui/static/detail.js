/**
 * One pool or session in full, beside the tree; over it on a phone.
 *
 * Law: follows the store while it is open. Text and tokens are asked for when they are opened, and cut until all of it is asked for.
 */

import { byId, el, mirror, setText } from "./dom.js";
import { poolTitle, sessionTitle } from "./tree.js";
import { ago, bytes, clock, count, duration, KEPT_BY, RESIDENCIES, rate, UNKNOWN } from "./words.js";

const FIRST_CHARACTERS = 20_000;

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
      this.#folded("Text", pool, "text", (answer) => answer.text),
      this.#folded("Tokens", pool, "tokens", (answer) => answer.tokens.join(" ")),
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

  /** A part that is asked for when it is opened. @param {string} title @param {any} pool @param {string} path @param {(answer: any) => string} textOf */
  #folded(title, pool, path, textOf) {
    const text = el("pre", { tabindex: 0, "aria-label": title });
    const details = /** @type {HTMLDetailsElement} */ (el("details", {}, el("summary", {}, title), text));
    details.addEventListener("toggle", async () => {
      if (!details.open || text.hasChildNodes()) return;
      setText(text, "…");
      try {
        const answer = await this.#api.get(`pools/${pool.pool_id}/${path}`);
        this.#fill(details, text, textOf(answer?.body));
      } catch (error) {
        text.replaceChildren();
        details.open = false;
        details.append(el("p", { class: "trouble", role: "alert" }, error instanceof Error ? error.message : String(error)));
      }
    });
    return details;
  }

  /** @param {HTMLElement} details @param {HTMLElement} text @param {string} whole */
  #fill(details, text, whole) {
    setText(text, whole.slice(0, FIRST_CHARACTERS));
    if (whole.length <= FIRST_CHARACTERS) return;
    const more = el("button", { type: "button" }, `Show all ${count(whole.length)} characters`);
    more.addEventListener("click", () => {
      setText(text, whole);
      more.remove();
    });
    details.append(more);
  }
}

/** What is shown of one thing: facts that follow it, and what can be done. */
class Sheet {
  #find;
  #facts;
  #actionsOf;
  #list = el("dl");
  #buttons = el("div", { class: "actions" });
  #gone = el("p", { class: "soft", hidden: true }, "This is gone.");
  root = el("div", { class: "sheet" }, this.#gone, this.#buttons, this.#list);
  also = () => {};

  /**
   * @param {string} kind @param {string} title @param {() => any} find the thing as it is now, undefined when it is gone
   * @param {(it: any, now: number) => [string, string][]} facts @param {(it: any) => import("./actions.js").Action[]} actionsOf
   */
  constructor(kind, title, find, facts, actionsOf) {
    this.kind = kind;
    this.title = title;
    this.#find = find;
    this.#facts = facts;
    this.#actionsOf = actionsOf;
  }

  draw() {
    const it = this.#find();
    this.#gone.hidden = it !== undefined;
    const actions = it ? this.#actionsOf(it) : [];
    mirror(
      this.#buttons,
      actions,
      (action) => action.title,
      (action) => el("button", { type: "button", class: action.danger ? "danger" : "" }, action.title),
      (node, action) => {
        node.onclick = action.act;
      },
    );
    if (it)
      mirror(
        this.#list,
        this.#facts(it, Date.now() / 1000),
        ([name]) => name,
        ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
        (node, [, value]) => setText(/** @type {Element} */ (node.lastElementChild), value),
      );
    this.also();
  }
}

/** @param {any} pool @param {number} now @returns {[string, string][]} */
function poolFacts(pool, now) {
  const residency = RESIDENCIES[pool.residency];
  const pinned = pool.pin_until_ts ? `until ${clock(pool.pin_until_ts)}` : "until unpinned";
  return [
    ["Residency", `${pool.residency}${residency ? `: ${residency}` : ""}${pool.reason ? ` (${pool.reason})` : ""}`],
    [
      "Tokens",
      `${count(pool.prefix_len)}${pool.parent === null ? "" : `, ${count(pool.prefix_len - pool.branch_pos)} of its own from ${count(pool.branch_pos)} of pool ${pool.parent}`}`,
    ],
    ["KV", `${bytes(pool.own_kv_bytes)} own, ${bytes(pool.subtree_kv_bytes)} with all below`],
    ["Stays because", pool.kept_by ? (KEPT_BY[pool.kept_by] ?? pool.kept_by) : "nothing keeps it"],
    [
      "Pin",
      pool.pinned
        ? `${pool.pin_owner ? `${pool.pin_owner}, ` : ""}${pinned}${pool.orphaned_pin ? "; nobody uses it" : ""}`
        : "none",
    ],
    [
      "Requests",
      `${count(pool.n_queries)}, ${count(pool.n_hits)} hit, ${count(pool.n_rebuilds)} rebuilt it, ${count(pool.n_running)} running`,
    ],
    ["Tokens saved", count(pool.n_tokens_shared)],
    ["Used", ago(pool.last_access_ts, now)],
    ["Made", `${ago(pool.created_ts, now)} from ${pool.source}`],
    ["Time to live", pool.ttl_s === null ? "no end" : duration(pool.ttl_s)],
    ["Prefix hash", pool.prefix_hash],
  ];
}

/** @param {any} session @returns {[string, string][]} */
function sessionFacts(session) {
  return [
    ["State", session.state],
    ["Pool", session.pool_id === null ? "none" : String(session.pool_id)],
    ["Tokens per second", rate(session.tps_ewma)],
    ["Time to first token", session.ttft_ms === null || session.ttft_ms === undefined ? UNKNOWN : duration(session.ttft_ms / 1000)],
    ["Context", `${count(session.ctx_used)} of ${count(session.ctx_total)}, room for ${count(session.ctx_headroom_tokens)}`],
    ["Own KV", bytes(session.marginal_kv_bytes)],
  ];
}

/** @param {HTMLElement} row @param {any} session */
function fillSession(row, session) {
  setText(row.children[1], session.state);
  setText(row.children[2], rate(session.tps_ewma));
  setText(row.children[3], bytes(session.marginal_kv_bytes));
}
