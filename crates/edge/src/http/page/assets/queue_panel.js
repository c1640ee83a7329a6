// Panel of an external queue: its amounts and those of its ancestors, its applications, and refusals by it.

import { argument, command, toList, toQueue } from "/page/address.js";
import { all, call } from "/page/api.js";
import { ago, refusalColumns, section, summed, ticket, user, without } from "/page/cells.js";
import { bar, copyable, element, line, link, table } from "/page/elements.js";
import { known, permitted } from "/page/em_panel.js";
import { amount, number, seconds, span } from "/page/format.js";
import { queueShare, since } from "/page/lists.js";

const ROWS = 20;
const HOUR = 3600;

const amounts = (provider) => (provider.type === "Kubernetes" ? [["cores", "millicores", "kubernetes_millicores"], ["memory", "memory", "memory"]] : [["cores", "cores", "cores"], ["memory", "memory", "memory"]]);

const part = (which, name, field, dimension) => ({ name: `${name} ${which}`, class: which === "left" ? "n" : "n mid", of: (queue) => (queue[which] ? amount(dimension, queue[which][field]) : "–") });

const queueColumns = (provider) => [
  { name: "external queue", class: "text", of: (queue) => link(queue.path, toQueue(provider, queue.path)) },
  { name: "state", of: (queue) => queue.state.replace("QUEUE_STATE_", "").toLowerCase() },
  { class: "bars", of: (queue) => bar(["used", queueShare(queue)]) },
  ...amounts(provider).flatMap(([name, field, dimension]) => [part("used", name, field, dimension), part("left", name, field, dimension), part("max", name, field, dimension)]),
];

const applicationColumns = [
  { name: "application", class: "text", of: (row) => row.application_id },
  { name: "name", class: "text mid", of: (row) => row.name },
  { name: "user", class: "text", of: (row) => user(row.user) },
  { name: "state", of: (row) => row.state.toLowerCase() },
  { name: "cores", class: "n", of: (row) => number(row.allocated?.cores ?? 0) },
  { name: "memory", class: "n mid", of: (row) => amount("memory", row.allocated?.memory ?? 0) },
  { name: "age", class: "n mid", of: (row) => ago(row.start_time) },
  { name: "ticket", of: (row) => (row.ticket_id ? ticket(row.ticket_id) : element("span", { class: "amber" }, "none")) },
];

export async function queuePanel({ provider, path }) {
  const by = { "provider.name": provider.name, "provider.resource_type": provider.type };
  const reply = await known(call("GetQueue", { ...by, queue_name: path }));
  if (!reply) return [element("p", {}, element("b", {}, path), ` is no queue of ${provider.name}.`), element("p", {}, link("All its queues", toList("queues", { provider: `${provider.type}/${provider.name}` })))];
  const scope = `provider=${provider.name},queue=${path}`;
  const [applications, refused] = await Promise.all([
    call("ListApplications", { ...by, queue_name: path, page_size: ROWS }),
    permitted(all("ListRefusals", "refusals", { scope, from_time: since(HOUR) })),
  ]);
  return [
    line(`${provider.name}, ${provider.type} · read ${span(seconds(reply.age))} ago`),
    table(queueColumns(provider), [reply.queue, ...reply.ancestors], ""),
    provider.type === "Kubernetes" ? undefined : section(applications.next_page_token ? `The first ${ROWS} applications` : "Applications", undefined, table(applicationColumns, applications.applications, "none")),
    section("Refused by it, last hour", toList("refusals", { scope }), table(without("refused by", refusalColumns), summed(refused?.found ?? []).slice(0, ROWS), "no request")),
    section("Commands", undefined, copyable(command("application list", `--provider ${argument(provider.name)}`, `--queue ${argument(path)}`))),
  ];
}
