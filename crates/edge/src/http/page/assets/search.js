// Search: suggestions while typing, from EM names, states, labels, limits and users. Enter opens the marked one.

import { toEm, toList, toScope, toTicket, toUser } from "/page/address.js";
import { call } from "/page/api.js";
import { STATES, cluster, labelValues, states } from "/page/cluster.js";
import { at, element, muted } from "/page/elements.js";
import { labels, number, percent } from "/page/format.js";
import { current } from "/page/router.js";

const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;
const OF_A_KIND = 5;
const READ = 1000;
const AGE = 30_000;

let [found, marked] = [[], 0];

// The first entries of a list, for all suggestions to one viewer within a while.
function first(method, entries, fields) {
  let read = {};
  return () => {
    if (read.server !== cluster.server || Date.now() - read.time > AGE) {
      const list = call(method, { ...fields, page_size: READ }).then((reply) => reply[entries], () => []);
      read = { time: Date.now(), server: cluster.server, list };
    }
    return read.list;
  };
}

const fullest = first("ListScopes", "scopes", { fullest_first: true });
const most = first("ListUsers", "users");

async function suggestions(text) {
  const wanted = text.toLowerCase();
  if (UUID.test(text)) return [{ kind: "ticket", text: wanted, to: toTicket(wanted) }];
  const has = (name) => name.toLowerCase().includes(wanted);
  const ems = cluster.names.filter(({ instance }) => has(instance));
  const inState = STATES.slice(1).filter((state) => state.startsWith(wanted) && states().get(state) > 0);
  const [known, holders, values] = await Promise.all([fullest(), most(), labelValues().catch(() => new Map())]);
  const users = new Set([...holders.map(({ user }) => user), ...known.map((one) => one.labels.user)].filter((name) => name && has(name)));
  users.delete(text);
  const pairs = [...values].flatMap(([key, counts]) => [...counts].map(([value, count]) => ({ label: `${key}=${value}`, count }))).filter(({ label }) => has(label));
  return [
    ...inState.map((state) => ({ kind: "state", text: state, note: `${number(states().get(state))} EMs`, to: toList("ems", { state }) })),
    ...ems.slice(0, OF_A_KIND).map((em) => ({ kind: "EM", text: em.instance, to: toEm(em) })),
    ...[...users].slice(0, OF_A_KIND).map((name) => ({ kind: "user", text: name, to: toUser(name) })),
    ...known.filter((one) => has(labels(one.labels))).slice(0, OF_A_KIND).map((one) => ({ kind: "limit", text: labels(one.labels), note: percent(one.fullness), to: toScope(one.labels) })),
    ...pairs.slice(0, OF_A_KIND).map(({ label, count }) => ({ kind: "label", text: label, note: `${number(count)} EMs`, to: toList("ems", { label }) })),
    ...(ems.length > OF_A_KIND ? [{ kind: "EMs", text: `all ${number(ems.length)} whose names have “${text}”`, to: toList("ems", { part: text }) }] : []),
    ...(users.size > OF_A_KIND ? [{ kind: "users", text: `all whose names have “${text}”`, to: toList("users", { part: text }) }] : []),
    ...(text.includes("=") ? [] : [{ kind: "user", text, note: "by this name", to: toUser(text) }]),
  ];
}

// The text with what was searched for in bold.
function emphasized(text, wanted) {
  const begin = text.toLowerCase().indexOf(wanted.toLowerCase());
  if (begin < 0) return text;
  return [text.slice(0, begin), element("b", {}, text.slice(begin, begin + wanted.length)), text.slice(begin + wanted.length)];
}

function draw(text) {
  const box = at("suggestions");
  box.replaceChildren(...found.map((one, place) => element("li", { id: `suggestion-${place}`, role: "option", "aria-selected": place === marked ? "true" : "false", onmousedown: (event) => { event.preventDefault(); open(one); } },
    muted(one.kind), element("span", {}, emphasized(one.text, text)), muted(one.note ?? ""))));
  box.hidden = found.length === 0;
  at("search").setAttribute("aria-expanded", String(found.length > 0));
  if (found.length > 0) at("search").setAttribute("aria-activedescendant", `suggestion-${marked}`);
  else at("search").removeAttribute("aria-activedescendant");
}

function open({ to }) {
  close();
  at("search").value = "";
  at("search").blur();
  current().view?.mark?.("");
  location.hash = to;
}

// Returns false if there was nothing to close.
export function close() {
  const wasOpen = found.length > 0;
  found = [];
  draw("");
  return wasOpen;
}

async function typed() {
  const text = at("search").value.trim();
  current().view?.mark?.(text);
  const next = text === "" ? [] : await suggestions(text);
  // A later text has its own suggestions.
  if (at("search").value.trim() !== text) return;
  [found, marked] = [next, 0];
  draw(text);
}

at("search").addEventListener("input", typed);
at("search").addEventListener("focus", () => {
  fullest();
  most();
  if (at("search").value.trim()) typed();
});
at("search").addEventListener("blur", close);
at("search").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || found.length === 0) return;
  event.preventDefault();
  marked = (marked + step + found.length) % found.length;
  draw(at("search").value.trim());
});
at("search-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (found.length === 0) await typed();
  if (found[marked]) open(found[marked]);
});
