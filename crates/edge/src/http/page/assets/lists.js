// The lists below the hosts: what is asked every few seconds while somebody looks.

import { ask, Refused } from "/page/api.js";
import { age, amount, bar, element, labels, link, now, number, plain, resource, show, span, table } from "/page/format.js";
import { showHost, showTicket, showUser } from "/page/panel.js";

const ROWS = 8;
const SOON = 2000;
const LATER = 30000;
const HOUR = 3600;
const PAGES = 2;
const PAGE = 1000;

// The dimension of whose maximum a scope holds most; of each dimension, the first limit that names it decides.
export function fullestDimension(scope) {
  const decided = new Map();
  for (const limit of scope.limits ?? []) {
    for (const [dimension, most] of Object.entries(limit.max ?? {})) {
      if (!decided.has(dimension)) decided.set(dimension, { most: Number(most), mode: limit.mode });
    }
  }
  const held = (dimension) => [Number(scope.used?.[dimension] ?? 0), Number(scope.locked?.[dimension] ?? 0)];
  const told = [...decided].filter(([, { mode }]) => mode !== "LIMIT_MODE_OFF").map(([dimension, { most, mode }]) => {
    const [used, locked] = held(dimension);
    return { dimension, most, mode, used, locked, share: (used + locked) / Math.max(1, most) };
  });
  return told.sort((one, other) => other.share - one.share)[0];
}

export function scopesTable(scopes) {
  const rows = scopes.map((scope) => ({ scope, full: fullestDimension(scope) })).filter(({ full }) => full);
  const columns = [
    { name: "scope", class: "wrap", of: ({ scope }) => labels(scope.labels) },
    { name: "held", width: "18%", of: ({ full }) => bar([full.share > 1 ? "over" : full.share >= 0.9 ? "hot" : "used", full.used / full.most], ["locked", full.locked / full.most]) },
    { name: "held", class: "n", width: "6.5em", of: ({ full }) => amount(full.dimension, full.used + full.locked) },
    { name: "most", class: "n", width: "6.5em", of: ({ full }) => amount(full.dimension, full.most) },
    { name: "of", class: "wide", width: "7em", of: ({ full }) => plain(full.dimension) + (full.mode === "LIMIT_MODE_WATCHED" ? " (watched)" : "") },
  ];
  return table(columns, rows, "no limit is for anything that is held");
}

export function showFullest(scopes) {
  const over = Number(scopes.over_limit) > 0 ? `, ${number(scopes.over_limit)} over` : "";
  document.getElementById("fullest-note").textContent = scopes.renew_time ? `of ${number(scopes.scopes)}${over}` : "";
  show("fullest", scopesTable((scopes.fullest ?? []).slice(0, 10)));
}

const user = (name) => link(name, () => showUser(name));
const host = (em) => (em ? link(em.instance, () => showHost(em)) : "");

// The end of an id tells tickets apart: the first half is the time.
export const ticket = (id) => link(`…${id.slice(-8)}`, () => showTicket(id), id);

