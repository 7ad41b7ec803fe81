/**
 * The tree of pools on the page: one line a row, one tab stop, arrows in between.
 *
 * Law: draws rows and says which one was chosen. The row that has the focus keeps it through updates, and hands it on when it goes.
 */

import { byId, el, mirror, setAttribute, setStyle, setText } from "./dom.js";
import { poolTitle, rowsOf, sessionTitle, spoken, ticks, widthOf } from "./tree.js";
import { bytes, count, RESIDENCIES, rate } from "./words.js";

const LEGEND = ["resident", "pinned", "materializing", "evicted", "lost", "active", "warming", "idle"];

export class TreeView {
  #root = byId("tree");
  #axis = byId("axis");
  #empty = byId("tree-empty");
  #filter = /** @type {HTMLInputElement} */ (byId("filter"));
  #closed = new Set();
  /** @type {import("./tree.js").Row[]} */
  #rows = [];
  /** @type {WeakMap<HTMLElement, Record<string, any>>} */
  #drawn = new WeakMap();
  #current = "";
  #chosen = "";
  #store;
  #choose;

  /** @param {import("./store.js").Store} store @param {(row: {kind: string, it: any, key: string}) => void} choose */
  constructor(store, choose) {
    this.#store = store;
    this.#choose = choose;
    this.#root.addEventListener("keydown", (event) => this.#key(event));
    this.#root.addEventListener("click", (event) => this.#click(event));
    this.#root.addEventListener("focusin", (event) => this.#focused(/** @type {HTMLElement} */ (event.target)));
    this.#filter.addEventListener("input", () => this.draw());
    byId("legend").append(...LEGEND.map((word) => el("li", {}, el("i", { class: `swatch ${word}` }), word)));
    store.watch(() => this.draw());
  }

  /** @param {string} key of the row whose details are shown, or empty */
  choose(key) {
    this.#chosen = key;
    this.draw();
  }

  /** Give the focus to a row, or to the tree. @param {string} key */
  focus(key) {
    if (this.#rows.some((row) => row.key === key)) this.#current = key;
    this.draw();
    this.#node(this.#current)?.focus();
  }

  draw() {
    const { pools, refused, link } = this.#store.facts;
    const before = this.#rows.findIndex((row) => row.key === this.#current);
    const held = this.#root.contains(document.activeElement);
    this.#rows = rowsOf(pools, this.#store.sessions, { closed: this.#closed, filter: this.#filter.value });
    if (!this.#rows.some((row) => row.key === this.#current)) {
      this.#current = this.#rows[Math.min(Math.max(before, 0), this.#rows.length - 1)]?.key ?? "";
    }
    this.#scale(widthOf(this.#rows));
    mirror(
      this.#root,
      this.#rows,
      (row) => row.key,
      make,
      (node, row) => this.#update(node, row),
    );
    if (held && !this.#root.contains(document.activeElement)) this.#node(this.#current)?.focus();
    this.#empty.hidden = this.#rows.length > 0;
    setText(
      this.#empty,
      this.#filter.value ? "Nothing matches the filter." : refused || (link.state === "live" ? "There are no pools yet." : ""),
    );
  }

  /** @param {number} width of the map, in tokens */
  #scale(width) {
    setStyle(this.#root, "--width", String(width));
    setStyle(this.#axis, "--width", String(width));
    this.#axis.hidden = this.#rows.length === 0;
    mirror(
      this.#axis,
      ticks(width),
      String,
      () => el("span"),
      (node, tokens) => {
        setStyle(node, "--at", String(tokens));
        setText(node, count(tokens));
      },
    );
  }

  /** Most rows are as they were: those cost one comparison. @param {HTMLElement} node @param {import("./tree.js").Row} row */
  #update(node, row) {
    const looks = { ...row, chosen: row.key === this.#chosen, current: row.key === this.#current };
    const before = this.#drawn.get(node);
    if (before && Object.entries(looks).every(([name, value]) => before[name] === value)) return;
    this.#drawn.set(node, looks);
    setAttribute(node, "aria-level", row.level);
    setAttribute(node, "aria-posinset", row.position);
    setAttribute(node, "aria-setsize", row.setSize);
    setAttribute(node, "aria-expanded", row.open === null ? null : String(row.open));
    setAttribute(node, "aria-selected", String(looks.chosen));
    setAttribute(node, "tabindex", looks.current ? 0 : -1);
    draw(node, row);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const at = this.#rows.findIndex((row) => row.key === this.#current);
    const row = this.#rows[at];
    if (!row || event.altKey || event.ctrlKey || event.metaKey) return;
    const goes = this.#target(event.key, at, row);
    if (goes !== null) this.focus(this.#rows[Math.min(Math.max(goes, 0), this.#rows.length - 1)].key);
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") this.#toggle(row, event.key === "ArrowRight");
    else if (event.key === "Enter" || event.key === " ") this.#press(row);
    else return;
    event.preventDefault();
  }

  /** The row that a key leads to, or null. @param {string} key @param {number} at @param {import("./tree.js").Row} row */
  #target(key, at, row) {
    switch (key) {
      case "ArrowDown":
        return at + 1;
      case "ArrowUp":
        return at - 1;
      case "PageDown":
        return at + 10;
      case "PageUp":
        return at - 10;
      case "Home":
        return 0;
      case "End":
        return this.#rows.length - 1;
      case "ArrowRight":
        return row.open ? at + 1 : null;
      case "ArrowLeft":
        return row.open || row.level === 1 ? null : this.#rows.slice(0, at).findLastIndex((above) => above.level < row.level);
      default:
        return null;
    }
  }

  /** @param {import("./tree.js").Row} row @param {boolean} open */
  #toggle(row, open) {
    if (open) this.#closed.delete(row.key);
    else if (row.open !== null) this.#closed.add(row.key);
    this.draw();
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const node = target.closest(".row");
    const row = this.#rows.find((one) => one.key === node?.getAttribute("data-key"));
    if (!row) return;
    this.#current = row.key;
    if (target.closest(".twist")) this.#toggle(row, row.open === false);
    else this.#press(row);
  }

  /** @param {import("./tree.js").Row} row */
  #press(row) {
    if (row.kind === "group") this.#toggle(row, row.open === false);
    else this.#choose(row);
  }

  /** @param {HTMLElement} node */
  #focused(node) {
    const key = node.getAttribute("data-key");
    if (key !== null && key !== this.#current) {
      this.#current = key;
      this.draw();
    }
  }

