/**
 * Tokens per second over time: one chart of all sessions together, one with a line for each.
 *
 * Law: draws the store's history with uPlot, once a second. Without uPlot, or when asked to, a table stands in the place of the lines.
 */

import { el, setAttribute } from "./dom.js";
import { LineChart } from "./line_chart.js";
import { SessionTable } from "./session_table.js";

const ALL = "All sessions, tokens per second";
const EACH = "Each session, tokens per second";
const LIBRARY = "./vendor/uplot/uPlot.esm.js";
const LIBRARY_STYLE = "./vendor/uplot/uPlot.min.css";

/** @returns {Promise<any>} the chart library, null where it was not installed */
export async function chartLibrary() {
  try {
    const { default: Chart } = await import(LIBRARY);
    document.head.append(el("link", { rel: "stylesheet", href: new URL(LIBRARY_STYLE, import.meta.url).href }));
    return Chart;
  } catch {
    return null;
  }
}

/** Both panels. */
export class Charts {
  #store;
  #root;
  #Chart;
  /** @type {LineChart | null} */
  #all = null;
  /** @type {LineChart | null} */
  #each = null;
  #drawn = 0;

  /** @param {HTMLElement} root @param {import("./store.js").Store} store @param {any} Chart uPlot or null */
  constructor(root, store, Chart) {
    this.#root = root;
    this.#store = store;
    this.#Chart = Chart;
    this.#build();
    store.watch(() => this.#draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolour());
  }

  #build() {
    const table = new SessionTable(this.#store);
    if (!this.#Chart) {
      this.#root.append(panel("Sessions", table.root));
      return;
    }
    const all = el("div", { class: "chart", role: "img", "aria-label": ALL });
    const each = el("div", { class: "chart", role: "img", "aria-label": EACH });
    const button = el("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Table");
    button.addEventListener("click", () => {
      const asked = each.hidden;
      each.hidden = !asked;
      table.root.hidden = asked;
      setAttribute(button, "aria-pressed", String(!asked));
    });
    table.root.hidden = true;
    this.#root.append(panel(ALL, all), panel(EACH, each, button, table.root));
    this.#all = new LineChart(this.#Chart, all, ["--aggregate", "--mean"], "--floor");
    this.#each = new LineChart(this.#Chart, each, []);
  }

  #draw() {
    const { history } = this.#store;
    const last = history.times.at(-1) ?? 0;
    if (!this.#all || !this.#each || last === this.#drawn) return;
    this.#drawn = last;
    this.#all.draw(history.times, [
      { title: "aggregate", values: history.aggregate },
      { title: "mean of the active", values: history.mean },
      ...history.floors,
    ]);
    this.#each.draw(history.times, history.lanes);
  }

  #recolour() {
    this.#all?.forget();
    this.#each?.forget();
    this.#drawn = 0;
    this.#draw();
  }
}

/** @param {string} title @param {HTMLElement} body @param {...HTMLElement} more a button for its head, another body */
function panel(title, body, ...more) {
  const [button, other] = more;
  const head = el("header", {}, el("h2", {}, title), el("p", { class: "readout" }), ...(button ? [button] : []));
  return el("section", { class: "panel", "aria-label": title }, head, body, ...(other ? [other] : []));
}
