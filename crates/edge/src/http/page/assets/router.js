// Shows what the address names: the overview or a list, and a panel beside it.
//
// A list stays while panels open and close over it. Back returns to the scroll position of the entry.

import { over, parse } from "/page/address.js";
import { at, element, show } from "/page/elements.js";
import { lists } from "/page/lists.js";
import { listView } from "/page/list.js";
import { live } from "/page/live.js";
import { overview } from "/page/overview.js";
import { panels } from "/page/panels.js";

const AGAIN = 5000;

// `list` is the address of the shown list, `view` what shows it, `panel` the address of the panel, `stop` ends its reads.
const shown = { list: undefined, name: undefined, view: undefined, panel: undefined, stop: undefined };
const scrolls = new Map();
// The entries of the history are numbered; `entry` is the present one.
let [entry, newest, isOpen] = [0, 0, false];

history.scrollRestoration = "manual";

const viewOf = (name) => (name === "" ? overview : lists[name] ? listView(lists[name], () => settle()) : undefined);

// The address of the list and, if there is one, of the panel.
function places() {
  const hash = location.hash || "#/";
  const { path, fields } = parse(hash);
  const panel = panels[path[0]];
  if (!panel) return { list: viewExists(path[0]) ? hash : "#/", panel: undefined };
  return { list: `#/${fields.get("from") ?? panel.list}`, panel: hash };
}

const viewExists = (name) => name === "" || lists[name] !== undefined;

// The position that Back returns to, until everything is loaded, or the viewer scrolls.
let settleAt;

function settle() {
  markSelected();
  if (settleAt === undefined) return;
  scrollTo(0, settleAt);
  if (!at("view").querySelector(".loading")) settleAt = undefined;
}

for (const kind of ["wheel", "keydown", "pointerdown"]) addEventListener(kind, () => (settleAt = undefined), { passive: true });

export function route() {
  if (!isOpen) return;
  if (settleAt === undefined) scrolls.set(entry, scrollY);
  const isBack = history.state?.entry !== undefined;
  if (!isBack) history.replaceState({ entry: (newest = Math.max(newest, Date.now()) + 1) }, "");
  ({ entry } = history.state);
  const { list, panel } = places();
  const { path, fields } = parse(list);
  if (path[0] !== shown.name) {
    shown.view?.leave();
    at("view").replaceChildren();
    Object.assign(shown, { name: path[0], view: viewOf(path[0]), list: undefined });
  }
  if (list !== shown.list) {
    settleAt = (isBack && scrolls.get(entry)) || undefined;
    if (settleAt === undefined) scrollTo(0, 0);
    shown.list = list;
    shown.view.open(at("view"), fields);
  }
  if (panel !== shown.panel) openPanel(panel);
  if (isBack && settleAt === undefined) scrollTo(0, scrolls.get(entry) ?? 0);
  for (const one of at("nav").querySelectorAll("a")) {
    if (parse(one.hash).path[0] === path[0]) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  showCurrent();
  markSelected();
}

// In a narrow window the lists scroll sideways.
export function showCurrent() {
  const [nav, one] = [at("nav"), at("nav").querySelector("[aria-current]")];
  nav.scrollLeft = (one?.offsetLeft ?? 0) - nav.clientWidth / 2;
}

function markSelected() {
  const here = shown.panel && parse(shown.panel).path.join("/");
  for (const row of at("view").querySelectorAll("tbody tr, .tile")) {
    const main = row.matches("a") ? row : row.querySelector("a");
    row.classList.toggle("selected", here !== undefined && main !== null && parse(main.hash).path.join("/") === here);
  }
}

function openPanel(address) {
  shown.stop?.();
  const wasOpen = shown.panel !== undefined;
  Object.assign(shown, { panel: address, stop: undefined });
  at("page").classList.toggle("paneled", address !== undefined);
  at("panel").hidden = address === undefined;
  at("panel-body").replaceChildren();
  document.title = "linkis-rm";
  if (address === undefined) return;
  const place = parse(address);
  const panel = panels[place.path[0]];
  const title = panel.title(place);
  document.title = `${title} – linkis-rm`;
  at("panel-close").href = shown.list;
  at("panel").scrollTop = 0;
  const head = element("h1", { tabindex: -1 }, title);
  show(at("panel-body"), head, element("div", { class: "loading" }));
  if (!wasOpen) at("panel-body").querySelector("h1").focus({ preventScroll: true });
  const draw = (parts) => {
    show(at("panel-body"), element("h1", { tabindex: -1 }, title), parts);
    keepListBehind();
  };
  shown.stop = live(AGAIN, async (isOver) => {
    const parts = await panel.parts(place);
    if (!isOver()) draw(parts);
  }, (error) => draw([element("p", { role: "alert" }, error.message)]));
}

// Links from a panel to another panel keep the list behind them.
function keepListBehind() {
  for (const one of at("panel-body").querySelectorAll("a[href]")) {
    if (panels[parse(one.hash).path[0]]) one.setAttribute("href", over(one.hash, shown.list));
  }
}

// Opens the panel of another row of the list, in place of the present one.
export function follow(to) {
  if (shown.panel) location.replace(over(to, shown.list));
}

export const closePanel = () => {
  if (!shown.panel) return false;
  location.hash = shown.list;
  return true;
};

export const current = () => shown;

// The stream has news: `places` are the changed EMs, undefined if EMs came or went.
export function tick(places) {
  shown.view?.tick?.(places);
  settle();
}

export function begin() {
  if (isOpen) return;
  isOpen = true;
  route();
}

// Ends all reads and removes all content, for the next viewer.
export function end() {
  isOpen = false;
  shown.view?.leave();
  shown.stop?.();
  Object.assign(shown, { list: undefined, name: undefined, view: undefined, panel: undefined, stop: undefined });
  scrolls.clear();
  for (const id of ["view", "panel-body"]) at(id).replaceChildren();
  at("panel").hidden = true;
}

addEventListener("hashchange", route);

// Links in the list keep it behind the panel that they open. Filters, sorts and pages replace their entry.
document.addEventListener("click", (event) => {
  const one = event.target.closest?.("a[href^='#']");
  if (!one || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
  const inList = at("view").contains(one) && shown.name !== "" && panels[parse(one.hash).path[0]];
  const to = inList ? over(one.hash, shown.list) : one.hash;
  if (!inList && one.dataset.replace === undefined) return;
  event.preventDefault();
  if (one.dataset.replace === undefined) location.hash = to;
  else location.replace(to);
});
