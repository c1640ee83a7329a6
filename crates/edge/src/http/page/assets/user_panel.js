// Panel of a user: sums, limits, waiting requests, refusals, tickets and history.

import { argument, command, toList } from "/page/address.js";
import { all, call } from "/page/api.js";
import { actionColumns, limitColumns, limitRows, refusalColumns, section, summed, ticketColumns, waitingColumns, without } from "/page/cells.js";
import { copyable, element, table } from "/page/elements.js";
import { permitted } from "/page/em_panel.js";
import { age, amount, dimensions, number, plain, span } from "/page/format.js";
import { since } from "/page/lists.js";

const ROWS = 20;
const LINES = 10;
const HOUR = 3600;
const PAGES = 5;

const sum = (name, value, note) => element("div", {}, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "muted" }, note));

// Sums of amounts by dimension.
export function held(tickets) {
  const sums = new Map();
  for (const ticket of tickets) {
    for (const [dimension, value] of Object.entries(dimensions(ticket.used ?? ticket.locked))) {
      const sum = sums.get(dimension) ?? { held: 0, locked: 0 };
      sums.set(dimension, { held: sum.held + value, locked: sum.locked + (ticket.used ? 0 : value) });
    }
  }
  return sums;
}

function sums(tickets, queue, refused) {
  const least = (partial) => (partial ? " or more" : "");
  const locked = tickets.found.filter(({ state }) => state === "locked").length;
  const times = refused.found.reduce((all, row) => all + Number(row.refusals), 0);
  const longest = Math.max(0, ...queue.found.map((row) => age(row.waiting_since)));
  return element("dl", { class: "sums" },
    sum("tickets", number(tickets.found.length) + least(tickets.partial), `${number(locked)} locked`),
    [...held(tickets.found)].filter(([, { held: all }]) => all > 0).map(([dimension, { held: all, locked: some }]) =>
      sum(plain(dimension), amount(dimension, all) + least(tickets.partial), some > 0 ? `${amount(dimension, some)} locked` : "")),
    sum("waiting", number(queue.found.length) + least(queue.partial), queue.found.length > 0 ? `longest ${span(longest)}` : ""),
    sum("refused, last hour", number(times) + least(refused.partial), ""));
}

export async function userPanel(user) {
  const none = { found: [], partial: false };
  const [tickets, queue, refused, scopes, history] = await Promise.all([
    all("ListTickets", "tickets", { user }, PAGES),
    all("ListWaiting", "waiting", { user }),
    permitted(all("ListRefusals", "refusals", { user, from_time: since(HOUR) })),
    permitted(call("ListScopes", { "labels.user": user, fullest_first: true, page_size: ROWS })),
    permitted(call("ListActions", { user, newest_first: true, page_size: LINES })),
  ]);
  return [
    sums(tickets, queue, refused ?? none),
    section("Limits", toList("limits", { label: `user=${user}` }), table(limitColumns, limitRows(scopes?.scopes ?? []), "no limit applies to a live ticket")),
    section("Refused, last hour", toList("refusals", { user }), table(without("user", refusalColumns), summed(refused?.found ?? []).slice(0, ROWS), "never")),
    section("Waiting", toList("waiting", { user }), table(waitingColumns(undefined), queue.found.slice(0, ROWS), "nothing")),
    section("Tickets", toList("tickets", { user }), table(without("user", ticketColumns), tickets.found.slice(0, ROWS), "none")),
    section("History", toList("history", { user }), table(without("subject", actionColumns), history?.actions ?? [], "no line that you may see")),
    section("Commands", undefined, copyable(command("ticket list --user", argument(user))), copyable(command("limit set", argument(`user=${user}`), "--max instances=…"))),
  ];
}
