// Panel of a limit's scope: what is held of it, who holds, waits and was refused, and who set it.

import { argument, command, toList } from "/page/address.js";
import { all, call } from "/page/api.js";
import { ago, fullText, limitBar, refusalColumns, section, shares, summed, user, waitingColumns, without } from "/page/cells.js";
import { bar, copyable, element, line, table } from "/page/elements.js";
import { known, permitted } from "/page/em_panel.js";
import { amount, dimensions, labels, number, percent, plain } from "/page/format.js";
import { labelFields, since } from "/page/lists.js";
import { held } from "/page/user_panel.js";

const ROWS = 20;
const HOUR = 3600;
const PAGES = 5;

// All labels of a ticket by which limits count it, with those that follow from its other fields.
function labelsOf(ticket) {
  const { yarn, kubernetes } = ticket.used ?? ticket.locked ?? {};
  const external = (ticket.used ?? ticket.locked)?.driver_and_yarn?.yarn ?? yarn;
  const inside = (ticket.used ?? ticket.locked)?.driver_and_kubernetes?.kubernetes ?? kubernetes;
  return {
    ...ticket.labels, user: ticket.user, creator: ticket.creator, engine_type: ticket.engine_type,
    engine_family: ticket.engine_type.replace(/-[^-]*$/, ""), em_application: ticket.em.application_name, em: ticket.em.instance,
    queue: external?.queue_name, namespace: inside?.namespace,
  };
}

// Live tickets that count in a scope. No call lists tickets by a label: those of the user or EM are read, else the oldest of all.
async function holders(scope) {
  const em = scope.em && scope.em_application ? { "em.application_name": scope.em_application, "em.instance": scope.em } : {};
  const { found, partial } = await all("ListTickets", "tickets", { user: scope.user, ...em }, PAGES);
  const isIn = (ticket) => Object.entries(scope).every(([key, value]) => (labelsOf(ticket)[key] ?? "") === value);
  const users = Map.groupBy(found.filter(isIn), (ticket) => ticket.user);
  return { users, read: found.length, partial };
}

function holdersTable({ users, read, partial }, full) {
  const rows = [...users].map(([name, tickets]) => ({ name, tickets: tickets.length, held: held(tickets).get(full?.dimension)?.held ?? (full?.dimension === "instances" ? tickets.length : 0) }));
  rows.sort((one, other) => other.held - one.held || other.tickets - one.tickets);
  const most = Math.max(1, ...rows.map((row) => row.held));
  const columns = [
    { name: "user", class: "text", of: (row) => user(row.name) },
    { class: "bars", of: (row) => bar(["used", row.held / most]) },
    { name: full ? plain(full.dimension) : "held", class: "n", of: (row) => (full ? amount(full.dimension, row.held) : "–") },
    { name: "share", class: "n", of: (row) => (full ? percent(row.held / Math.max(1, full.held)) : "–") },
    { name: "tickets", class: "n", of: (row) => number(row.tickets) },
  ];
  return [table(columns, rows.slice(0, ROWS), "no user"), partial ? line(`Only the oldest ${number(read)} tickets were read.`) : undefined];
}

const dimensionColumns = [
  { name: "dimension", class: "text", of: (row) => plain(row.dimension) },
  { name: "full", class: "n", of: fullText },
  { class: "bars", of: limitBar },
  { name: "used", class: "n mid", of: (row) => amount(row.dimension, row.used) },
  { name: "locked", class: "n", of: (row) => amount(row.dimension, row.locked) },
  { name: "maximum", class: "n", of: (row) => amount(row.dimension, row.most) },
  { name: "by", class: "text mid", of: (row) => row.limit.name },
];

// The present author of each deciding limit, and the changes that the history has of limits with these labels.
async function setters(limits) {
  const names = limits.map(({ name }) => name);
  const [listed, history] = await Promise.all([
    permitted(all("ListLimits", "limits", {}, PAGES)),
    permitted(call("ListActions", { actions: ["limit_set", "limit_deleted"], newest_first: true, page_size: 1000 })),
  ]);
  const isOf = (action) => limits.some((limit) => labels(limit.labels) === labels(action.scope) && [...limit.each].sort().join() === [...action.each].sort().join());
  return { limits: (listed?.found ?? []).filter(({ name }) => names.includes(name)), changes: (history?.actions ?? []).filter(isOf) };
}

const most = (max) => Object.entries(max).map(([dimension, value]) => `${plain(dimension)} ${amount(dimension, Number(value))}`).join(", ");

const changeColumns = [
  { name: "ago", class: "n", of: (row) => ago(row.action_time) },
  { name: "change", class: "mid", of: (row) => row.action.replace("limit_", "") },
  { name: "maximum", class: "text", of: (row) => most(dimensions(row.resource)) },
  { name: "reason", class: "text", of: (row) => row.reason },
  { name: "by", class: "text", of: (row) => row.actor },
];

const setColumns = [
  { name: "limit", class: "text", of: (row) => row.name },
  { name: "maximum", class: "text", of: (row) => most(row.max) || "none" },
  { name: "guarantee", class: "text mid", of: (row) => most(row.guarantee) || "none" },
  { name: "mode", class: "mid", of: (row) => row.mode.replace("LIMIT_MODE_", "").toLowerCase() },
  { name: "set", class: "n mid", of: (row) => ago(row.update_time) },
  { name: "by", class: "text", of: (row) => row.updated_by },
];

// The name of a scope in refusals.
const scopeName = (scope) => Object.entries(scope).sort(([one], [other]) => (one < other ? -1 : 1)).map(([key, value]) => `${key}=${value}`).join(",");

export async function limitPanel(scope) {
  const [found, queue, refused] = await Promise.all([
    known(call("GetScope", labelFields("labels", scope))),
    permitted(call("ListWaiting", { ...labelFields("scope", scope), page_size: ROWS })),
    permitted(all("ListRefusals", "refusals", { scope: scopeName(scope), from_time: since(HOUR) })),
  ]);
  const name = labels(scope).replaceAll(", ", ",");
  const [limits, one] = [found?.scope.limits ?? [], found?.scope];
  const full = one ? shares(one) : [];
  const [holding, set] = await Promise.all([found ? holders(scope) : undefined, setters(found ? limits : [{ name: "", labels: scope, each: [] }])]);
  return [
    found ? undefined : element("p", {}, "No limit in force counts ", element("b", {}, labels(scope)), "."),
    found ? table(dimensionColumns, full, "No limit has a maximum here.") : undefined,
    found ? section("Holds it", scope.user ? toList("tickets", { user: scope.user }) : undefined, holdersTable(holding, full[0])) : undefined,
    section("Waits for it", toList("waiting", { key: new URLSearchParams(scope) }), table(waitingColumns(undefined), queue?.waiting ?? [], "no request")),
    section("Refused by it, last hour", toList("refusals", { scope: scopeName(scope) }), table(without("refused by", refusalColumns), summed(refused?.found ?? []).slice(0, ROWS), "no request")),
    section("Set by", toList("history", { show: "limits" }), set.limits.length > 0 ? table(setColumns, set.limits, "") : undefined, table(changeColumns, set.changes.slice(0, ROWS), "The history has no change of it.")),
    section("Commands", undefined, copyable(command("limit set", argument(name), full[0] ? `--max ${full[0].dimension}=${full[0].most}` : "--max instances=…")), copyable(command("scope get", argument(name)))),
  ];
}
