/**
 * Server-sent events out of text.
 *
 * Law: pure; the same events come out wherever the text was cut. A comment is no event, but a sign of life.
 */

/** @typedef {{id: string, event: string, data: string}} SseEvent */

/** Takes text as it comes. */
export class SseParser {
  #rest = "";
  #id = "";
  #event = "";
  /** @type {string[]} */
  #data = [];

  /** @param {string} text @returns {SseEvent[]} the events that are whole with it */
  feed(text) {
    // A CR at the very end may be half of a CRLF: it waits for what follows.
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop() ?? "";
    const found = [];
    for (const line of lines) {
      if (line) this.#field(line);
      else if (this.#data.length) found.push(this.#take());
      else this.#event = "";
    }
    return found;
  }

  /** @param {string} line */
  #field(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    else if (name === "id" && !value.includes("\0")) this.#id = value;
  }

  #take() {
    const event = { id: this.#id, event: this.#event || "message", data: this.#data.join("\n") };
    this.#data = [];
    this.#event = "";
    return event;
  }
}
