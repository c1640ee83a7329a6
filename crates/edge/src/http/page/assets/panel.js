// Panel beside the page: an EM, a ticket, a user, or the results of a search.

import { call, Refused } from "/page/api.js";
import { age, amount, bar, bytes, dimensions, element, labels, link, number, percent, plain, resource, span, table } from "/page/format.js";
import { actionsTable, scopesTable, ticket } from "/page/lists.js";

const TICKETS = 20;
const FOUND = 50;
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;

let [showing, opener] = [0, undefined];

export function closePanel() {
  showing += 1;
  document.getElementById("panel").hidden = true;
  document.getElementById("panel-body").replaceChildren();
  opener?.focus?.();
  opener = undefined;
}

document.getElementById("panel-close").addEventListener("click", closePanel);

// The last opened view stays, regardless of the order of the replies.
async function open(title, content) {
  const mine = (showing += 1);
  const panel = document.getElementById("panel");
  if (panel.hidden) opener = document.activeElement;
  const body = document.getElementById("panel-body");
  panel.hidden = false;
  body.replaceChildren(element("h2", {}, title), element("p", { class: "faint" }, "…"));
  let shown;
  try {
    shown = await content();
  } catch (error) {
    shown = [element("p", { class: "bad-text" }, error.message)];
  }
  if (mine === showing) body.replaceChildren(element("h2", {}, title), ...shown.flat().filter((part) => part !== undefined));
}

const line = (name, value) => (value ? element("p", {}, element("span", { class: "faint" }, `${name}: `), value) : undefined);

function ticketsTable(tickets) {
  return table([
    { name: "ticket", width: "7.6em", of: (row) => ticket(row.ticket_id) },
    { name: "state", width: "4em", of: (row) => row.state },
    { name: "user", of: (row) => link(row.user, () => showUser(row.user)) },
    { name: "holds", class: "wrap", of: (row) => resource(row.used ?? row.locked) },
  ], tickets, "no tickets");
}

const byEm = (em) => ({ "em.application_name": em.application_name, "em.instance": em.instance });

function amounts(em) {
  const [total, kept, used, locked, left] = [em.total, em.protected_resource, em.used, em.locked, em.left].map(dimensions);
  return Object.keys(total).map((dimension) => {
    const shown = (value) => amount(dimension, value ?? 0);
    const part = (value) => (value ?? 0) / Math.max(1, total[dimension]);
    const room = total[dimension] - (kept[dimension] ?? 0);
    const held = (used[dimension] ?? 0) + (locked[dimension] ?? 0);
    return element("div", {},
      element("h3", {}, `${plain(dimension)} ${room > 0 ? percent(held / room) : ""}`),
      bar(["used", part(used[dimension])], ["locked", part(locked[dimension])], ["protected", part(kept[dimension])]),
      element("p", { class: "faint" }, `${shown(used[dimension])} used, ${shown(locked[dimension])} locked, ${shown(kept[dimension])} protected, ${shown(left[dimension])} free of ${shown(total[dimension])}`));
  });
}

function reported(load) {
  if (!load) return "nothing";
  const memory = Number(load.memory_max) > 0 ? `${bytes(load.memory_used)} of ${bytes(load.memory_max)} memory, ` : "";
  return `${memory}${number(load.cpu_permille / 10)}% of all cores busy`;
}

export function showEm(em) {
  return open(em.instance, async () => {
    const [reply, held, history] = await Promise.all([
      call("GetEm", byEm(em)),
      call("ListTickets", { ...byEm(em), page_size: TICKETS }),
      call("ListActions", { ...byEm(em), newest_first: true, page_size: 10 }).catch((error) => {
        if (error instanceof Refused) return { actions: [] };
        throw error;
      }),
    ]);
    const { em: state } = reply;
    const drained = state.drain ? `${state.drain.reason || "no reason given"} (${state.drain.drained_by}, ${span(age(state.drain.drain_time))} ago)` : undefined;
    return [
      line("kind", em.application_name),
      line("health", state.health.replace("HEALTH_", "").toLowerCase().replace("unspecified", "not reported")),
      state.silent ? element("p", { class: "bad-text" }, `silent for ${span(age(state.last_report_time))}`) : undefined,
      state.unregistering ? element("p", { class: "bad-text" }, "unregistered: its tickets are being ended") : undefined,
      line("drained", drained),
      line("registered", `${span(age(state.register_time))} ago`),
      line("labels", labels(state.labels)),
      line("reserved for", labels(state.reserved_labels)),
      amounts(state),
      line("reported load", reported(state.load)),
      element("h3", {}, held.next_page_token ? `The first ${TICKETS} tickets` : "Tickets"),
      ticketsTable(held.tickets),
      element("h3", {}, "Last actions"),
      actionsTable(history.actions),
    ];
  });
}

