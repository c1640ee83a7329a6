// The lists, each with its call, filters and columns.

import { EM_APPLICATION, command, option, toEm, toList, toQueue } from "/page/address.js";
import { all, call } from "/page/api.js";
import { CHOSEN, STATES, URGENT, cluster, emKey, emLabels, full, fullness, shortName, stateOf, states } from "/page/cluster.js";
import { actionColumns, ago, limitColumns, limitRows, placed, refusalColumns, scope, ticketColumns, waitingColumns } from "/page/cells.js";
import { bar, element, link } from "/page/elements.js";
import { age, amount, dimensions, labels, number, now, seconds, span, withUnit } from "/page/format.js";
import { called } from "/page/list.js";
import { providers } from "/page/queues.js";
import { users } from "/page/users.js";

const HOUR = 3600;

// A chip that sets one field, and is on if the field has that value.
const choice = (fields, name, value, text = value) => ({ text, set: { [name]: value }, isOn: (fields.get(name) ?? undefined) === value });

function pair(text) {
  const [, key, value] = /^([^=]+)=(.*)$/s.exec(text ?? "") ?? [];
  return key === undefined ? undefined : { key, value };
}

// The EMs that a filter selects, in the order of a sort. The stream has all EMs, so the order is of all of them.
async function selected(fields) {
  const [label, part, state] = [pair(fields.get("label")), fields.get("part")?.toLowerCase(), fields.get("state")];
  const known = label ? await emLabels() : undefined;
  const rows = cluster.names.map((em, place) => ({ em, code: cluster.codes[place] })).filter(({ em, code }) =>
    (!state || stateOf(code) === state) && (!part || emKey(em).toLowerCase().includes(part)) && (!label || known.get(emKey(em))?.[label.key] === label.value));
  const urgent = ({ code }) => (URGENT.includes(stateOf(code)) ? 1 : 0);
  const orders = {
    state: (one, other) => urgent(other) - urgent(one) || fullness(other.code) - fullness(one.code),
    full: (one, other) => fullness(one.code) - fullness(other.code),
    name: (one, other) => (one.em.instance < other.em.instance ? -1 : 1),
  };
  const [, minus, by] = /^(-?)(.*)$/.exec(fields.get("sort") ?? "state");
  const order = orders[by] ?? orders.state;
  return rows.sort((one, other) => (minus ? order(other, one) : order(one, other)));
}

async function readEms(fields, size, page = "0") {
  const rows = await selected(fields);
  const from = Math.max(0, Number.parseInt(page, 10) || 0);
  const some = rows.slice(from, from + size);
  const { ems } = some.length > 0 ? await call("BatchGetEms", { ems: some.map(({ em }) => JSON.stringify(em)) }) : { ems: [] };
  const details = new Map(ems.map((one) => [emKey(one.em), one]));
  const next = from + size < rows.length ? String(from + size) : undefined;
  return { rows: some.map((row) => ({ ...row, detail: details.get(emKey(row.em)) })), next, all: rows.length };
}

const stateCell = ({ code }) => {
  const state = stateOf(code);
  if (CHOSEN.includes(state) && state !== "warn") return state;
  return element("span", { class: URGENT.includes(state) ? "tag urgent" : "tag" }, state);
};

// Of what can be granted: without the protected part.
const held = (name, extra) => ({ name, class: `n ${extra}`, of: ({ detail }) => {
  const total = dimensions(detail?.total)[name];
  if (total === undefined) return "–";
  const [used, locked, kept] = [detail.used, detail.locked, detail.protected_resource].map((amounts) => dimensions(amounts)[name] ?? 0);
  return `${amount(name, used + locked)} of ${amount(name, total - kept)}`;
} });

