// The overview: what wants a person, the capacity, the map of EMs, and the beginnings of the lists.

import { changed, command, toEm, toList, toScope } from "/page/address.js";
import { all, call } from "/page/api.js";
import { capacityTable, heldShare, spark } from "/page/capacity.js";
import { actionColumns, left, limitColumns, limitRows, placed, reclaimColumns, refusalColumns, shares, summed, ticketColumns, waitingColumns } from "/page/cells.js";
import { CHOSEN, URGENT, cluster, sharedParts, states, stateOf } from "/page/cluster.js";
import { at, copyable, element, line, link, muted, show, table } from "/page/elements.js";
import { age, labels, number, plain, seconds, span } from "/page/format.js";
import { live } from "/page/live.js";
import { since } from "/page/lists.js";
import { EmMap, groupings, legend } from "/page/map.js";
import { mostHeld, summedAgo, topColumns } from "/page/users.js";

const ROWS = 8;
const SOON = 2000;
const AGAIN = 5000;
const LATER = 30_000;
const HOUR = 3600;
const PAGES = 2;
const NAMED = 3;

let [map, stops, shownFields] = [undefined, [], new URLSearchParams()];

const card = (id, title, to, ...content) => element("section", { class: "card", id },
  element("div", { class: "head" }, element("h2", {}, title), element("span", { class: "note muted" }), to ? element("a", { class: "all", href: to }, "all") : undefined), content);

const body = (id) => at(id).querySelector(".body");
const note = (id, ...text) => show(at(id).querySelector(".note"), text);

const inner = () => element("div", { class: "body" }, element("div", { class: "loading" }));

function build(place) {
  place.append(element("h1", { class: "unseen" }, "Overview"), element("div", { id: "strip", hidden: true }),
    element("section", { class: "card", id: "empty", hidden: true }, element("h2", {}, "No EM has registered yet"), line("Three commands show how it works. This page follows them."),
      examples().map(([title, text]) => [element("h3", {}, title), copyable(text)]), line("Or a whole cluster for ten minutes: ", element("code", {}, "linkis-rm demo"))),
    element("div", { class: "cards" },
      card("capacity", "Capacity", undefined, inner()),
      card("waiting", "Waiting", toList("waiting"), inner()),
      card("fullest", "Fullest limits", toList("limits"), inner()),
      element("section", { class: "card", id: "ems" }, element("div", { class: "head" }, element("h2", {}, "EMs"), element("span", { class: "note" }), grouping(), element("a", { class: "all", href: toList("ems") }, "all")),
        element("div", { id: "map", role: "group" }), element("p", { id: "map-tip", class: "muted", "aria-live": "polite" }, "\u00a0"), element("ul", { id: "legend", "aria-label": "Colours and shapes" }, legend())),
      card("locked", "Locked longest", toList("tickets", { state: "locked" }), inner()),
      card("idle", "Idle engines", toList("tickets", { state: "idle" }), inner()),
      card("refused", "Refused, last hour", toList("refusals"), inner()),
      card("users", "Who holds most", toList("users"), inner()),
      card("actions", "Activity", toList("history"), inner())));
}

// Commands for the address and the protection of the instance.
function examples() {
  const { server } = cluster;
  const to = [`--address ${server.tls ? "https://" : ""}${server.grpc}`, server.authentication ? "--token-file FILE" : undefined];
  return [
    ["1 An EM with its capacity", command("em register", "demo-1:9102", "--total memory=64g,cores=16,instances=20", ...to)],
    ["2 A limit of a user", command("limit set", "user=hadoop", "--max instances=2", ...to)],
    ["3 A request; the third one is refused, and says why", command("request", "memory=4g,cores=2,instances=1", "--user hadoop", "--creator IDE", ...to)],
  ];
}

// The choice of a label. Labels are read when the choice is opened.
function grouping() {
  const select = element("select", { id: "group", "aria-label": "Group EMs by a label" }, element("option", { value: "" }, "group by: none"));
  const fill = async () => {
    const keys = await groupings().catch(() => []);
    for (const key of keys) {
      if (![...select.options].some((one) => one.value === key)) select.append(element("option", { value: key }, `group by: ${key}`));
    }
  };
  select.addEventListener("pointerenter", fill);
  select.addEventListener("focus", fill);
  select.addEventListener("change", () => location.replace(changed("", shownFields, { group: select.value })));
  return select;
}