export function showTicket(ticket_id) {
  return open(`Ticket ${ticket_id}`, async () => {
    const [{ ticket: state }, { actions }] = await Promise.all([call("GetTicket", { ticket_id }), call("ListActions", { ticket_id })]);
    return [
      line("state", state.state),
      line("user", link(`${state.user} / ${state.creator}`, () => showUser(state.user))),
      line("engine type", state.engine_type),
      line("EM", link(state.em.instance, () => showEm(state.em))),
      line("engine", state.engine?.instance),
      line("holds", resource(state.used ?? state.locked)),
      line("observed use", state.observed ? resource(state.observed) : undefined),
      line("granted", `${span(age(state.locked_time))} ago, to ${state.principal}`),
      line("expires", state.expire_time ? `in ${span(-age(state.expire_time))}, unless its engine is confirmed` : undefined),
      line("labels", labels(state.labels)),
      element("h3", {}, "History"),
      actionsTable(actions),
    ];
  });
}

async function ofUser(user) {
  const [held, scopes, line] = await Promise.all([
    call("ListTickets", { user, page_size: TICKETS }),
    call("ListScopes", { "labels.user": user, fullest_first: true, page_size: 10 }),
    call("ListWaiting", { user, page_size: TICKETS }),
  ]);
  return { held, scopes, line };
}

function userParts({ held, scopes, line }) {
  return [
    element("h3", {}, held.next_page_token ? `The first ${TICKETS} tickets` : "Tickets"),
    ticketsTable(held.tickets),
    element("h3", {}, "Limits"),
    scopesTable(scopes.scopes),
    element("h3", {}, "Waiting requests"),
    table([
      { name: "request", class: "wrap", of: (row) => resource(row.resource) },
      { name: "short at", class: "wrap", of: (row) => row.entries.map((entry) => entry.scope).join(", ") },
      { name: "for", class: "n", width: "4em", of: (row) => span(age(row.waiting_since)) },
    ], line.waiting, "nothing"),
  ];
}

export function showUser(user) {
  return open(`User ${user}`, async () => userParts(await ofUser(user)));
}

function emsTable(names) {
  return table([{ name: "EM", of: (em) => link(em.instance, () => showEm(em)) }, { name: "kind", of: (em) => em.application_name }], names, "no EMs");
}

// A page reads a bounded number of EMs, and may have few matches although more follow.
async function emsWith(key, value) {
  let [ems, more] = [[], ""];
  do {
    const page = await call("ListEms", { [`labels.${key}`]: value, page_size: FOUND - ems.length, page_token: more || undefined });
    [ems, more] = [ems.concat(page.ems), page.next_page_token];
  } while (more && ems.length < FOUND);
  return { ems, more };
}

export function search(text, map) {
  if (text === "") return closePanel();
  if (UUID.test(text)) return showTicket(text.toLowerCase());
  const [, key, value] = /^([^=]+)=(.*)$/.exec(text) ?? [];
  return open(`Search: ${text}`, async () => {
    if (key !== undefined) {
      const [{ ems, more }, { scopes }] = await Promise.all([
        emsWith(key, value),
        call("ListScopes", { [`labels.${key}`]: value, fullest_first: true, page_size: FOUND }),
      ]);
      return [element("h3", {}, more ? `The first ${FOUND} EMs` : "EMs"), emsTable(ems.map(({ em }) => em)), element("h3", {}, "Limits"), scopesTable(scopes)];
    }
    const wanted = text.toLowerCase();
    const found = map.names.filter(({ instance }) => instance.toLowerCase().includes(wanted));
    const user = await ofUser(text);
    const heading = found.length > FOUND ? `The first ${FOUND} of ${number(found.length)} EMs` : "EMs";
    return [element("h3", {}, heading), emsTable(found.slice(0, FOUND)), ...userParts(user)];
  });
}