const emColumns = () => [
  { name: "EM", class: "text", sort: "name", of: ({ em }) => link([shortName(em.instance), element("span", { class: "wide" }, em.instance.slice(shortName(em.instance).length))], toEm(em), em.instance) },
  { name: "state", sort: "state", only: "state", of: stateCell },
  { name: "full", class: "n", sort: "full", of: ({ code }) => full(code) },
  { class: "bars mid", of: ({ code }) => bar([fullness(code) >= 100 ? "full" : "used", fullness(code) / 100]) },
  held("cores", ""),
  held("memory", "mid"),
  { name: "labels", class: "text wide", of: ({ detail }) => labels(detail?.labels) },
  { name: "load", class: "n wide", of: ({ detail }) => (detail?.load ? `${number(detail.load.cpu_permille / 10)}%` : "–") },
  { name: "reported", class: "n wide", of: ({ detail }) => ago(detail?.last_report_time) },
];

const ems = {
  title: "EMs", empty: "No EM matches.", sort: "state", largest: 100, read: readEms, columns: emColumns,
  filters: [{ name: "part", label: "part of a name" }, { name: "label", label: "label=value" }],
  chips: (fields) => [
    { ...choice(fields, "state", undefined, `all ${number(cluster.names.length)}`) },
    ...STATES.filter(Boolean).filter((state) => states().get(state) > 0 || fields.get("state") === state)
      .map((state) => choice(fields, "state", state, `${state} ${number(states().get(state))}`)),
  ],
  command: (fields) => command("em list", option("state", fields.get("state")), option("label", fields.get("label"))),
};

const AGES = [["", "any"], ["600", "10 minutes"], ["3600", "1 hour"], ["86400", "1 day"]];

// Idle tickets are used ones.
const ticketState = (state) => (state === "idle" ? { idle_for: "0s" } : { state });

const tickets = {
  title: "Tickets", note: "oldest first", empty: "No ticket matches.", columns: () => ticketColumns,
  filters: [{ name: "user", label: "user" }, { name: "em", label: "EM" }, { name: "engine", label: "engine type" }, { name: "label", label: "label=value" }, { name: "age", label: "older than", choices: AGES }],
  chips: (fields) => [choice(fields, "state", undefined, "all"), choice(fields, "state", "locked"), choice(fields, "state", "used"), choice(fields, "state", "idle")],
  read: called("ListTickets", "tickets", (fields) => ({ user: fields.get("user"), ...ticketState(fields.get("state")), ...emFields(fields.get("em")) }), (fields) => {
    const [engine, label, since] = [fields.get("engine"), pair(fields.get("label")), Number(fields.get("age"))];
    if (!engine && !label && !since) return undefined;
    return (row) => (!engine || row.engine_type === engine || row.engine_type.split("-")[0] === engine) && (!label || row.labels[label.key] === label.value) && (!since || age(row.locked_time) > since);
  }),
  command: (fields) => command("ticket list", option("user", fields.get("user")), option("em", fields.get("em")), fields.get("state") === "idle" ? "--idle 0s" : option("state", fields.get("state"))),
};

// An EM by its name in a filter, with or without its application.
export function emFields(name) {
  if (!name) return {};
  const found = cluster.names.find((em) => em.instance === name || emKey(em) === name);
  if (found) return { "em.application_name": found.application_name, "em.instance": found.instance };
  const [, application, instance] = /^(?:([^/]*)\/)?(.*)$/s.exec(name);
  return { "em.application_name": application ?? EM_APPLICATION, "em.instance": instance };
}

// A label may have an empty value: as a list it is not left out of the call.
export const labelFields = (prefix, map) => Object.fromEntries(Object.entries(map).map(([key, value]) => [`${prefix}.${key}`, [value]]));

const amounts = (byDimension) => Object.entries(byDimension).map(([dimension, amount]) => withUnit(dimension, amount)).join(", ") || "none";

const setColumns = [
  { name: "limit", class: "text", of: (row) => (row.each.length === 0 ? scope(row.labels) : row.name) },
  { name: "maximum", class: "text", of: (row) => amounts(row.max) },
  { name: "guarantee", class: "text wide", of: (row) => amounts(row.guarantee) },
  { name: "mode", class: "mid", of: (row) => row.mode.replace("LIMIT_MODE_", "").toLowerCase() },
  { name: "state", class: "wide", of: (row) => row.state.replace("LIMIT_STATE_", "").replace("_", " ").toLowerCase() },
  { name: "set", class: "n", of: (row) => ago(row.update_time) },
  { name: "by", class: "text", of: (row) => row.updated_by },
];

