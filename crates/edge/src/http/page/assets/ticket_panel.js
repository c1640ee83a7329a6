// Panel of a ticket: its state and history. The history also has a ticket that has ended, and what a waiting request will get.

import { argument, command } from "/page/address.js";
import { call } from "/page/api.js";
import { actionColumns, ago, em, left, section, user } from "/page/cells.js";
import { copyable, element, line, table } from "/page/elements.js";
import { known, permitted } from "/page/em_panel.js";
import { labels, resource } from "/page/format.js";

const fact = (name, ...value) => (value.some(Boolean) ? element("div", {}, element("dt", {}, name), element("dd", {}, value)) : undefined);

function facts(ticket) {
  return element("dl", {},
    fact("state", ticket.state),
    fact("user", user(ticket.user), ` ${ticket.creator}`),
    fact("engine type", ticket.engine_type),
    fact("EM", em(ticket.em)),
    fact("engine", ticket.engine?.instance),
    fact("holds", resource(ticket.used ?? ticket.locked)),
    fact("observed use", ticket.observed && resource(ticket.observed)),
    fact("granted", ago(ticket.locked_time), ` ago to ${ticket.principal}`),
    ticket.expire_time ? fact("expires", "in ", left(ticket.expire_time), ", unless its engine is confirmed") : undefined,
    fact("labels", labels(ticket.labels)));
}

function gone(actions) {
  const [last] = actions;
  if (!last) return line("The history has nothing of this ticket. If its request waits, the list of waiting requests has it.");
  return element("p", {}, "This ticket has ended: ", last.action, " ", ago(last.action_time), ` ago by ${last.actor}`, last.reason ? `: ${last.reason}` : "", `. It held ${resource(last.resource)}.`);
}

export async function ticketPanel(ticket_id) {
  const [found, history] = await Promise.all([known(call("GetTicket", { ticket_id })), permitted(call("ListActions", { ticket_id, newest_first: true }))]);
  const actions = history?.actions ?? [];
  return [
    found ? facts(found.ticket) : gone(actions),
    section("History", undefined, table(actionColumns, actions, "no line that you may see")),
    found ? section("Commands", undefined, copyable(command("ticket release", argument(ticket_id))), copyable(command("ticket get", argument(ticket_id)))) : undefined,
  ];
}
