/**
 * An event stream that comes back.
 *
 * Law: from start to stop there is one connection or one pause before the next. What was missed is asked for by the last event's id.
 * Silence is no life: the server sends a comment now and then, and without any byte for a while the connection is given up.
 */

import { Fault } from "./api.js";
import { SseParser } from "./sse.js";

const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 15_000;
const SILENCE_MS = 45_000;

/**
 * @typedef {object} Ears
 * @property {(event: import("./sse.js").SseEvent) => void} onEvent
 * @property {(fault: Fault, pauseMs: number) => void} onLost each time it is not, with the pause before the next try
 */

/** One stream. */
export class LiveStream {
  #open;
  #ears;
  #lastId = "";
  /** @type {AbortController | null} */
  #life = null;

  /** @param {(lastId: string, signal: AbortSignal) => Promise<ReadableStream<Uint8Array>>} open @param {Ears} ears */
  constructor(open, ears) {
    this.#open = open;
    this.#ears = ears;
  }

  /** Connect, and stay so. Connects anew at once where it is in a pause. */
  start() {
    this.stop();
    this.#life = new AbortController();
    this.#run(this.#life.signal);
  }

  /** Let go. */
  stop() {
    this.#life?.abort();
    this.#life = null;
  }

  /** @param {AbortSignal} life */
  async #run(life) {
    let pause = FIRST_PAUSE_MS;
    while (!life.aborted) {
      try {
        await this.#listen(life, () => {
          pause = FIRST_PAUSE_MS;
        });
      } catch (error) {
        if (life.aborted) return;
        this.#ears.onLost(error instanceof Fault ? error : new Fault(0, "unreachable", "the connection to the proxy broke"), pause);
      }
      await rest(pause, life);
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }

  /** Read until it ends, which is a loss. @param {AbortSignal} life @param {() => void} opened */
  async #listen(life, opened) {
    const attempt = new AbortController();
    const signal = AbortSignal.any([life, attempt.signal]);
    let guard = setTimeout(() => attempt.abort(), SILENCE_MS);
    try {
      const reader = (await this.#open(this.#lastId, signal)).getReader();
      const decoder = new TextDecoder();
      opened();
      const parser = new SseParser();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) throw new Fault(0, "ended", "the proxy ended the stream");
        clearTimeout(guard);
        guard = setTimeout(() => attempt.abort(), SILENCE_MS);
        for (const event of parser.feed(decoder.decode(value, { stream: true }))) {
          this.#lastId = event.id;
          this.#ears.onEvent(event);
        }
      }
    } finally {
      clearTimeout(guard);
    }
  }
}

/** A pause that ends early with the signal. @param {number} ms @param {AbortSignal} life @returns {Promise<void>} */
export function rest(ms, life) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      life.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    if (life.aborted) end();
    else life.addEventListener("abort", end);
  });
}
