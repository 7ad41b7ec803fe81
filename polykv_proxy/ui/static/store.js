/**
 * What this page knows, and who wants to hear of changes.
 *
 * Law: facts come in by `put`, views read them; however many facts come, views are told once per frame.
 */

import { History } from "./history.js";
import { sessionTitle } from "./tree.js";

const EVENTS_KEPT = 1000;
const DECISIONS_KEPT = 50;
const HISTORY_S = 300;
const FLOORS_DRAWN = 4;

/**
 * @typedef {object} Facts
 * @property {{state: "connecting" | "live" | "lost" | "locked", reason: string, since: number}} link to the proxy
 * @property {any} health of `/polykv/health`
 * @property {string} refused why there are no pools at all, empty when there are
 * @property {any[]} pools of `/polykv/pools`
 * @property {any} tree the rest of that answer
 * @property {any} savings of `/polykv/savings`, null until the first of it
 * @property {any} admission of `/polykv/admission`, null until the first of it
 * @property {any} gpu of `/gpu/peers`, null until the first of it
 * @property {any} tps null until the first of `/polykv/tps`
 */

/** @typedef {{key: string, session_id: string | null, pool_id: number | null, state: string, [fact: string]: any}} Session */

export class Store {
  /** @type {Facts} */
  facts = {
    link: { state: "connecting", reason: "", since: Date.now() / 1000 },
    health: null,
    refused: "",
    pools: [],
    tree: {},
    tps: null,
    savings: null,
    admission: null,
    gpu: null,
  };
  /** @type {any[]} newest last */
  events = [];
  /** @type {any[]} of admission, newest last */
  decisions = [];
  /** @type {Session[]} */
  sessions = [];
  history = new History(HISTORY_S);
  /** @type {Set<(store: Store) => void>} */
  #views = new Set();
  #asked = false;
  #schedule;

  /** @param {(callback: () => void) => unknown} schedule when views are told */
  constructor(schedule = (callback) => requestAnimationFrame(callback)) {
    this.#schedule = schedule;
  }

  /** @param {(store: Store) => void} view is called after changes */
  watch(view) {
    this.#views.add(view);
    this.touch();
  }

  /** @param {Partial<Facts>} facts */
  put(facts) {
    Object.assign(this.facts, facts);
    if (facts.tps) this.history.add(facts.tps, running(facts.tps), floors(this.facts.admission));
    if (facts.pools || facts.tps) this.sessions = sessionsOf(this.facts.pools, this.facts.tps?.sessions ?? []);
    this.touch();
  }

  /** @param {Facts["link"]["state"]} state @param {string} [reason] */
  link(state, reason = "") {
    const { link } = this.facts;
    this.put({ link: { state, reason, since: link.state === state ? link.since : Date.now() / 1000 } });
  }

  /** @param {any} event */
  happened(event) {
    this.events.push(event);
    if (this.events.length > EVENTS_KEPT) this.events.splice(0, this.events.length - EVENTS_KEPT);
    if (event.topic === "decision") this.decided([...this.decisions, event]);
    this.touch();
  }

  /** @param {any[]} decisions newest last */
  decided(decisions) {
    this.decisions = decisions.slice(-DECISIONS_KEPT);
    this.touch();
  }

  /** Tell the views in the next frame. */
  touch() {
    if (this.#asked) return;
    this.#asked = true;
    this.#schedule(() => {
      this.#asked = false;
      for (const view of this.#views) view(this);
    });
  }

  /** @param {number} id */
  pool(id) {
    return this.facts.pools.find((pool) => pool.pool_id === id);
  }

  /** @param {string} key */
  session(key) {
    return this.sessions.find((session) => session.key === key);
  }
}

/** @param {any} session @returns {string} the same for the same session in all answers */
export function sessionKey(session) {
  return session.session_id === null ? `request ${session.req ?? session.slot}` : `session ${session.session_id}`;
}

/**
 * All sessions, those of pools in the order of pools; what the stream says is newer than what the list says.
 * @param {any[]} pools @param {any[]} running of `/polykv/tps` @returns {Session[]}
 */
export function sessionsOf(pools, running) {
  const found = new Map();
  for (const pool of pools) {
    for (const session of pool.sessions)
      found.set(sessionKey(session), { ...session, key: sessionKey(session), pool_id: pool.pool_id });
  }
  for (const session of running)
    found.set(sessionKey(session), { ...found.get(sessionKey(session)), ...session, key: sessionKey(session) });
  return [...found.values()];
}

/** @param {any} tps @returns {{key: string, title: string, tps: number}[]} who runs, and how fast */
function running(tps) {
  const active = tps.sessions.filter(
    (/** @type {any} */ session) => session.state === "active" && typeof session.tps_ewma === "number",
  );
  return active.map((/** @type {any} */ session) => ({
    key: sessionKey(session),
    title: sessionTitle(session),
    tps: session.tps_ewma,
  }));
}

/** @param {any} admission @returns {{key: string, title: string, tps: number}[]} what policies want kept */
function floors(admission) {
  return (admission?.policies ?? []).slice(0, FLOORS_DRAWN).map((/** @type {any} */ policy) => ({
    key: `floor ${policy.pool_id}`,
    title: `floor of ${policyTitle(policy)}`,
    tps: policy.floor_tps,
  }));
}

/** @param {any} policy of `/polykv/admission` */
export function policyTitle(policy) {
  return policy.pool_id === null ? "requests without a pool" : (policy.name ?? `pool ${policy.pool_id}`);
}
