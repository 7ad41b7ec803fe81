/**
 * The page, put together.
 *
 * Law: the one place where parts meet; decides nothing that a part could decide.
 */

import { Actions } from "./actions.js";
import { AdmissionView } from "./admission_view.js";
import { Api } from "./api.js";
import { askKey } from "./ask.js";
import { Charts, chartLibrary } from "./charts.js";
import { Detail } from "./detail.js";
import { byId } from "./dom.js";
import { Feed } from "./feed.js";
import { LogView } from "./log_view.js";
import { PeersView } from "./peers_view.js";
import { SavingsView } from "./savings_view.js";
import { Status } from "./status.js";
import { Store } from "./store.js";
import { Tiles } from "./tiles.js";
import { TreeView } from "./tree_view.js";

const NOTICE_MS = 6_000;

const api = new Api(document.baseURI, sessionStorage);
const store = new Store();
const feed = new Feed(api, store);

let quiet = 0;
/** @param {string} text */
function say(text) {
  byId("notice").textContent = text;
  clearTimeout(quiet);
  quiet = setTimeout(() => (byId("notice").textContent = ""), NOTICE_MS);
  feed.soon();
}

let asking = false;
async function unlock() {
  if (asking) return;
  asking = true;
  if (await askKey(api)) feed.start();
  asking = false;
}

new Status(store);
new Tiles(byId("tiles"), store);
const tree = new TreeView(store, (row) => {
  tree.choose(row.key);
  detail.show(row);
});
const detail = new Detail(store, api, new Actions(api, say), (key) => {
  tree.choose("");
  tree.focus(key);
});
new LogView(store);
new AdmissionView(byId("admission"), store);
new PeersView(byId("peers"), store);
new SavingsView(byId("savings"), store);
chartLibrary().then((Chart) => new Charts(byId("charts"), store, Chart));

byId("key").addEventListener("click", unlock);
let locked = false;
store.watch(() => {
  const now = store.facts.link.state === "locked";
  if (now && !locked) unlock();
  locked = now;
});
document.addEventListener("visibilitychange", () => feed.seen(document.visibilityState === "visible"));
addEventListener("online", () => feed.start());
feed.start();
