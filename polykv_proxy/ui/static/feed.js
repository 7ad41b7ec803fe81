/**
 * Keeps the store fed: two streams and a look now and then.
 *
 * Law: nothing is asked for while nobody looks for long, or while the key is wrong. A failure is a fact for the store, and the next try follows.
 */

import { Fault } from "./api.js";
import { LiveStream } from "./stream.js";

const LOOK_MS = 2_000;
const SOON_MS = 150;
const UNSEEN_MS = 60_000;
const UNAUTHORIZED = 401;
const NOT_IMPLEMENTED = 501;

export class Feed {
  #api;
  #store;
  #etag = "";
  #running = false;
  /** @type {number | undefined} */
  #timer;
  /** @type {number | undefined} */
  #unseen;
  #streams;

  /** @param {import("./api.js").Api} api @param {import("./store.js").Store} store */
  constructor(api, store) {
    this.#api = api;
    this.#store = store;
    this.#streams = [
      this.#stream("tps", (event) => store.put({ tps: JSON.parse(event.data) })),
      this.#stream("events", (event) => {
        store.happened({ ...JSON.parse(event.data), kind: event.event, id: event.id });
        this.soon();
      }),
    ];
  }

  /** Begin, or begin anew: with another key, say. */
  start() {
    this.#running = true;
    this.#etag = "";
    this.#store.link("connecting");
    for (const stream of this.#streams) stream.start();
    this.#look();
  }

  stop() {
    this.#running = false;
    clearTimeout(this.#timer);
    for (const stream of this.#streams) stream.stop();
  }

  /** Look shortly: something has changed. Many calls are one look. */
  soon() {
    if (!this.#running) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#look(), SOON_MS);
  }

  /** The page is seen, or it is not: connections are few, and a forgotten tab shall not keep any. @param {boolean} seen */
  seen(seen) {
    clearTimeout(this.#unseen);
    if (!seen) this.#unseen = setTimeout(() => this.stop(), UNSEEN_MS);
    else if (!this.#running && this.#store.facts.link.state !== "locked") this.start();
  }

  /** @param {string} path @param {(event: import("./sse.js").SseEvent) => void} onEvent */
  #stream(path, onEvent) {
    return new LiveStream((lastId, signal) => this.#api.open(path, lastId, signal), {
      onEvent,
      onOpen: () => undefined,
      onLost: (fault) => this.#failed(fault),
    });
  }

  async #look() {
    clearTimeout(this.#timer);
    const [health, pools, capacity] = await Promise.allSettled([
      this.#api.get("health"),
      this.#api.get("pools", this.#etag),
      this.#api.get("capacity"),
    ]);
    if (!this.#running) return;
    if (health.status === "fulfilled") this.#store.put({ health: health.value?.body });
    this.#store.put({ capacity: capacity.status === "fulfilled" ? capacity.value?.body : null });
    if (pools.status === "fulfilled") this.#listed(pools.value);
    else this.#failed(pools.reason);
    if (this.#running) this.#timer = setTimeout(() => this.#look(), LOOK_MS);
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
