/**
 * How the engine and the connection are, and what stands in the way, in words.
 *
 * Law: one banner at a time, the worst first: 1. the key 2. no proxy 3. no engine 4. no pools.
 */

import { byId, setAttribute, setText } from "./dom.js";
import { duration } from "./words.js";

export class Status {
  #engine = byId("engine");
  #link = byId("link");
  #banner = byId("banner");

  /** @param {import("./store.js").Store} store */
  constructor(store) {
    store.watch(() => this.#draw(store.facts));
  }

  /** @param {import("./store.js").Facts} facts */
  #draw(facts) {
    const { state } = facts.link;
    setText(this.#link, { connecting: "connecting", live: "live", lost: "no connection", locked: "locked" }[state]);
    setAttribute(this.#link, "class", `pill ${state}`);
    const engine = facts.health?.state;
    setText(this.#engine, engine ? `engine ${engine}` : "");
    setAttribute(this.#engine, "class", `pill ${engine === "ready" ? "live" : "lost"}`);
    this.#engine.hidden = !engine || state === "lost";
    const text = bannerOf(facts, Date.now() / 1000);
    setText(this.#banner, text);
    this.#banner.hidden = !text;
    document.body.classList.toggle("stale", state === "lost" || state === "locked");
  }
}

/** @param {import("./store.js").Facts} facts @param {number} now @returns {string} empty when all is well */
export function bannerOf({ link, health, refused }, now) {
  if (link.state === "locked") return "This proxy wants an API key.";
  if (link.state === "lost")
    return `${sentence(link.reason)} What is shown is of ${duration(Math.max(1, Math.floor(now - link.since)))} ago; the connection comes back by itself.`;
  if (health?.state && health.state !== "ready") return engineWords(health, now);
  return refused ? sentence(refused) : "";
}

/** @param {any} health @param {number} now */
function engineWords(health, now) {
  const reason = health.reason ? `: ${health.reason}` : "";
  switch (health.state) {
    case "starting":
      return `The engine is starting${reason || ": the model is loading"}.`;
    case "draining":
      return "The proxy is being stopped: running requests end, new ones are refused.";
    case "failed":
      return `The engine is away${reason}.${health.retry_ts ? ` It is started again in ${duration(Math.max(0, Math.ceil(health.retry_ts - now)))}.` : ""}`;
    default:
      return `The engine is ${health.state}${reason}.`;
  }
}

/** @param {string} text */
function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` : "";
}
