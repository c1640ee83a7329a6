// Lists below the map of EMs. They are read every few seconds while the page is visible.

import { call, Refused } from "/page/api.js";
import { age, amount, bar, element, labels, link, now, number, plain, resource, show, span, table } from "/page/format.js";
import { showEm, showTicket, showUser } from "/page/panel.js";

const ROWS = 8;
const SOON = 2000;
const LATER = 30000;
const HOUR = 3600;
const PAGES = 2;
const PAGE = 1000;

// The fullest dimension of a scope. The first limit that names a dimension decides its maximum.
export function fullestDimension(scope) {
  const decided = new Map();
  for (const limit of scope.limits ?? []) {
    for (const [dimension, most] of Object.entries(limit.max ?? {})) {
      if (!decided.has(dimension)) decided.set(dimension, { most: Number(most), mode: limit.mode });
    }
  }
  const held = (dimension) => [Number(scope.used?.[dimension] ?? 0), Number(scope.locked?.[dimension] ?? 0)];
  const shares = [...decided].filter(([, { mode }]) => mode !== "LIMIT_MODE_OFF").map(([dimension, { most, mode }]) => {
    const [used, locked] = held(dimension);
    return { dimension, most, mode, used, locked, share: (used + locked) / Math.max(1, most) };
  });
  return shares.sort((one, other) => other.share - one.share)[0];
}

export function scopesTable(scopes) {
  const rows = scopes.map((scope) => ({ scope, full: fullestDimension(scope) })).filter(({ full }) => full);
  const columns = [
    { name: "scope", class: "wrap", of: ({ scope }) => labels(scope.labels) },
    { name: "held", width: "18%", of: ({ full }) => bar([full.share > 1 ? "over" : full.share >= 0.9 ? "hot" : "used", full.used / full.most], ["locked", full.locked / full.most]) },
    { name: "held", class: "n", width: "6.5em", of: ({ full }) => amount(full.dimension, full.used + full.locked) },
    { name: "most", class: "n", width: "6.5em", of: ({ full }) => amount(full.dimension, full.most) },
    { name: "of", class: "wide", width: "7em", of: ({ full }) => plain(full.dimension) + (full.mode === "LIMIT_MODE_ADVISORY" ? " (advisory)" : "") },
  ];
  return table(columns, rows, "no limit applies to a live ticket");
}

export function showFullest(scopes) {
  const over = Number(scopes.over_limit) > 0 ? `, ${number(scopes.over_limit)} over` : "";
  document.getElementById("fullest-note").textContent = scopes.renew_time ? `of ${number(scopes.scopes)}${over}` : "";
  show("fullest", scopesTable((scopes.fullest ?? []).slice(0, 10)));
}

const user = (name) => link(name, () => showUser(name));
const emLink = (em) => (em ? link(em.instance, () => showEm(em)) : "");

// The end of an id identifies a ticket; the first half is the time.
export const ticket = (id) => link(`…${id.slice(-8)}`, () => showTicket(id), id);

