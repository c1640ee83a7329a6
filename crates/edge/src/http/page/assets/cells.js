// Contents of table cells, and tables that several parts of the page have.

import { emByKey, shortName } from "/page/cluster.js";
import { bar, element, link, muted, table, when } from "/page/elements.js";
import { age, amount, dimensions, labels, number, percent, plain, resource, span, withUnit } from "/page/format.js";
import { toEm, toScope, toTicket, toUser } from "/page/address.js";

export const user = (name) => (name ? link(name, toUser(name)) : "others");

export const userAndCreator = (row) => [user(row.user), " ", muted(row.creator)];

// Without what all names end with; the whole name is the title.
export const em = (instance) => (instance?.instance ? link(shortName(instance.instance), toEm(instance), instance.instance) : "–");

// The end of an id identifies a ticket; the first half is the time.
export const ticket = (id) => link(`…${id.slice(-8)}`, toTicket(id), id);

export const scope = (map) => link(labels(map), toScope(map));

export const ago = (time) => (time ? when(span(age(time)), time) : "–");

export const left = (time) => (time ? when(span(-age(time)), time) : "–");

// The object of a refusal or queue entry is text for display. A registered EM, and labels without further separators, are links.
export function wait(text) {
  if (text === "em=any") return "any EM";
  if (text.startsWith("em=")) {
    const found = emByKey(text.slice(3));
    return found ? em(found) : text.replace(/^em=[^/]*\//, "");
  }
  const parts = text.split(",").map((part) => part.split("="));
  if (text.startsWith("provider=") || parts.some((part) => part.length !== 2)) return text;
  return link(parts.map((part) => part.join("=")).join(", "), toScope(Object.fromEntries(parts)));
}

// The dimensions of a scope with a maximum, the fullest first. The first limit that names a dimension decides its maximum.
export function shares(one) {
  const decided = new Map();
  for (const limit of one.limits ?? []) {
    for (const [dimension, most] of Object.entries(limit.max ?? {})) {
      // Waiting requests hold nothing.
      if (dimension === "waiting") continue;
      if (!decided.has(dimension)) decided.set(dimension, { most: Number(most), limit });
    }
  }
  const found = [...decided].filter(([, { limit }]) => limit.mode !== "LIMIT_MODE_OFF").map(([dimension, { most, limit }]) => {
    const [used, locked] = [one.used, one.locked].map((amounts) => Number(amounts?.[dimension] ?? 0));
    return { dimension, most, limit, used, locked, held: used + locked, over: Math.max(0, used + locked - most), share: (used + locked) / Math.max(1, most) };
  });
  return found.sort((one, other) => other.share - one.share);
}

// The bar of a limit: what exceeds the maximum is at its end, and locked tickets count.
export function limitBar({ used, locked, most, over, share }) {
  const whole = Math.max(most, used + locked, 1);
  const within = Math.min(used, most) / whole;
  const kind = share >= 0.995 && over === 0 ? "full" : "used";
  return bar([kind, within], ["locked", Math.max(0, Math.min(used + locked, most) - Math.min(used, most)) / whole], ["over", over / whole]);
}

export const fullText = ({ dimension, over, share }) => (over > 0 ? element("b", { class: "red" }, `${amount(dimension, over)} over`) : percent(share));

const dimension = ({ dimension, limit }) => plain(dimension) + (limit.mode === "LIMIT_MODE_ADVISORY" ? " (advisory)" : "");

// Narrow windows have the amounts below the scope.
export const limitColumns = [
  { name: "scope", class: "text", of: ({ one, full }) => [scope(one.labels), full ? element("div", { class: "narrow muted" }, `${amount(full.dimension, full.held)} of ${amount(full.dimension, full.most)} ${dimension(full)}`) : undefined] },
  { class: "bars", of: ({ full }) => (full ? limitBar(full) : "") },
  { name: "full", class: "n", of: ({ full }) => (full ? fullText(full) : "–") },
  { name: "held", class: "n wide", of: ({ full }) => (full ? amount(full.dimension, full.held) : "–") },
  { name: "maximum", class: "n wide", of: ({ full }) => (full ? amount(full.dimension, full.most) : "none") },
  { name: "dimension", class: "text wide", of: ({ full }) => (full ? dimension(full) : "") },
];

export const limitRows = (scopes) => scopes.map((one) => ({ one, full: shares(one)[0] }));

const held = (row) => row.used ?? row.locked;
const only = (name) => ({ name, class: "n mid", of: (row) => {
  const value = dimensions(held(row))[name];
  return value === undefined ? "–" : amount(name, value);
} });

export const ticketColumns = [
  { name: "ticket", of: (row) => ticket(row.ticket_id) },
  { name: "user", class: "text", of: userAndCreator },
  { name: "EM", class: "text", of: (row) => em(row.em) },
  { name: "engine", class: "text wide", of: (row) => row.engine_type || "–" },
  { name: "state", class: "words", of: (row) => (row.expire_time ? ["locked, ", left(row.expire_time), " left"] : row.idle_since ? ["idle ", ago(row.idle_since)] : row.state) },
  only("memory"),
  only("cores"),
  { name: "other", class: "text wide", of: (row) => {
    const { memory, cores, ...others } = dimensions(held(row));
    return Object.entries(others).filter(([, value]) => value !== 0).map(([name, value]) => withUnit(name, value)).join(", ");
  } },
  { name: "age", class: "n", of: (row) => ago(row.locked_time) },
];

const ending = (row) => {
  if (row.withdrawn_time) return "withdrawn";
  if (row.mode === "RECLAIM_MODE_OBSERVE") return "only observed";
  return row.recall_time ? ["recalled ", ago(row.recall_time), " ago"] : ["in ", left(row.due_time)];
};

// Engines that are to end because requests wait.
export const reclaimColumns = [
  { name: "ticket", of: (row) => ticket(row.ticket_id) },
  { name: "user", class: "text", of: (row) => user(row.user) },
  { name: "idle", class: "n", of: (row) => (row.idle_since ? ago(row.idle_since) : row.busy ? "busy" : "–") },
  { name: "for", class: "text", of: (row) => (row.for_user ? user(row.for_user) : "–") },
  { name: "ends", class: "n", of: ending },
];

const entry = ({ scope: key, ahead }) => element("div", {}, wait(key), muted(Number(ahead) > 0 ? ` after ${number(ahead)}` : " next"));

const headStart = (seconds) => `${seconds > 0 ? "+" : "−"}${Math.abs(seconds)} s`;

// Why the request is where it is: its turn, and its head start.
const turn = (row) => (row.is_entitled ? "within its guarantee" : row.has_turn ? "has its turn" : "behind an own request");
const order = (row) => [turn(row), row.priority ? `, ${headStart(row.priority)}` : ""].join("");

// `first` is the position of the first row over all wait queues, undefined where it is not known.
export const waitingColumns = (first) => [
  ...(first === undefined ? [] : [{ name: "#", class: "n", of: (row) => number(first + row.place) }]),
  { name: "user", class: "text", of: userAndCreator },
  { name: "wants", class: "text wide", of: (row) => resource(row.resource) },
  { name: "waits for", class: "text", of: (row) => (row.kept_until ? muted("its caller to come back") : row.entries.map(entry)) },
  { name: "order", class: "text wide", of: (row) => order(row) },
  { name: "for", class: "n", of: (row) => ago(row.waiting_since) },
  { name: "time left", class: "n wide", of: (row) => left(row.wait_until) },
];

export const placed = (rows) => rows.map((row, place) => ({ ...row, place }));

const subject = (row) => (row.user ? user(row.user) : row.object ? row.object : labels(row.scope) || row.each.length > 0 ? scopeOrName(row) : "–");

const scopeOrName = (row) => (row.each.length > 0 ? [labels(row.scope), row.each.map((name) => `each ${name}`).join(", ")].filter(Boolean).join(", ") : scope(row.scope));

export const actionColumns = [
  { name: "ago", class: "n", of: (row) => ago(row.action_time) },
  { name: "action", of: (row) => (row.ticket_id ? link(row.action.replaceAll("_", " "), toTicket(row.ticket_id)) : row.action.replaceAll("_", " ")) },
  { name: "subject", class: "text", of: subject },
  { name: "EM", class: "text", of: (row) => em(row.em) },
  { name: "amount", class: "text wide", of: (row) => (row.resource ? resource(row.resource) : "") },
  { name: "reason", class: "text wide", of: (row) => row.reason },
  { name: "by", class: "text wide", of: (row) => row.actor },
];

export const refusalColumns = [
  { name: "user", class: "text", of: (row) => user(row.user) },
  { name: "refused by", class: "text", of: (row) => (row.scope ? wait(row.scope) : row.scope_kind) },
  { name: "short of", class: "text", of: (row) => plain(row.dimension) },
  { name: "times", class: "n", of: (row) => number(row.refusals) },
  { name: "wanted", class: "n wide", of: (row) => (row.last_time ? amount(row.dimension, row.last_requested) : "") },
  { name: "free", class: "n wide", of: (row) => (row.last_time ? amount(row.dimension, row.last_available) : "") },
  { name: "last", class: "n", of: (row) => ago(row.last_time) },
];

export const without = (name, columns) => columns.filter((column) => column.name !== name);

// Refusals of one user by one scope in one dimension, summed over their periods, most often first.
export function summed(refusals) {
  const sums = new Map();
  for (const row of refusals) {
    const key = JSON.stringify([row.user, row.scope, row.dimension]);
    const sum = sums.get(key) ?? { ...row, refusals: 0 };
    sum.refusals += Number(row.refusals);
    sums.set(key, sum);
  }
  return [...sums.values()].sort((one, other) => other.refusals - one.refusals);
}

export const section = (title, to, ...content) =>
  element("section", {}, element("h2", {}, title, to ? element("a", { href: to, class: "all" }, "all") : undefined), content);