async function readLimits(fields, size, token) {
  if (fields.get("show") === "set") return called("ListLimits", "limits", () => ({}))(fields, size, token);
  const label = pair(fields.get("label"));
  const chosen = label ? labelFields("labels", { [label.key]: label.value }) : {};
  const order = fields.get("show") === "exceeded" ? { over_limit_only: true } : { fullest_first: true };
  const page = await called("ListScopes", "scopes", () => ({ ...chosen, ...order }))(fields, size, token);
  const partial = page.reply.partial || (order.fullest_first && page.rows.length === size);
  return { ...page, rows: limitRows(page.rows), note: partial ? "the fullest; there are others" : undefined };
}

const limits = {
  title: "Limits", empty: "No limit applies to a live ticket.", sort: "-full", read: readLimits,
  filters: [{ name: "label", label: "label=value" }],
  columns: (fields) => (fields.get("show") === "set" ? setColumns : limitColumns),
  chips: (fields) => [choice(fields, "show", undefined, "fullest"), choice(fields, "show", "exceeded"), choice(fields, "show", "set", "as set")],
  command: (fields) => (fields.get("show") === "set" ? command("limit list") : command("scope list", option("label", fields.get("label")))),
};

const waiting = {
  title: "Waiting", note: "next served first", empty: "Nobody waits.",
  filters: [{ name: "user", label: "user" }, { name: "em", label: "EM" }, { name: "label", label: "label=value" }],
  // The position over all queues is known only without a filter.
  columns: (fields) => waitingColumns(["user", "em", "label", "key"].some((name) => fields.get(name)) ? undefined : Number(fields.get("row") ?? 0) + 1),
  read: async (fields, size, token) => {
    const label = pair(fields.get("label"));
    const key = fields.get("key") ? Object.fromEntries(new URLSearchParams(fields.get("key"))) : label ? { [label.key]: label.value } : {};
    const page = await called("ListWaiting", "waiting", () => ({ user: fields.get("user"), ...emFields(fields.get("em")), ...labelFields("scope", key) }))(fields, size, token);
    return { ...page, rows: placed(page.rows) };
  },
  command: (fields) => command("waiting", option("user", fields.get("user")), option("em", fields.get("em"))),
};

const refusals = {
  title: "Refused", note: "the latest period first", empty: "No request was refused.",
  filters: [{ name: "user", label: "user" }, { name: "scope", label: "refused by" }, { name: "dimension", label: "short of" }],
  columns: () => [{ name: "period", class: "n mid", of: (row) => ago(row.period_start) }, ...refusalColumns],
  chips: (fields) => [choice(fields, "since", undefined, "last hour"), choice(fields, "since", "day", "last day"), choice(fields, "since", "all")],
  read: called("ListRefusals", "refusals", (fields) => ({
    user: fields.get("user"), scope: fields.get("scope"), dimension: fields.get("dimension"),
    from_time: fields.get("since") === "all" ? undefined : since(fields.get("since") === "day" ? 24 * HOUR : HOUR),
  })),
  command: (fields) => command("refusals", option("user", fields.get("user"))),
};

// A time before now, by whole minutes: callers within a minute share a reply.
export const since = (ago) => new Date(Math.floor((now() / 1000 - ago) / 60) * 60_000).toISOString();

const ACTIONS = {
  EMs: ["registered", "resized", "unregistered", "lost", "drained", "resumed", "held", "hold_ended"],
  limits: ["limit_set", "limit_deleted", "limits_in_force", "policy_set", "order_set", "priority_set", "priority_deleted",
    "reclaim_policy_set", "reclaim_policy_deleted"],
  repairs: ["repaired", "forced", "removed_from_queue", "reclaim_withdrawn", "adopted"],
  ends: ["released", "forced", "expired", "unregistered", "lost", "recalled"],
};

