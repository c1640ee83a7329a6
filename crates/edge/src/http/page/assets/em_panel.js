// Panel of an EM: its capacity, who waits for it, its tickets and history. An EM that is gone has its history alone.

import { command, emName, argument, toList } from "/page/address.js";
import { Refused, call } from "/page/api.js";
import { actionColumns, ago, section, without, ticketColumns, waitingColumns } from "/page/cells.js";
import { capacityTable } from "/page/capacity.js";
import { copyable, element, line, link, muted, table } from "/page/elements.js";
import { age, bytes, dimensions, labels, number, resource, span } from "/page/format.js";

const ROWS = 20;
const LINES = 10;
const ENDS = ["unregistered", "lost"];

const byEm = (em) => ({ "em.application_name": em.application_name, "em.instance": em.instance });

// Undefined instead of an error that the service gives for an object that it does not have.
export async function known(reading) {
  try {
    return await reading;
  } catch (error) {
    if (error instanceof Refused && error.status === 404) return undefined;
    throw error;
  }
}

// An empty list for a viewer who may not make the call.
export async function permitted(reading) {
  try {
    return await reading;
  } catch (error) {
    if (error instanceof Refused && error.status === 403) return undefined;
    throw error;
  }
}

function stateTags(em) {
  const health = em.health.replace("HEALTH_", "").toLowerCase().replace("unspecified", "not reported");
  return [
    em.silent ? element("span", { class: "tag urgent" }, "silent for ", span(age(em.last_report_time))) : undefined,
    element("span", { class: health === "unhealthy" ? "tag urgent" : "tag" }, health),
    em.drain ? element("span", { class: "tag" }, "draining") : undefined,
    em.unregistering ? element("span", { class: "tag" }, "unregistered: its tickets are being ended") : undefined,
  ];
}

function facts(em) {
  const load = em.load ? `load ${number(em.load.cpu_permille / 10)}% of all cores${Number(em.load.memory_max) > 0 ? `, ${bytes(em.load.memory_used)} of ${bytes(em.load.memory_max)} memory` : ""}` : undefined;
  const parts = [em.em.application_name, labels(em.labels), labels(em.reserved_labels) && `reserved for ${labels(em.reserved_labels)}`, load].filter(Boolean);
  return [
    element("p", {}, stateTags(em)),
    line(parts.join(" · "), " · registered ", ago(em.register_time), " ago", ...(em.last_report_time ? [" · reported ", ago(em.last_report_time), " ago"] : [])),
    em.drain ? element("p", {}, "Drained ", ago(em.drain.drain_time), ` ago by ${em.drain.drained_by}: `, em.drain.reason || "no reason") : undefined,
  ];
}

function amounts(em) {
  const [total, kept, used, locked, left] = [em.total, em.protected_resource, em.used, em.locked, em.left].map(dimensions);
  return Object.keys(total).map((dimension) => [dimension, {
    total: total[dimension], protected: kept[dimension] ?? 0, used: used[dimension] ?? 0, locked: locked[dimension] ?? 0, free: left[dimension] ?? 0, out: 0,
  }]);
}

export async function emPanel(em) {
  const [found, held, queue, history] = await Promise.all([
    known(call("GetEm", byEm(em))),
    permitted(call("ListTickets", { ...byEm(em), page_size: ROWS })),
    permitted(call("ListWaiting", { ...byEm(em), page_size: ROWS })),
    permitted(call("ListActions", { ...byEm(em), newest_first: true, page_size: LINES })),
  ]);
  const list = { em: emName(em) };
  const past = section("History", toList("history", list), table(without("EM", actionColumns), history?.actions ?? [], "no line that you may see"));
  if (!found) return [gone(em, history?.actions ?? []), past];
  return [
    facts(found.em),
    capacityTable(amounts(found.em)),
    section("Waiting for this EM", toList("waiting", list), table(waitingColumns(undefined), queue?.waiting ?? [], "no request")),
    section("Tickets", toList("tickets", list), table(without("EM", ticketColumns), held?.tickets ?? [], "none")),
    past,
    section("Commands", undefined,
      copyable(command(found.em.drain ? "em resume" : "em drain", argument(emName(em)), found.em.drain ? undefined : "--reason '…'")),
      copyable(command("em get", argument(emName(em))))),
  ];
}

// An EM that is not registered: its end and its last capacity, from the history.
function gone(em, actions) {
  const end = actions.find(({ action }) => ENDS.includes(action));
  const last = actions.find(({ action, ticket_id: id }) => id === "" && ["registered", "resized"].includes(action));
  return [
    element("p", {}, element("b", {}, em.instance), " is not registered."),
    end ? element("p", {}, `${end.action === "lost" ? "Lost" : "Unregistered"} `, ago(end.action_time), ` ago by ${end.actor}`, end.reason ? `: ${end.reason}` : "", last ? `. It had ${resource(last.resource)}.` : ".") : line("The history has nothing of it."),
    element("p", {}, link("EMs with a similar name", toList("ems", { part: em.instance.split(/[.:]/)[0].replace(/\d+$/, "") })), muted(" by the beginning of the name")),
  ];
}
