// Users by what they hold. The service sums the tickets of each user every few seconds.

import { command, option } from "/page/address.js";
import { USUAL } from "/page/capacity.js";
import { user } from "/page/cells.js";
import { cluster } from "/page/cluster.js";
import { bar } from "/page/elements.js";
import { amount, number, plain, seconds, span } from "/page/format.js";
import { called } from "/page/list.js";
import { providers } from "/page/queues.js";

const EXTERNAL = { Yarn: ["queue_memory", "queue_cores", "queue_instances"], Kubernetes: ["kubernetes_memory", "kubernetes_millicores"] };

const used = (row, dimension) => Number(row.dimensions[dimension]?.used ?? 0);
const locked = (row, dimension) => Number(row.dimensions[dimension]?.locked ?? 0);
const held = (row, dimension) => used(row, dimension) + locked(row, dimension);

const name = { name: "user", class: "text", of: (row) => user(row.user) };
const tickets = { name: "tickets", class: "n", of: (row) => number(Number(row.used_tickets) + Number(row.locked_tickets)) };
const idle = { name: "idle", class: "n", of: (row) => number(row.idle_tickets ?? 0) };
const sum = (dimension, kind) => ({ name: plain(dimension), class: `n ${kind}`, sort: dimension, only: `-${dimension}`, of: (row) => (held(row, dimension) > 0 ? amount(dimension, held(row, dimension)) : "–") });

export const summedAgo = (age) => (age ? `summed ${span(seconds(age))} ago` : "not all are summed yet");

// Columns of the first users; `most` is what the first one holds.
export const topColumns = (by, most) => [name,
  { class: "bars", of: (row) => bar(["used", used(row, by) / most], ["locked", locked(row, by) / most]) },
  { ...sum(by, ""), sort: undefined }, tickets, idle];

export const mostHeld = (rows, by) => Math.max(1, ...rows.map((row) => held(row, by)));

const sortedBy = (fields) => (fields.get("sort") ?? users.sort).replace(/^-/, "");

// The dimensions of the EMs and of the providers of external queues, and the chosen one.
function dimensions(fields) {
  const ofEms = (cluster.overview.ems ?? []).flatMap((group) => Object.keys(group.dimensions ?? {}));
  return [...new Set([...USUAL, ...ofEms, ...providers.last.flatMap(({ type }) => EXTERNAL[type] ?? []), sortedBy(fields)])];
}

const read = called("ListUsers", "users", (fields) => ({ dimension: sortedBy(fields) }), (fields) => {
  const part = fields.get("part")?.toLowerCase();
  return part ? (row) => row.user.toLowerCase().includes(part) : undefined;
});

export const users = {
  title: "Users", note: "who holds most first", empty: "No user holds any of it.", sort: "-instances",
  filters: [{ name: "part", label: "part of a name" }],
  chips: (fields) => dimensions(fields).map((one) => ({ text: plain(one), set: { sort: `-${one}` }, isOn: one === sortedBy(fields) })),
  columns: (fields) => {
    const by = sortedBy(fields);
    return [name, sum(by, ""), { name: "locked of it", class: "n wide", of: (row) => (locked(row, by) > 0 ? amount(by, locked(row, by)) : "–") },
      ...USUAL.filter((one) => one !== by).map((one) => sum(one, "mid")), tickets, idle,
      { name: "locked tickets", class: "n wide", of: (row) => number(row.locked_tickets) }];
  },
  read: async (fields, size, token) => {
    const page = await read(fields, size, token);
    return { ...page, note: [page.note, summedAgo(page.reply.age)].filter(Boolean).join(", ") };
  },
  command: (fields) => command("user list", option("sort", fields.has("sort") ? sortedBy(fields) : undefined)),
};