const history = {
  title: "History", empty: "Nothing has happened.", columns: () => actionColumns,
  filters: [{ name: "user", label: "user" }, { name: "em", label: "EM" }, { name: "actor", label: "by" }],
  chips: (fields) => [
    choice(fields, "show", undefined, "all"), ...Object.keys(ACTIONS).map((name) => choice(fields, "show", name)),
    { text: fields.get("order") === "oldest" ? "oldest first" : "newest first", set: { order: fields.get("order") === "oldest" ? undefined : "oldest" }, isOn: false },
  ],
  read: called("ListActions", "actions", (fields) => ({
    user: fields.get("user"), actor: fields.get("actor"), ticket_id: fields.get("ticket"), ...emFields(fields.get("em")),
    actions: ACTIONS[fields.get("show")] ?? [], newest_first: fields.get("order") !== "oldest",
  })),
  command: (fields) => command("history", option("user", fields.get("user")), option("em", fields.get("em"))),
};

const QUEUE_STATE = /^QUEUE_STATE_/;

async function readQueues(fields, size, token) {
  const known = await providers();
  const [type, ...name] = (fields.get("provider") ?? "").split("/");
  const provider = known.find((one) => one.type === type && one.name === name.join("/")) ?? known[0];
  if (!provider) return { rows: [], note: "There is no provider of external queues", providers: known };
  const page = await called("ListQueues", "queues", () => ({ "provider.name": provider.name, "provider.resource_type": provider.type }))(fields, size, token);
  const part = fields.get("part")?.toLowerCase();
  const rows = page.rows.filter(({ path }) => !part || path.toLowerCase().includes(part)).map((queue) => ({ provider, queue }));
  return { ...page, rows, note: `${provider.name}, read ${span(seconds(page.reply.age))} ago` };
}

const ofQueue = (name, extra) => ({ name, class: `n ${extra}`, of: ({ provider, queue }) => {
  const [field, shown] = name === "cores" && provider.type === "Kubernetes" ? ["millicores", "kubernetes_millicores"] : [name, name];
  const used = amount(shown, queue.used?.[field] ?? 0);
  return queue.max ? `${used} of ${amount(shown, queue.max[field])}` : used;
} });

const queues = {
  title: "External queues", empty: "No external queue.", read: readQueues,
  filters: [{ name: "part", label: "part of a name" }],
  chips: (fields) => providers.last.map((one) => ({ text: one.name, set: { provider: `${one.type}/${one.name}` }, isOn: (fields.get("provider") ?? `${providers.last[0].type}/${providers.last[0].name}`) === `${one.type}/${one.name}` })),
  columns: () => [
    { name: "external queue", class: "text", of: ({ provider, queue }) => link(queue.path, toQueue(provider, queue.path)) },
    { name: "state", of: ({ queue }) => queue.state.replace(QUEUE_STATE, "").toLowerCase() },
    { class: "bars", of: ({ queue }) => bar(["used", queueShare(queue)]) },
    ofQueue("cores", ""),
    ofQueue("memory", "mid"),
    { name: "running", class: "n wide", of: ({ queue }) => queue.running_applications ?? "–" },
    { name: "waiting", class: "n", of: ({ queue }) => queue.pending_applications ?? "–" },
  ],
  command: (fields) => command("queue list", option("provider", fields.get("provider")?.split("/").slice(1).join("/"))),
};

export const queueShare = (queue) => Math.max(0, ...["memory", "cores", "millicores"].map((name) => Number(queue.used?.[name] ?? 0) / Math.max(1, Number(queue.max?.[name] ?? 0))).filter((share) => share <= 10));

export const lists = Object.fromEntries(Object.entries({ ems, users, tickets, limits, waiting, refusals, history, queues }).map(([name, list]) => [name, { ...list, name }]));
