// Keys of the page. Letters act outside fields alone, and can be switched off.

import { toList } from "/page/address.js";
import { at, element } from "/page/elements.js";
import { closePanel, current, follow } from "/page/router.js";
import { close } from "/page/search.js";

const LISTS = { o: "", e: "ems", u: "users", l: "limits", w: "waiting", q: "queues", t: "tickets", h: "history", r: "refusals" };
const OFF = "linkis-rm-letters-off";
const AFTER_G = 1500;

const KEYS = [
  ["/", "search"], ["Esc", "close the search, then the panel"], ["g and o e u l w q t h r", "overview, EMs, users, limits, waiting, external queues, tickets, history, refused"],
  ["↑ ↓ or k j", "rows; an open panel follows"], ["Enter", "open"], ["arrows", "move on the map"], ["[ and ]", "first page, next page"], ["c", "copy the command"], ["?", "these keys"],
];

let wentAt = 0;

const lettersOff = () => localStorage.getItem(OFF) !== null;

export function fillHelp() {
  const off = element("input", { type: "checkbox", id: "letters-off", onchange: (event) => (event.target.checked ? localStorage.setItem(OFF, "1") : localStorage.removeItem(OFF)) });
  off.checked = lettersOff();
  at("help").replaceChildren(element("h2", {}, "Keys"), element("dl", {}, KEYS.map(([key, what]) => element("div", {}, element("dt", {}, key), element("dd", {}, what)))),
    element("p", {}, off, " ", element("label", { for: "letters-off" }, "letters do nothing")), element("form", { method: "dialog" }, element("button", {}, "Close")));
}

const rows = () => [...at("view").querySelectorAll("#rows tbody tr")].map((row) => row.querySelector("a")).filter(Boolean);

// Moves the focus to the next row of the list; an open panel follows.
function move(by) {
  const all = rows();
  if (all.length === 0) return false;
  const focused = all.indexOf(document.activeElement);
  const from = focused >= 0 ? focused : all.findIndex((one) => one.closest("tr").classList.contains("selected"));
  const next = all[Math.max(0, Math.min(all.length - 1, from < 0 ? 0 : from + by))];
  next.focus();
  if (current().panel) follow(next.hash);
  return true;
}

const press = (selector) => {
  const found = document.querySelector(selector);
  found?.click();
  return found !== null;
};

function letter(key) {
  if (Date.now() - wentAt < AFTER_G && LISTS[key] !== undefined) {
    wentAt = 0;
    location.hash = toList(LISTS[key]);
    return true;
  }
  const acts = {
    g: () => (wentAt = Date.now()) > 0,
    "/": () => { at("search").focus(); return true; },
    j: () => move(1),
    k: () => move(-1),
    "[": () => press("#view .first"),
    "]": () => press("#view .next"),
    c: () => press("#panel:not([hidden]) .copy, #view .copy"),
    "?": () => { fillHelp(); at("help").showModal(); return true; },
  };
  return acts[key]?.() ?? false;
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || at("page").hidden || at("help").open) return;
  if (event.key === "Escape") {
    if (!close() && document.activeElement === at("search")) at("search").blur();
    else closePanel();
    return;
  }
  if (event.target.matches("input, select, textarea")) return;
  const isArrow = ["ArrowDown", "ArrowUp"].includes(event.key) && !at("panel").contains(event.target);
  const acted = isArrow ? move(event.key === "ArrowDown" ? 1 : -1) : !lettersOff() && letter(event.key);
  if (acted) event.preventDefault();
});
