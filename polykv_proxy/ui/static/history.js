/**
 * Tokens per second over the last minutes, one value a second.
 *
 * Law: pure; columns of equal length, as a chart wants them. A session has a lane as long as any of its values is within sight; then the
 * lane is another's, so that the number of lanes follows how many there are at a time, not how many there ever were. So it is with floors.
 */

/** @typedef {{key: string, title: string, values: (number | null)[]}} Lane */
/** @typedef {{key: string, title: string, tps: number}} Point of a lane */

export class History {
  /** @type {number[]} Unix seconds */
  times = [];
  /** @type {(number | null)[]} */
  aggregate = [];
  /** @type {(number | null)[]} */
  mean = [];
  /** @type {Lane[]} */
  lanes = [];
  /** @type {Lane[]} tokens per second that policies want kept */
  floors = [];
  #seconds;

  /** @param {number} seconds that are kept */
  constructor(seconds) {
    this.#seconds = seconds;
  }

  /**
   * @param {{ts: number, aggregate_tps: number | null, mean_active_tps: number | null}} figures
   * @param {Point[]} running sessions that have a speed now
   * @param {Point[]} [floors] of policies
   * @returns {boolean} has a new second begun
   */
  add(figures, running, floors = []) {
    const second = Math.floor(figures.ts);
    const last = this.times.at(-1);
    if (last !== undefined && second < last) this.#clear();
    const begun = last === undefined || second !== last;
    if (begun) this.#begin(second);
    const at = this.times.length - 1;
    this.aggregate[at] = figures.aggregate_tps ?? null;
    this.mean[at] = figures.mean_active_tps ?? null;
    for (const { key, title, tps } of running) this.#lane(this.lanes, key, title).values[at] = tps;
    for (const { key, title, tps } of floors) this.#lane(this.floors, key, title).values[at] = tps;
    return begun;
  }

  /** A second more. What lies between two is a gap. @param {number} second */
  #begin(second) {
    const last = this.times.at(-1);
    for (const time of last !== undefined && second > last + 2 ? [last + 1, second] : [second]) {
      this.times.push(time);
      for (const column of this.#columns()) column.push(null);
    }
    const old = this.times.findIndex((time) => time > second - this.#seconds);
    if (old > 0) for (const column of [this.times, ...this.#columns()]) column.splice(0, old);
  }

  #columns() {
    return [this.aggregate, this.mean, ...[...this.lanes, ...this.floors].map((lane) => lane.values)];
  }

  /** @param {Lane[]} lanes @param {string} key @param {string} title */
  #lane(lanes, key, title) {
    const known = lanes.find((one) => one.key === key);
    const free = known ?? lanes.find((one) => one.values.every((value) => value === null));
    const lane = free ?? { key, title, values: this.times.map(() => null) };
    if (!free) lanes.push(lane);
    return Object.assign(lane, { key, title });
  }

  #clear() {
    this.times = [];
    this.aggregate = [];
    this.mean = [];
    this.lanes = [];
    this.floors = [];
  }
}
