/**
 * Questions to the person: a confirmation, the key.
 *
 * Law: one dialog at a time, the browser's own (focus stays inside, Escape says no). What was typed goes to the caller only.
 */

import { el } from "./dom.js";

/**
 * @typedef {object} Question
 * @property {string} title
 * @property {string} text
 * @property {string} verb on the button that says yes
 * @property {boolean} [danger] the focus begins on the button that says no
 * @property {HTMLElement[]} [fields] labels with named inputs in them
 * @property {(values: Record<string, string>) => Promise<void>} act what yes does; a failure is shown, and the question stays
 */

/** @param {Question} question @returns {Promise<boolean>} was it done */
export function ask({ title, text, verb, danger = false, fields = [], act }) {
  const no = el("button", { type: "button" }, "Cancel");
  const yes = /** @type {HTMLButtonElement} */ (el("button", { type: "submit", class: danger ? "danger" : "primary" }, verb));
  const trouble = el("p", { class: "trouble", role: "alert" });
  const form = /** @type {HTMLFormElement} */ (
    el(
      "form",
      {},
      el("h2", { id: "ask-title" }, title),
      el("p", { id: "ask-text" }, text),
      ...fields,
      trouble,
      el("footer", {}, no, yes),
    )
  );
  const dialog = /** @type {HTMLDialogElement} */ (
    el("dialog", { "aria-labelledby": "ask-title", "aria-describedby": "ask-text" }, form)
  );
  const asker = document.activeElement;
  return new Promise((resolve) => {
    let done = false;
    no.addEventListener("click", () => dialog.close());
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      yes.disabled = true;
      try {
        await act(Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value)])));
        done = true;
        dialog.close();
      } catch (error) {
        trouble.textContent = error instanceof Error ? error.message : String(error);
        yes.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (asker instanceof HTMLElement && asker.isConnected) asker.focus();
      resolve(done);
    });
    document.body.append(dialog);
    dialog.showModal();
    if (danger) no.focus();
  });
}

/** Ask for the API key, and try it. @param {import("./api.js").Api} api @returns {Promise<boolean>} is there another key now */
export function askKey(api) {
  const input = el("input", { name: "key", type: "password", autocomplete: "off", required: true, autofocus: true });
  return ask({
    title: "API key",
    text: "This proxy wants a key (--api-key). It is kept in this tab until the tab is closed.",
    verb: "Use it",
    fields: [el("label", {}, "Key", input)],
    act: async ({ key }) => {
      const before = api.key;
      api.key = key.trim();
      try {
        await api.get("pools?depth=1");
      } catch (error) {
        if (/** @type {any} */ (error).status === 401) {
          api.key = before;
          throw new Error("The proxy does not take this key.");
        }
      }
    },
  });
}
