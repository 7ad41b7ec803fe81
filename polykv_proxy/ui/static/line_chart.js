/**
 * Lines over time, and in words what is under the pointer.
 *
 * Law: draws what it is given. Lines are added as they come; their colours follow their place. With `limit` those after the first few
 * are limits: dashed, and all of one colour.
 */

import { el, setAttribute, setText } from "./dom.js";
import { clock, rate, UNKNOWN } from "./words.js";

const HEIGHT_PX = 190;
const SHORTEST_S = 60;
const N_COLOURS = 8;

/** First and last moment to be shown, a minute at least. The chart's own idea of a single one is a scale of years. @param {number[]} times */
export function span(times) {
  const last = times.at(-1) ?? 0;
  return [Math.min(times[0] ?? last, last - SHORTEST_S), last];
}

export class LineChart {
  #Chart;
  #root;
  #colours;
  #limit;
  /** @type {any} */
  #chart = null;
  /** @type {{title: string, values: (number | null)[]}[]} */
  #lines = [];
  /** @type {number | null} */
  #focused = null;
  #probe = el("i", { hidden: true });

  /** @param {any} Chart @param {HTMLElement} root @param {string[]} colours custom properties for the first lines @param {string} [limit] for all others */
  constructor(Chart, root, colours, limit = "") {
    this.#Chart = Chart;
    this.#root = root;
    this.#colours = colours;
    this.#limit = limit;
    root.append(this.#probe);
    new ResizeObserver(() => this.#fit()).observe(root);
  }

  /** @param {number[]} times @param {{title: string, values: (number | null)[]}[]} lines */
  draw(times, lines) {
    this.#lines = lines;
    this.#chart ??= this.#make();
    const chart = this.#chart;
    while (chart.series.length - 1 < lines.length) chart.addSeries(this.#line(chart.series.length - 1), chart.series.length);
    while (chart.series.length - 1 > lines.length) chart.delSeries(chart.series.length - 1);
    chart.setData([times, ...lines.map((line) => line.values)]);
    this.#say();
  }

  /** Colours have changed: make it anew. */
  forget() {
    this.#chart?.destroy();
    this.#chart = null;
  }

  #make() {
    const axis = {
      stroke: this.#colour("--soft"),
      grid: { stroke: this.#colour("--grid"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const options = {
      width: this.#root.clientWidth || 300,
      height: HEIGHT_PX,
      padding: [6, 26, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, focus: { prox: 24 }, points: { size: 5 } },
      focus: { alpha: 0.25 },
      scales: {
        x: {
          range: (/** @type {any} */ chart) => span(chart.data[0]),
        },
        y: {
          range: (/** @type {any} */ _u, /** @type {number} */ _min, /** @type {number} */ max) => [
            0,
            Math.max(1, (max || 0) * 1.1),
          ],
        },
      },
      axes: [
        { ...axis, space: 90, size: 26, values: (/** @type {any} */ _u, /** @type {number[]} */ splits) => splits.map(clock) },
        { ...axis, size: 44, space: 34 },
      ],
      series: [{}],
      hooks: {
        setCursor: [() => this.#say()],
        setSeries: [
          (/** @type {any} */ _u, /** @type {number | null} */ at) => {
            this.#focused = at;
            this.#say();
          },
        ],
      },
    };
    return new this.#Chart(options, [[]], this.#root);
  }

  /** @param {number} at */
  #line(at) {
    const own = this.#colours[at];
    const limit = own === undefined && this.#limit !== "";
    const stroke = this.#colour(own ?? (limit ? this.#limit : `--line-${at % N_COLOURS}`));
    return {
      stroke,
      width: own ? 2 : 1.25,
      points: { show: false },
      dash: limit ? [7, 4] : undefined,
      spanGaps: false,
      fill: at === 0 && own ? this.#colour("--aggregate-fill") : undefined,
    };
  }

  /** Say in words what is under the pointer, or what is now. */
  #say() {
    const chart = this.#chart;
    if (!chart) return;
    const at = chart.cursor.idx ?? chart.data[0].length - 1;
    const when = chart.cursor.idx === null || chart.cursor.idx === undefined ? "now" : clock(chart.data[0][at]);
    const text = this.#colours.length ? this.#both(at, when) : this.#one(at, when);
    const readout = this.#root.parentElement?.querySelector(".readout");
    if (readout) setText(readout, text);
    setAttribute(this.#root, "aria-label", text);
  }

  /** @param {number} at @param {string} when */
  #both(at, when) {
    const shown = this.#lines.filter((line, n) => n < this.#colours.length || typeof line.values[at] === "number");
    return `${when}: ${shown.map((line) => `${line.title} ${rate(line.values[at])}`).join(", ")}`;
  }

  /** @param {number} at @param {string} when */
  #one(at, when) {
    if (this.#focused) {
      const line = this.#lines[this.#focused - 1];
      return line ? `${when}: ${line.title} ${rate(line.values[at])}` : "";
    }
    const values = this.#lines.map((line) => line.values[at]).filter((value) => typeof value === "number");
    if (!values.length) return `${when}: ${UNKNOWN}`;
    return `${when}: ${values.length} running, ${rate(Math.min(...values))} to ${rate(Math.max(...values))}`;
  }

  #fit() {
    if (this.#chart && this.#root.clientWidth) this.#chart.setSize({ width: this.#root.clientWidth, height: HEIGHT_PX });
  }

  /** A property as a canvas takes it: a property that names two colours has none until an element wears it. @param {string} property */
  #colour(property) {
    this.#probe.style.color = `var(${property})`;
    return getComputedStyle(this.#probe).color;
  }
}
