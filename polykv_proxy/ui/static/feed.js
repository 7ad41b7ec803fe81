/**
 * Keeps the store fed: two streams and a look now and then.
 *
 * Law: nothing is asked for while nobody looks for long, or while the key is wrong. A failure is a fact for the store, and the next try follows.
 */

import { Fault } from "./api.js";
import { LiveStream, rest } from "./stream.js";

const LOOK_MS = 2_000;
const BREATH_MS = 150;
const SAVINGS_MS = 30_000;
const UNSEEN_MS = 60_000;
/** Arms of no interest: the event stream leaves them out, too. */
const UNTOLD = new Set(["continuation", "no_policy"]);
const UNAUTHORIZED = 401;
const NOT_IMPLEMENTED = 501;

export class Feed {
  #api;
  #store;
  #etag = "";
  #streams;
  /** @type {AbortController | null} from start to stop */
  #life = null;
  #changed = false;
  #savingsAt = 0;
  #told = false;
  #wake = () => {};
  /** @type {number | undefined} */
  #unseen;

  /** @param {import("./api.js").Api} api @param {import("./store.js").Store} store */
  constructor(api, store) {
    this.#api = api;
    this.#store = store;
    this.#streams = [
      this.#stream("tps", (event) => {
        if (event.event === "tps") store.put({ tps: JSON.parse(event.data) });
      }),
      this.#stream("events", (event) => this.#happened(event)),
    ];
  }

  /** Begin, or begin anew: with another key, say. */
  start() {
    this.stop();
    this.#etag = "";
    this.#savingsAt = 0;
    this.#told = false;
    this.#life = new AbortController();
    this.#store.link("connecting");
    for (const stream of this.#streams) stream.start();
    this.#rounds(this.#life.signal);
  }

  stop() {
    this.#life?.abort();
    this.#life = null;
    for (const stream of this.#streams) stream.stop();
  }

  /** Look shortly: something has changed. Many calls are one look. */
  soon() {
    this.#changed = true;
    this.#wake();
  }

  /** The page is seen, or it is not: connections are few, and a forgotten tab shall not keep any. @param {boolean} seen */
  seen(seen) {
    clearTimeout(this.#unseen);
    if (!seen) this.#unseen = setTimeout(() => this.stop(), UNSEEN_MS);
    else if (!this.#life && this.#store.facts.link.state !== "locked") this.start();
  }

  /**
   * What was never heard of is asked for from where the page stood: all answers are numbered in one row.
   * @param {string} path @param {(event: import("./sse.js").SseEvent) => void} onEvent
   */
  #stream(path, onEvent) {
    const open = (/** @type {string} */ lastId, /** @type {AbortSignal} */ signal) =>
      this.#api.open(path, lastId || String(this.#store.facts.tps?.seq ?? ""), signal);
    return new LiveStream(open, { onEvent, onLost: (fault) => this.#failed(fault) });
  }

  /** `closing` is no news: that nothing comes any more will be seen. @param {import("./sse.js").SseEvent} event */
  #happened({ event, data }) {
    if (event === "closing") return;
    this.#store.happened({ topic: event, ts: Date.now() / 1000, type: event, ...JSON.parse(data) });
    if (event !== "request") this.soon();
  }

  /** One look after another, never two at a time. @param {AbortSignal} life */
  async #rounds(life) {
    while (!life.aborted) {
      this.#changed = false;
      await this.#look(life);
      await rest(BREATH_MS, life);
      if (!this.#changed) {
        const nap = new AbortController();
        this.#wake = () => nap.abort();
        await rest(LOOK_MS, AbortSignal.any([life, nap.signal]));
      }
    }
  }

  /** @param {AbortSignal} life */
  async #look(life) {
    const due = Date.now() - this.#savingsAt > SAVINGS_MS;
    const shared = this.#store.facts.health?.gpu_share?.enabled;
    const [health, pools, savings, admission, decisions, gpu] = await Promise.allSettled([
      this.#api.get("health"),
      this.#api.get("pools", this.#etag),
      due ? this.#api.get("savings") : null,
      this.#api.get("admission"),
      this.#told ? null : this.#api.get("decisions?limit=50"),
      shared ? this.#api.get("../gpu/peers") : null,
    ]);
    if (life.aborted) return;
    if (admission.status === "fulfilled") this.#store.put({ admission: admission.value?.body });
    if (decisions.status === "fulfilled" && decisions.value) this.#decided(decisions.value.body.decisions);
    if (due) this.#savingsAt = Date.now();
    if (savings.status === "fulfilled" && savings.value) this.#store.put({ savings: savings.value.body });
    if (gpu.status === "fulfilled") this.#store.put({ gpu: gpu.value?.body ?? null });
    if (health.status === "fulfilled") this.#store.put({ health: health.value?.body });
    if (pools.status === "fulfilled") this.#listed(pools.value);
    else this.#failed(pools.reason);
  }

  /** What was decided before this page listened; what it heard since is newer. @param {any[]} decisions newest first */
  #decided(decisions) {
    this.#told = true;
    const before = decisions.filter((one) => !UNTOLD.has(one.arm)).map((one) => ({ ...one, topic: "decision", type: one.outcome }));
    const known = new Set(before.map((one) => `${one.req} ${one.type}`));
    const since = this.#store.decisions.filter((one) => !known.has(`${one.req} ${one.type}`));
    this.#store.decided([...before.reverse(), ...since]);
  }

  /** @param {{body: any, etag: string} | null} answer */
  #listed(answer) {
    if (answer) {
      const { pools, ...tree } = answer.body;
      this.#etag = answer.etag;
      this.#store.put({ pools, tree });
    }
    this.#store.put({ refused: "" });
    this.#store.link("live");
  }

  /** @param {unknown} error */
  #failed(error) {
    const fault = error instanceof Fault ? error : new Fault(0, "", String(error));
    if (fault.status === UNAUTHORIZED) {
      this.stop();
      this.#store.link("locked", fault.message);
    } else if (fault.status === NOT_IMPLEMENTED) {
      this.#store.put({ refused: fault.message });
      this.#store.link("live");
    } else if (fault.status === 0) {
      this.#store.link("lost", fault.message);
    }
  }
}