// A host by its instance alone: what stands before it is the same of most.
const place = (scope) => scope.replace(/^em=[^/]*\//, "");
const short = (spot) => `${place(spot.scope)}${Number(spot.ahead) > 0 ? ` (${number(spot.ahead)} ahead)` : ""}`;

async function waiting() {
  const { waiting: rows, next_page_token: more } = await ask("ListWaiting", { page_size: ROWS });
  document.getElementById("waiting-note").textContent = more ? `the first ${ROWS}` : "";
  show("waiting", table([
    { name: "", width: "2em", of: (row) => String(rows.indexOf(row) + 1) },
    { name: "user", width: "22%", of: (row) => link(`${row.user} / ${row.creator}`, () => showUser(row.user)) },
    { name: "wants", class: "wrap", of: (row) => resource(row.resource) },
    { name: "for", class: "wide", width: "7em", of: (row) => `${span(age(row.waiting_since))} of ${span((Date.parse(row.wait_until) - Date.parse(row.waiting_since)) / 1000)}` },
    { name: "short at", class: "wrap", of: (row) => row.spots.map(short).join(", ") },
  ], rows, "nobody waits"));
}

async function locked() {
  const { tickets } = await ask("ListTickets", { state: "locked", page_size: ROWS });
  show("locked", table([
    { name: "ticket", width: "7.6em", of: (row) => ticket(row.ticket_id) },
    { name: "user", of: (row) => user(row.user) },
    { name: "engine", class: "wide", of: (row) => row.engine_type || "–" },
    { name: "host", of: (row) => host(row.em) },
    { name: "for", class: "n", width: "4em", of: (row) => span(age(row.locked_time)) },
    { name: "left", class: "n", width: "4em", of: (row) => span(-age(row.expire_time)) },
  ], tickets, "no ticket waits for its engine"));
}

async function actions() {
  const told = await ask("ListActions", { newest_first: true, page_size: ROWS });
  show("actions", actionsTable(told.actions));
}

export function actionsTable(rows) {
  return table([
    { name: "ago", width: "4em", of: (row) => span(age(row.action_time)) },
    { name: "what", width: "8em", of: (row) => row.action },
    { name: "whose", of: (row) => (row.user ? user(row.user) : labels(row.scope) || "–") },
    { name: "where", of: (row) => (row.em?.instance ? host(row.em) : "–") },
    { name: "how much", class: "wide", of: (row) => resource(row.resource) },
    { name: "by", class: "wide", of: (row) => row.actor },
  ], rows, "nothing has happened yet");
}

// What was refused within the last hour, summed over the periods that it is told in: the latest sums, where there are very many.
async function refusals() {
  const sums = new Map();
  let token = "";
  const from = new Date(now() - HOUR * 1000).toISOString();
  for (let page = 0; page < PAGES; page += 1) {
    const told = await ask("ListRefusals", { from_time: from, page_size: PAGE, page_token: token || undefined });
    for (const row of told.refusals) {
      const key = JSON.stringify([row.user, row.scope, row.dimension]);
      const sum = sums.get(key) ?? { ...row, refusals: 0 };
      sum.refusals += Number(row.refusals);
      sums.set(key, sum);
    }
    token = told.next_page_token;
    if (!token) break;
  }
  document.getElementById("refused-note").textContent = token ? `in the last hour, by the latest ${number(PAGES * PAGE)} sums` : "in the last hour";
  const rows = [...sums.values()].sort((one, other) => other.refusals - one.refusals).slice(0, ROWS);
  show("refused", table([
    { name: "user", width: "22%", of: (row) => (row.user ? user(row.user) : "others") },
    { name: "short at", of: (row) => place(row.scope) || row.scope_kind },
    { name: "in", width: "7em", of: (row) => plain(row.dimension) },
    { name: "times", class: "n", width: "5em", of: (row) => number(row.refusals) },
    { name: "wanted", class: "n wide", width: "6em", of: (row) => (row.last_requested ? amount(row.dimension, row.last_requested) : "") },
    { name: "there was", class: "n wide", width: "6em", of: (row) => (row.last_time ? amount(row.dimension, row.last_available) : "") },
  ], rows, "nobody was refused"));
}

async function scopes() {
  const told = await ask("ListScopes", { fullest_first: true, page_size: 10 });
  show("fullest", scopesTable(told.scopes));
}

// Asks again and again, each as long after the answer before, and only while somebody looks. A call that an older service does not
// have, or that this caller may not make, is not made again.
function keep(place, interval, look) {
  let [timer, stopped] = [undefined, false];
  const turn = async () => {
    let again = true;
    if (!document.hidden) {
      try {
        await look();
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

// `seen` is what the stream told: where it says that there is nothing, nothing is asked.
export function keepLists(seen) {
  const all = () => seen.overview.line !== undefined;
  const nobody = { waiting: () => all() && Number(seen.overview.line.waiting) === 0, locked: () => all() && Number(seen.overview.tickets?.locked) === 0 };
  const unless = (place, text, look) => async () => {
    if (nobody[place]()) show(place, element("p", { class: "faint" }, text));
    else await look();
  };
  const stops = [
    keep("waiting", SOON, unless("waiting", "nobody waits", waiting)),
    keep("locked", SOON, unless("locked", "no ticket waits for its engine", locked)),
    keep("actions", SOON, actions),
    keep("refused", LATER, refusals),
    keep("fullest", SOON, async () => (all() ? undefined : scopes())),
  ];
  return { stop: () => stops.forEach((stop) => stop()) };
}
