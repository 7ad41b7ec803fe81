/**
 * Who shares the engine's device, and how.
 *
 * Law: shows `/gpu/peers` as it was last asked for; without a shared device there is no panel.
 */

import { el, mirror, setText } from "./dom.js";
import { isNumber, plural, UNKNOWN } from "./words.js";

const HEADS = ["Engine", "Weight", "Share", "Busy", "State"];

/** @typedef {{pid: number, name: string, slot: number, weight: number, share_pct: number, busy_pct: number, active: boolean, ours?: boolean}} Peer */

export class PeersView {
  #rows = el("tbody");
  #sum = el("p", { class: "readout" });

  /** @param {HTMLElement} root @param {import("./store.js").Store} store */
  constructor(root, store) {
    const heads = el("tr", {}, ...HEADS.map((head) => el("th", { scope: "col" }, head)));
    root.append(
      el("header", {}, el("h2", {}, "Device"), this.#sum),
      el("div", { class: "table" }, el("table", {}, el("caption", {}, "Engines"), el("thead", {}, heads), this.#rows)),
    );
    store.watch(() => {
      const { gpu } = store.facts;
      root.hidden = !gpu?.enabled;
      if (gpu?.enabled) this.#draw(gpu);
    });
  }

  /** @param {any} gpu */
  #draw(gpu) {
    const peers = peersOf(gpu);
    setText(this.#sum, `${plural(peers.length, "engine")} on ${gpu.gpu_key}`);
    mirror(
      this.#rows,
      peers,
      (peer) => String(peer.slot),
      () => el("tr", {}, ...HEADS.map(() => el("td"))),
      (node, peer) => {
        for (const [n, text] of cells(peer).entries()) setText(node.children[n], text);
      },
    );
  }
}

/** Ours first, then by slot. @param {any} gpu @returns {Peer[]} */
export function peersOf(gpu) {
  const others = [...gpu.peers].sort((left, right) => left.slot - right.slot);
  return gpu.self ? [{ ...gpu.self, ours: true }, ...others] : others;
}

/** @param {Peer} peer */
export function cells({ name, pid, weight, share_pct, busy_pct, active, ours }) {
  const who = `${name || `process ${pid}`}${ours ? " (this one)" : ""}`;
  return [who, String(weight), whole(share_pct), whole(busy_pct), active ? "active" : "idle"];
}

/** @param {number} value of a hundred */
function whole(value) {
  return isNumber(value) ? `${Math.round(value)} %` : UNKNOWN;
}