  /** @param {string} key @returns {HTMLElement | null} */
  #node(key) {
    return this.#root.querySelector(`[data-key="${CSS.escape(key)}"]`);
  }
}

/** @param {import("./tree.js").Row} row */
function make(row) {
  const label = el(
    "span",
    { class: "label" },
    el("i", { class: "twist" }),
    el("span", { class: "name" }),
    el("span", { class: "unseen" }),
    el("span", { class: "note" }),
  );
  const bar = el("span", { class: "map" }, el("i", { class: "shared" }), el("i", { class: "own" }));
  return el("div", { role: "treeitem", "data-key": row.key }, label, bar, el("span", { class: "figures" }));
}

/** @param {HTMLElement} node @param {import("./tree.js").Row} row */
function draw(node, row) {
  setAttribute(node, "class", `row ${row.kind} ${looks(row)}`);
  setStyle(node, "--level", String(row.level - 1));
  setStyle(node, "--from", String(row.from));
  setStyle(node, "--to", String(row.to));
  const [label, map, figures] = node.children;
  setAttribute(map, "class", row.to > row.from ? "map" : "map empty");
  const [, name, unseen, note] = label.children;
  setText(unseen, spoken(row));
  if (row.kind === "group") setText(name, row.it.title);
  else if (row.kind === "pool") poolCells(row.it, name, note, figures);
  else sessionCells(row.it, name, note, figures);
}

/** @param {import("./tree.js").Row} row @returns {string} classes by which a row has its colours */
function looks({ kind, it }) {
  if (kind === "group") return "";
  return kind === "session" ? it.state : `${it.residency}${it.pinned ? " pinned" : ""}`;
}

/** @param {any} pool @param {Element} name @param {Element} note @param {Element} figures */
function poolCells(pool, name, note, figures) {
  setText(name, poolTitle(pool));
  setAttribute(name, "title", `pool ${pool.pool_id}: ${RESIDENCIES[pool.residency] ?? pool.residency}`);
  const own = pool.prefix_len - pool.branch_pos;
  setText(
    note,
    `${pool.pinned ? "pinned · " : ""}${pool.residency === "resident" ? "" : `${pool.residency} · `}${pool.parent === null ? "" : "+"}${count(own)} tokens`,
  );
  setText(figures, pool.own_kv_bytes ? bytes(pool.own_kv_bytes) : "");
}

/** @param {any} session @param {Element} name @param {Element} note @param {Element} figures */
function sessionCells(session, name, note, figures) {
  setText(name, sessionTitle(session));
  setText(note, session.state);
  setText(figures, session.tps_ewma === null || session.tps_ewma === undefined ? "" : `${rate(session.tps_ewma)} tok/s`);
}
