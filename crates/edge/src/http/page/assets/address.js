// Addresses of the page, in the fragment: `#/em/host1:9102?from=…`. An address has a path of names and named fields.

import { cluster } from "/page/cluster.js";

export const EM_APPLICATION = "linkis-cg-engineconnmanager";

// A name in a path. Colons and at signs are common in names, and mean nothing in a fragment.
const written = (name) => encodeURIComponent(name.toWellFormed()).replaceAll("%3A", ":").replaceAll("%40", "@");

// A malformed escape stays as it is.
export function read(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}

function address(path, fields = {}) {
  const set = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#/${path}${set.length > 0 ? `?${new URLSearchParams(set)}` : ""}`;
}

// `path` has the names as they are written, because the name of a scope has parts.
export function parse(text) {
  const [, path, query] = /^#?\/?([^?]*)\??(.*)$/s.exec(text);
  return { path: path.split("/"), fields: new URLSearchParams(query) };
}

export const toList = (name, fields) => address(name, fields);

// A list with some fields changed. Another filter begins at the first page.
export function changed(list, fields, changes) {
  return toList(list, { ...Object.fromEntries(fields), page: undefined, row: undefined, ...changes });
}

export const toEm = ({ application_name, instance }) =>
  address(`em/${written(instance)}`, { app: application_name === EM_APPLICATION ? undefined : application_name });

// Without an application, the address is of the registered EM with this instance, if there is one.
export function emOf({ path, fields }) {
  const instance = read(path[1] ?? "");
  const application_name = fields.get("app") ?? cluster.names.find((em) => em.instance === instance)?.application_name ?? EM_APPLICATION;
  return { application_name, instance };
}

export const toUser = (name) => address(`user/${written(name)}`);

export const toTicket = (id) => address(`ticket/${written(id)}`);

export const toScope = (labels) =>
  address(`scope/${Object.entries(labels).map(([key, value]) => `${written(key)}=${written(value)}`).join(",")}`);

export function scopeOf({ path }) {
  return Object.fromEntries((path[1] ?? "").split(",").filter(Boolean).map((label) => {
    const [, key, value] = /^([^=]*)=?(.*)$/s.exec(label);
    return [read(key), read(value)];
  }));
}

export const toQueue = (provider, path) => address(`queue/${written(provider.name)}/${written(path)}`, { type: provider.type === "Yarn" ? undefined : provider.type });

export const queueOf = ({ path, fields }) => ({ provider: { name: read(path[1] ?? ""), type: fields.get("type") ?? "Yarn" }, path: read(path[2] ?? "") });

// The address of a panel with the list behind it.
export function over(panel, list) {
  const { path, fields } = parse(panel);
  fields.set("from", list.replace(/^#\//, ""));
  return `#/${path.join("/")}?${fields}`;
}

// An EM as the command line reads it: the usual application is left out.
export const emName = ({ application_name, instance }) =>
  application_name === EM_APPLICATION && !instance.includes("/") ? instance : `${application_name}/${instance}`;

// An argument for a shell. A line break would end the command in a terminal that does not quote pasted text.
export function argument(text) {
  if (/^[\w.:@/,=+-]+$/.test(text)) return text;
  return /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/u.test(text) ? "…" : `'${text.replaceAll("'", "'\\''")}'`;
}

// The command with its arguments; those without a value are left out.
export const command = (words, ...parts) => ["linkis-rm", words, ...parts.filter(Boolean)].join(" ");

export const option = (name, value) => (value ? `--${name} ${argument(value)}` : undefined);
