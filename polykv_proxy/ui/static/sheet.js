/**
 * One thing in full: its facts, and what can be done to it.
 *
 * Law: follows the thing as long as it is there; says so when it is gone.
 */

import { el, mirror, setText } from "./dom.js";

/** What is shown of one thing: facts that follow it, and what can be done. */
export class Sheet {
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
