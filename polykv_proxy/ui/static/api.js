/**
 * The proxy's routes as seen from this page.
 *
 * Law: the one place that knows addresses and the key. The key lives in this tab's sessionStorage and goes nowhere but into the
 * Authorization header. Every failure is a Fault with words fit to be shown.
 */

const KEY = "polykv-key";
const PATIENCE_MS = 15_000;

/** A failed call: `status` is the HTTP status, 0 when nothing answered; `code` is the proxy's word for it. */
export class Fault extends Error {
  /** @param {number} status @param {string} code @param {string} message */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Calls below one address, with one key. */
export class Api {
  #base;
  #storage;

  /** @param {string} base address of the page; routes are relative to it @param {Storage} storage keeps the key */
  constructor(base, storage) {
    this.#base = base;
    this.#storage = storage;
  }

  /** @returns {string} the key, empty without one */
  get key() {
    return this.#storage.getItem(KEY) ?? "";
  }

  /** @param {string} key empty: forget it */
  set key(key) {
    if (key) this.#storage.setItem(KEY, key);
    else this.#storage.removeItem(KEY);
  }

  /**
   * @param {string} path below /polykv/
   * @param {string} [etag] of the answer that the caller has
   * @returns {Promise<{body: any, etag: string} | null>} null when it is still the same
   */
  async get(path, etag = "") {
    const reply = await this.#fetch(path, {
      headers: etag ? { "If-None-Match": etag } : {},
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (reply.status === 304) return null;
    return { body: await json(reply), etag: reply.headers.get("etag") ?? "" };
  }

  /** @param {"POST" | "DELETE"} method @param {string} path @param {object} [body] @returns {Promise<any>} */
  async send(method, path, body) {
    const sent = body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    return json(await this.#fetch(path, { method, signal: AbortSignal.timeout(PATIENCE_MS), ...sent }));
  }

  /**
   * An event stream, opened.
   * @param {string} path @param {string} lastId of the last event that was seen, or empty @param {AbortSignal} signal
   * @returns {Promise<ReadableStream<Uint8Array>>}
   */
  async open(path, lastId, signal) {
    const headers = { Accept: "text/event-stream", ...(lastId ? { "Last-Event-ID": lastId } : {}) };
    const reply = await this.#fetch(path, { headers, signal });
    if (!reply.body) throw new Fault(0, "no_stream", "the proxy answered without a stream");
    return reply.body;
  }

  /** @param {string} path @param {RequestInit & {headers?: Record<string, string>}} options */
  async #fetch(path, options) {
    const headers = { ...options.headers, ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
    let reply;
    try {
      reply = await fetch(new URL(path, this.#base), { ...options, headers, cache: "no-store" });
    } catch (error) {
      throw unreachable(error);
    }
    if (!reply.ok && reply.status !== 304) throw await refusal(reply);
    return reply;
  }
}

/** @param {Response} reply */
async function json(reply) {
  try {
    return await reply.json();
  } catch (error) {
    throw unreachable(error);
  }
}

/** @param {unknown} error */
function unreachable(error) {
  const slow = error instanceof DOMException && error.name === "TimeoutError";
  return new Fault(0, slow ? "slow" : "unreachable", slow ? "the proxy does not answer in time" : "the proxy does not answer");
}

/** @param {Response} reply */
async function refusal(reply) {
  const { error } = await reply.json().catch(() => ({}));
  return new Fault(reply.status, String(error?.code ?? ""), String(error?.message ?? `the proxy answered ${reply.status}`));
}
