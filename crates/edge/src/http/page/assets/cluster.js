// The cluster as the event stream shows it: the overview, the points of the last minutes, and all EMs by name.

import { call } from "/page/api.js";

// Names by the numbers of EmState, and the states that want a person.
export const STATES = ["", "healthy", "unreported", "warn", "unhealthy", "draining", "silent", "unregistering"];
export const URGENT = ["silent", "unhealthy"];
// States of EMs that accept grants.
export const CHOSEN = ["healthy", "unreported", "warn"];

const MINUTES = 15;
const LABELS_AGE = 30_000;
const EMS_PAGE = 1000;
const EMS_PAGES = 20;

// A code is the number of the state times 128, and the percentage of the fullest dimension.
export const stateOf = (code) => STATES[code >> 7];
export const fullness = (code) => code & 127;
export const full = (code) => (fullness(code) === 127 ? "over" : `${fullness(code)}%`);

export const cluster = { server: {}, overview: {}, points: [], names: [], codes: [] };

export function clear() {
  Object.assign(cluster, { server: {}, overview: {}, points: [], names: [], codes: [] });
  read = undefined;
}

// Applies a message. Returns the changed places, or undefined if EMs came or went. Places count in the order of the
// names: first EMs are removed, then added, then changed.
export function take({ server, overview = {}, points, gone = [], came = [], codes = [] }) {
  if (server) clear();
  if (server) cluster.server = server;
  Object.assign(cluster.overview, overview);
  if (points) {
    const since = (points.at(-1)?.t ?? 0) - MINUTES * 60;
    cluster.points = [...cluster.points, ...points].filter((point) => point.t >= since);
  }
  for (const place of [...gone].reverse()) {
    cluster.names.splice(place, 1);
    cluster.codes.splice(place, 1);
  }
  for (const [place, application_name, run] of came) {
    const names = run.map(([instance]) => ({ application_name, instance }));
    // A spread could exceed the maximum number of arguments.
    cluster.names = [...cluster.names.slice(0, place), ...names, ...cluster.names.slice(place)];
    cluster.codes = [...cluster.codes.slice(0, place), ...run.map(([, code]) => code), ...cluster.codes.slice(place)];
  }
  for (let place = 0; place < codes.length; place += 2) cluster.codes[codes[place]] = codes[place + 1];
  return server || gone.length > 0 || came.length > 0 ? undefined : codes.filter((_, place) => place % 2 === 0);
}

export const emKey = ({ application_name, instance }) => `${application_name}/${instance}`;

// The EM of a wait key or refusal such as `em=APPLICATION/INSTANCE`, if it is registered.
export const emByKey = (key) => cluster.names.find((em) => emKey(em) === key);

// The number of EMs in each state.
export function states() {
  const counts = new Map(STATES.slice(1).map((state) => [state, 0]));
  for (const code of cluster.codes) counts.set(stateOf(code), counts.get(stateOf(code)) + 1);
  return counts;
}

let read;

// The labels of EMs by their keys: one read for all callers, and again after a while.
export function emLabels() {
  if (!read || Date.now() - read.time > LABELS_AGE) {
    const labels = readLabels();
    read = { time: Date.now(), labels };
    // A failure is not kept.
    labels.catch(() => (read = undefined));
  }
  return read.labels;
}

async function readLabels() {
  const labels = new Map();
  let token;
  for (let page = 0; page < EMS_PAGES; page += 1) {
    const reply = await call("ListEms", { page_size: EMS_PAGE, page_token: token });
    for (const { em, labels: own, reserved_labels: reserved } of reply.ems) labels.set(emKey(em), { ...own, ...reserved });
    token = reply.next_page_token || undefined;
    if (!token) break;
  }
  return labels;
}

// The values of each label, the keys with the fewest values first.
export async function labelValues() {
  const values = new Map();
  for (const labels of (await emLabels()).values()) {
    for (const [key, value] of Object.entries(labels)) {
      const counts = values.get(key) ?? new Map();
      values.set(key, counts.set(value, (counts.get(value) ?? 0) + 1));
    }
  }
  return new Map([...values].sort(([, one], [, other]) => one.size - other.size));
}

let ending = { names: undefined, suffix: "" };

// The name of an EM without what all names end with.
export function shortName(instance) {
  if (ending.names !== cluster.names || ending.count !== cluster.names.length) ending = { names: cluster.names, count: cluster.names.length, suffix: sharedParts(cluster.names)[1] };
  return (instance.endsWith(ending.suffix) && instance.slice(0, instance.length - ending.suffix.length)) || instance;
}

// The part that all names begin with, and the part that all end with, up to a separator. One name has none.
export function sharedParts(names) {
  if (names.length < 2) return ["", ""];
  const first = names[0].instance;
  const sameFor = (isSame) => {
    let length = 0;
    while (length < first.length && names.every(({ instance }) => isSame(instance, length))) length += 1;
    return length;
  };
  const end = sameFor((name, length) => name.length > length && name.at(-1 - length) === first.at(-1 - length));
  const tail = first.slice(first.length - end);
  const suffix = tail.slice(Math.max(0, tail.search(/[.:]/)));
  const kept = /[.:]/.test(tail) ? suffix : "";
  const begin = sameFor((name, length) => name.length - kept.length > length + 1 && name[length] === first[length]);
  const prefix = first.slice(0, begin).replace(/[^.:_-]*$/, "");
  return [prefix, kept];
}
