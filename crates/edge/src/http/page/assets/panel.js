// Beside the page, one thing in full: a host, a ticket, a user, or what a search finds.

import { ask, Refused } from "/page/api.js";
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

// What is shown last stays, whichever is answered last.
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
    const told = (value) => amount(dimension, value ?? 0);
    const part = (value) => (value ?? 0) / Math.max(1, total[dimension]);
    const room = total[dimension] - (kept[dimension] ?? 0);
    const held = (used[dimension] ?? 0) + (locked[dimension] ?? 0);
    return element("div", {},
      element("h3", {}, `${plain(dimension)} ${room > 0 ? percent(held / room) : ""}`),
      bar(["used", part(used[dimension])], ["locked", part(locked[dimension])], ["protected", part(kept[dimension])]),
      element("p", { class: "faint" }, `${told(used[dimension])} used, ${told(locked[dimension])} locked, ${told(kept[dimension])} protected, ${told(left[dimension])} free of ${told(total[dimension])}`));
  });
}

function reported(load) {
  if (!load) return "nothing";
  const memory = Number(load.memory_max) > 0 ? `${bytes(load.memory_used)} of ${bytes(load.memory_max)} memory, ` : "";
  return `${memory}${number(load.cpu_permille / 10)}% of all cores busy`;
}

export function showHost(em) {
  return open(em.instance, async () => {
    const [host, held, history] = await Promise.all([
      ask("GetEm", byEm(em)),
      ask("ListTickets", { ...byEm(em), page_size: TICKETS }),
      ask("ListActions", { ...byEm(em), newest_first: true, page_size: 10 }).catch((error) => {
        if (error instanceof Refused) return { actions: [] };
        throw error;
      }),
    ]);
    const { em: told } = host;
    const drained = told.drain ? `${told.drain.reason || "no reason given"} (${told.drain.drained_by}, ${span(age(told.drain.drain_time))} ago)` : undefined;
    return [
      line("kind", em.application_name),
      line("health", told.health.replace("HEALTH_", "").toLowerCase().replace("unspecified", "not reported")),
      told.silent ? element("p", { class: "bad-text" }, `silent for ${span(age(told.last_report_time))}`) : undefined,
      told.unregistering ? element("p", { class: "bad-text" }, "unregistered: its tickets are being ended") : undefined,
      line("drained", drained),
      line("registered", `${span(age(told.register_time))} ago`),
      line("labels", labels(told.labels)),
      line("reserved for", labels(told.reserved_labels)),
      amounts(told),
      line("its host reports", reported(told.load)),
      element("h3", {}, held.next_page_token ? `The first ${TICKETS} tickets` : "Tickets"),
      ticketsTable(held.tickets),
      element("h3", {}, "Last actions"),
      actionsTable(history.actions),
    ];
  });
}

export function showTicket(ticket_id) {
  return open(`Ticket ${ticket_id}`, async () => {
    const [{ ticket: told }, { actions }] = await Promise.all([ask("GetTicket", { ticket_id }), ask("ListActions", { ticket_id })]);
    return [
      line("state", told.state),
      line("user", link(`${told.user} / ${told.creator}`, () => showUser(told.user))),
      line("engine type", told.engine_type),
      line("host", link(told.em.instance, () => showHost(told.em))),
      line("engine", told.engine?.instance),
      line("holds", resource(told.used ?? told.locked)),
      line("really uses", told.observed ? resource(told.observed) : undefined),
      line("granted", `${span(age(told.locked_time))} ago, to ${told.principal}`),
      line("rolled back", told.expire_time ? `in ${span(-age(told.expire_time))}, unless its engine reports` : undefined),
      line("labels", labels(told.labels)),
      element("h3", {}, "Its life"),
      actionsTable(actions),
    ];
  });
}

async function ofUser(user) {
  const [held, scopes, line] = await Promise.all([
    ask("ListTickets", { user, page_size: TICKETS }),
    ask("ListScopes", { "labels.user": user, fullest_first: true, page_size: 10 }),
    ask("ListWaiting", { user, page_size: TICKETS }),
  ]);
  return { held, scopes, line };
}

function userParts({ held, scopes, line }) {
  return [
    element("h3", {}, held.next_page_token ? `The first ${TICKETS} tickets` : "Tickets"),
    ticketsTable(held.tickets),
    element("h3", {}, "Limits"),
    scopesTable(scopes.scopes),
    element("h3", {}, "Waiting in line"),
    table([
      { name: "wants", class: "wrap", of: (row) => resource(row.resource) },
      { name: "short at", class: "wrap", of: (row) => row.spots.map((spot) => spot.scope).join(", ") },
      { name: "for", class: "n", width: "4em", of: (row) => span(age(row.waiting_since)) },
    ], line.waiting, "nothing"),
  ];
}

export function showUser(user) {
  return open(`User ${user}`, async () => userParts(await ofUser(user)));
}

function hostsTable(names) {
  return table([{ name: "host", of: (em) => link(em.instance, () => showHost(em)) }, { name: "kind", of: (em) => em.application_name }], names, "no hosts");
}

// An answer looks through so many hosts, and may have few although more follow.
async function hostsWith(key, value) {
  let [ems, more] = [[], ""];
  do {
    const told = await ask("ListEms", { [`labels.${key}`]: value, page_size: FOUND - ems.length, page_token: more || undefined });
    [ems, more] = [ems.concat(told.ems), told.next_page_token];
  } while (more && ems.length < FOUND);
  return { ems, more };
}

export function search(text, hosts) {
  if (text === "") return closePanel();
  if (UUID.test(text)) return showTicket(text.toLowerCase());
  const [, key, value] = /^([^=]+)=(.*)$/.exec(text) ?? [];
  return open(`Search: ${text}`, async () => {
    if (key !== undefined) {
      const [{ ems, more }, { scopes }] = await Promise.all([
        hostsWith(key, value),
        ask("ListScopes", { [`labels.${key}`]: value, fullest_first: true, page_size: FOUND }),
      ]);
      return [element("h3", {}, more ? `The first ${FOUND} hosts` : "Hosts"), hostsTable(ems.map(({ em }) => em)), element("h3", {}, "Limits"), scopesTable(scopes)];
    }
    const wanted = text.toLowerCase();
    const found = hosts.names.filter(({ instance }) => instance.toLowerCase().includes(wanted));
    const user = await ofUser(text);
    const heading = found.length > FOUND ? `The first ${FOUND} of ${number(found.length)} hosts` : "Hosts";
    return [element("h3", {}, heading), hostsTable(found.slice(0, FOUND)), ...userParts(user)];
  });
}