// A scope without the application of an EM, which is the same for most EMs.
const place = (scope) => scope.replace(/^em=[^/]*\//, "");
const short = (entry) => `${place(entry.scope)}${Number(entry.ahead) > 0 ? ` (${number(entry.ahead)} ahead)` : ""}`;

async function waiting() {
  const { waiting: rows, next_page_token: more } = await call("ListWaiting", { page_size: ROWS });
  document.getElementById("waiting-note").textContent = more ? `the first ${ROWS}` : "";
  show("waiting", table([
    { name: "", width: "2em", of: (row) => String(rows.indexOf(row) + 1) },
    { name: "user", width: "22%", of: (row) => link(`${row.user} / ${row.creator}`, () => showUser(row.user)) },
    { name: "request", class: "wrap", of: (row) => resource(row.resource) },
    { name: "for", class: "wide", width: "7em", of: (row) => `${span(age(row.waiting_since))} of ${span((Date.parse(row.wait_until) - Date.parse(row.waiting_since)) / 1000)}` },
    { name: "short at", class: "wrap", of: (row) => row.entries.map(short).join(", ") },
  ], rows, "no request waits"));
}

async function locked() {
  const { tickets } = await call("ListTickets", { state: "locked", page_size: ROWS });
  show("locked", table([
    { name: "ticket", width: "7.6em", of: (row) => ticket(row.ticket_id) },
    { name: "user", of: (row) => user(row.user) },
    { name: "engine", class: "wide", of: (row) => row.engine_type || "–" },
    { name: "EM", of: (row) => emLink(row.em) },
    { name: "for", class: "n", width: "4em", of: (row) => span(age(row.locked_time)) },
    { name: "left", class: "n", width: "4em", of: (row) => span(-age(row.expire_time)) },
  ], tickets, "no ticket waits for its engine"));
}

async function actions() {
  const page = await call("ListActions", { newest_first: true, page_size: ROWS });
  show("actions", actionsTable(page.actions));
}

export function actionsTable(rows) {
  return table([
    { name: "ago", width: "4em", of: (row) => span(age(row.action_time)) },
    { name: "what", width: "8em", of: (row) => row.action },
    { name: "whose", of: (row) => (row.user ? user(row.user) : labels(row.scope) || "–") },
    { name: "where", of: (row) => (row.em?.instance ? emLink(row.em) : "–") },
    { name: "how much", class: "wide", of: (row) => resource(row.resource) },
    { name: "by", class: "wide", of: (row) => row.actor },
  ], rows, "nothing has happened yet");
}

// Refusals of the last hour, summed over the periods of the reply. If there are very many sums, only the latest count.
async function refusals() {
  const sums = new Map();
  let token = "";
  const from = new Date(now() - HOUR * 1000).toISOString();
  for (let page = 0; page < PAGES; page += 1) {
    const reply = await call("ListRefusals", { from_time: from, page_size: PAGE, page_token: token || undefined });
    for (const row of reply.refusals) {
      const key = JSON.stringify([row.user, row.scope, row.dimension]);
      const sum = sums.get(key) ?? { ...row, refusals: 0 };
      sum.refusals += Number(row.refusals);
      sums.set(key, sum);
    }
    token = reply.next_page_token;
    if (!token) break;
  }
  document.getElementById("refused-note").textContent = token ? `in the last hour, by the latest ${number(PAGES * PAGE)} sums` : "in the last hour";
  const rows = [...sums.values()].sort((one, other) => other.refusals - one.refusals).slice(0, ROWS);
  show("refused", table([
    { name: "user", width: "22%", of: (row) => (row.user ? user(row.user) : "others") },
    { name: "short at", of: (row) => place(row.scope) || row.scope_kind },
    { name: "in", width: "7em", of: (row) => plain(row.dimension) },
    { name: "times", class: "n", width: "5em", of: (row) => number(row.refusals) },
    { name: "requested", class: "n wide", width: "6em", of: (row) => (row.last_requested ? amount(row.dimension, row.last_requested) : "") },
    { name: "available", class: "n wide", width: "6em", of: (row) => (row.last_time ? amount(row.dimension, row.last_available) : "") },
  ], rows, "no request was refused"));
}

async function scopes() {
  const page = await call("ListScopes", { fullest_first: true, page_size: 10 });
  show("fullest", scopesTable(page.scopes));
}

// Polls at the interval after each reply, while the page is visible. A call that the service does not have, or that the caller may not
// make, is not repeated.
function keep(place, interval, read) {
  let [timer, stopped] = [undefined, false];
  const turn = async () => {
    let again = true;
    if (!document.hidden) {
      try {
        await read();
      } catch (error) {
        again = !(error instanceof Refused && [403, 404, 501].includes(error.status));
        if (!again) show(place, element("p", { class: "faint" }, error.message));
      }
    }
    if (again && !stopped) timer = setTimeout(turn, interval);
  };
  turn();
  return () => {
    stopped = true;
    clearTimeout(timer);
  };
}

// `seen` is the state of the stream. A list that is empty by the overview is not read.
export function keepLists(seen) {
  const all = () => seen.overview.line !== undefined;
  const isEmpty = { waiting: () => all() && Number(seen.overview.line.waiting) === 0, locked: () => all() && Number(seen.overview.tickets?.locked) === 0 };
  const unless = (place, text, read) => async () => {
    if (isEmpty[place]()) show(place, element("p", { class: "faint" }, text));
    else await read();
  };
  const stops = [
    keep("waiting", SOON, unless("waiting", "no request waits", waiting)),
    keep("locked", SOON, unless("locked", "no ticket waits for its engine", locked)),
    keep("actions", SOON, actions),
    keep("refused", LATER, refusals),
    keep("fullest", SOON, async () => (all() ? undefined : scopes())),
  ];
  return { stop: () => stops.forEach((stop) => stop()) };
}