function strip() {
  const parts = URGENT.map((state) => {
    const found = cluster.names.filter((_, place) => stateOf(cluster.codes[place]) === state);
    if (found.length === 0) return undefined;
    const [prefix, suffix] = sharedParts(cluster.names);
    const short = ({ instance }) => instance.slice(prefix.length, instance.length - suffix.length) || instance;
    const names = found.length <= NAMED ? [": ", ...found.flatMap((em, at) => [at > 0 ? ", " : "", link(short(em), toEm(em), em.instance)])] : [];
    return element("span", {}, link(`${number(found.length)} ${found.length === 1 ? "EM" : "EMs"} ${state}`, toList("ems", { state })), names);
  });
  const { scopes } = cluster.overview;
  if (Number(scopes?.over_limit ?? 0) > 0) {
    const over = (scopes.fullest ?? []).filter(({ over_limit: isOver, limits }) => isOver && shares({ limits }).length > 0).slice(0, NAMED);
    const names = over.length === Number(scopes.over_limit) ? [": ", ...over.flatMap((one, at) => [at > 0 ? ", " : "", link(labels(one.labels), toScope(one.labels))])] : [];
    parts.push(element("span", {}, link(`${number(scopes.over_limit)} ${Number(scopes.over_limit) === 1 ? "limit" : "limits"} exceeded`, toList("limits", { show: "exceeded" })), names));
  }
  const there = parts.filter(Boolean);
  at("strip").hidden = there.length === 0;
  show(at("strip"), there.length > 0 ? [element("b", {}, "Needs a person"), there] : []);
}

// The sums of each dimension over all EMs. The rest of EMs that accept no grants is `out`.
export function totals(ems) {
  const sums = new Map();
  for (const group of ems ?? []) {
    for (const [dimension, amounts] of Object.entries(group.dimensions ?? {})) {
      const sum = sums.get(dimension) ?? { total: 0, protected: 0, used: 0, locked: 0, free: 0, out: 0 };
      for (const name of ["total", "used", "locked"]) sum[name] += Number(amounts[name]);
      sum.protected += Number(amounts.protected_amount);
      sum[CHOSEN.includes(group.state.replace("EM_STATE_", "").toLowerCase()) ? "free" : "out"] += Math.max(0, Number(amounts.left));
      sums.set(dimension, sum);
    }
  }
  return sums;
}

function capacity() {
  const trend = { name: "held, last 15 min", class: "wide n", of: ([dimension, sum]) => (heldShare(sum) === undefined ? "" : spark(`${plain(dimension)} held`, cluster.points, (point) => point.held[dimension], 1)) };
  const idle = cluster.overview.tickets?.idle_amounts ?? {};
  const sums = [...totals(cluster.overview.ems)].map(([dimension, sum]) => [dimension, { ...sum, idle: Number(idle[dimension] ?? 0) }]);
  show(body("capacity"), capacityTable(sums, trend));
}

// Sums of the stream. A viewer that is bound to users gets none of them.
function sums() {
  const { line: queue, tickets, throughput, scopes } = cluster.overview;
  if (queue && Number(queue.waiting) === 0) note("waiting");
  else if (queue) note("waiting", `${number(queue.waiting)}${queue.longest_wait ? `, longest ${span(seconds(queue.longest_wait))}` : ""} `, spark("waiting", cluster.points, (point) => point.waiting));
  if (queue && Number(queue.waiting) === 0) show(body("waiting"), line("no request"));
  if (tickets) {
    const more = tickets.locked_partial ? " or more" : "";
    note("locked", `${number(tickets.locked)}${more} locked, ${number(tickets.used)} in use`);
    if (Number(tickets.locked) === 0) show(body("locked"), line("no ticket waits for its engine"));
    note("idle", `${number(tickets.idle)} idle, of ${number(tickets.used)} in use`);
    if (Number(tickets.idle) === 0) show(body("idle"), line("no engine is idle"));
  }
  if (throughput) {
    note("actions", `granted ${number(throughput.grants_per_second)}/s `, spark("granted", cluster.points, (point) => point.grants));
    note("refused", `now ${number(throughput.refusals_per_second)}/s `, spark("refused", cluster.points, (point) => point.refusals));
  }
  if (scopes) {
    note("fullest", scopes.renew_time ? `of ${number(scopes.scopes)}` : "");
    show(body("fullest"), limitsTable(scopes.fullest ?? []));
  }
}

const lockedColumns = [...ticketColumns.filter(({ name }) => ["ticket", "user", "EM"].includes(name)), { name: "time left", class: "n", of: (row) => left(row.expire_time) }];

