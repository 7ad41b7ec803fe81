/**
 * A long text that is asked for when it is unfolded.
 *
 * Law: asked for once; after a failure, which stands in its place, once more at the next unfolding. Cut until all of it is asked for.
 */

import { el, setText } from "./dom.js";
import { count } from "./words.js";

const FIRST_CHARACTERS = 20_000;

/** @param {string} title @param {() => Promise<string>} ask @returns {HTMLElement} */
export function folded(title, ask) {
  const text = el("pre", { tabindex: 0, "aria-label": title });
  const details = /** @type {HTMLDetailsElement} */ (el("details", {}, el("summary", {}, title), text));
  let asked = false;
  details.addEventListener("toggle", async () => {
    if (!details.open || asked) return;
    asked = true;
    setText(text, "…");
    try {
      fill(details, text, await ask());
    } catch (error) {
      asked = false;
      setText(text, error instanceof Error ? error.message : String(error));
    }
  });
  return details;
}

/** @param {HTMLElement} details @param {HTMLElement} text @param {string} whole */
function fill(details, text, whole) {
  setText(text, whole.slice(0, FIRST_CHARACTERS));
  if (whole.length <= FIRST_CHARACTERS) return;
  const more = el("button", { type: "button" }, `Show all ${count(whole.length)} characters`);
  more.addEventListener("click", () => {
    setText(text, whole);
    more.remove();
  });
  details.append(more);
}
