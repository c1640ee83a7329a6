// The panels, each with the list that is behind it without another one.

import { emOf, queueOf, read, scopeOf } from "/page/address.js";
import { emPanel } from "/page/em_panel.js";
import { labels } from "/page/format.js";
import { limitPanel } from "/page/limit_panel.js";
import { queuePanel } from "/page/queue_panel.js";
import { ticketPanel } from "/page/ticket_panel.js";
import { userPanel } from "/page/user_panel.js";

const name = ({ path }) => read(path[1] ?? "");

// `parts` reads the content; it is read again every few seconds while the panel is open.
export const panels = {
  em: { list: "ems", title: (place) => emOf(place).instance, parts: (place) => emPanel(emOf(place)) },
  user: { list: "users", title: (place) => `User ${name(place)}`, parts: (place) => userPanel(name(place)) },
  scope: { list: "limits", title: (place) => labels(scopeOf(place)), parts: (place) => limitPanel(scopeOf(place)) },
  ticket: { list: "tickets", title: (place) => `Ticket ${name(place)}`, parts: (place) => ticketPanel(name(place)) },
  queue: { list: "queues", title: (place) => queueOf(place).path, parts: (place) => queuePanel(queueOf(place)) },
};