const limitsTable = (scopes) => table(limitColumns, limitRows(scopes).filter(({ full }) => full).slice(0, ROWS), "no limit applies to a live ticket");

function emStates() {
  const there = [...states()].filter(([, count]) => count > 0);
  note("ems", there.flatMap(([state, count], place) => [place > 0 ? muted(" · ") : "", link(`${number(count)} ${state}`, toList("ems", { state }))]));
}

// The dimension of which the largest share is held.
function fullestDimension() {
  const shares = [...totals(cluster.overview.ems)].map(([dimension, sum]) => [dimension, heldShare(sum) ?? 0]);
  return shares.sort(([, one], [, other]) => other - one)[0]?.[0] ?? "instances";
}

const failed = (id) => (error) => show(body(id), line(error.message));

// A card that is empty by the stream is not read.
const isEmpty = (value) => value !== undefined && Number(value) === 0;

function reads() {
  return [
    live(SOON, async (isOver) => {
      if (isEmpty(cluster.overview.line?.waiting)) return;
      const { waiting } = await call("ListWaiting", { page_size: ROWS });
      if (!isOver()) show(body("waiting"), table(waitingColumns(1), placed(waiting), "no request"));
    }, failed("waiting")),
    live(SOON, async (isOver) => {
      if (isEmpty(cluster.overview.tickets?.locked)) return;
      const { tickets } = await call("ListTickets", { state: "locked", page_size: ROWS });
      if (!isOver()) show(body("locked"), table(lockedColumns, tickets, "no ticket waits for its engine"));
    }, failed("locked")),
    live(AGAIN, async (isOver) => {
      if (isEmpty(cluster.overview.tickets?.idle)) return;
      const { reclaims } = await call("ListReclaims", { page_size: ROWS });
      if (!isOver()) show(body("idle"), table(reclaimColumns, reclaims, "no engine is to end for a waiting request"));
    }, failed("idle")),
    live(SOON, async (isOver) => {
      const { actions } = await call("ListActions", { newest_first: true, page_size: ROWS });
      if (!isOver()) show(body("actions"), table(actionColumns, actions, "nothing has happened yet"));
    }, failed("actions")),
    live(LATER, async (isOver) => {
      const { found, partial } = await all("ListRefusals", "refusals", { from_time: since(HOUR) }, PAGES);
      if (isOver()) return;
      show(body("refused"), table(refusalColumns.filter(({ name }) => !["wanted", "free"].includes(name)), summed(found).slice(0, ROWS), "no request"), partial ? line(`by the latest ${number(found.length)} sums`) : undefined);
    }, failed("refused")),
    live(AGAIN, async (isOver) => {
      const by = fullestDimension();
      const { users, age: old } = await call("ListUsers", { dimension: by, page_size: ROWS });
      if (isOver()) return;
      note("users", `by ${plain(by)}, ${summedAgo(old)}`);
      at("users").querySelector(".all").href = toList("users", { sort: `-${by}` });
      show(body("users"), table(topColumns(by, mostHeld(users, by)), users, "no user"));
    }, failed("users")),
    live(SOON, async (isOver) => {
      // A viewer that is bound to users has no scopes in the stream.
      if (cluster.overview.line !== undefined) return;
      const { scopes } = await call("ListScopes", { fullest_first: true, page_size: ROWS });
      if (!isOver()) show(body("fullest"), limitsTable(scopes));
    }, failed("fullest")),
  ];
}

export const overview = {
  open(place, fields) {
    shownFields = fields;
    if (!place.querySelector("#capacity")) {
      build(place);
      map = new EmMap(at("map"), at("map-tip"));
      stops = reads();
      overview.tick();
    }
    const label = fields.get("group") ?? "";
    const select = at("group");
    if (label && ![...select.options].some((one) => one.value === label)) select.append(element("option", { value: label }, `group by: ${label}`));
    select.value = label;
    map.group(label).catch((error) => (at("map-tip").textContent = error.message));
  },
  tick(places) {
    at("empty").hidden = cluster.names.length > 0;
    at("view").querySelector(".cards").hidden = cluster.names.length === 0;
    strip();
    capacity();
    sums();
    emStates();
    map.tick(places);
  },
  mark: (text) => map?.mark(text),
  leave() {
    stops.forEach((stop) => stop());
    map?.leave();
    [map, stops] = [undefined, []];
  },
};
