// Numbers, sizes, times and resources for display.

export const number = (value) => Number(value).toLocaleString("en-US", { maximumFractionDigits: 1 });

export const percent = (share) => `${Math.floor(share * 100 + 1e-9)}%`;

// A size as the command line prints it: binary, in the largest unit that it reaches.
export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let [size, unit] = [Math.abs(Number(value)), 0];
  // A value that rounds to 1024 of a unit is 1 of the next unit.
  while ((unit === 0 ? size : Math.round(size * 10) / 10) >= 1024 && unit < units.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${value < 0 ? "-" : ""}${size.toFixed(unit === 0 ? 0 : 1).replace(/\.0$/, "")} ${units[unit]}`;
}

// An amount of a dimension, by its name in Limit.max.
export function amount(dimension, value) {
  if (dimension.endsWith("memory")) return bytes(value);
  if (dimension === "kubernetes_millicores") return number(value / 1000);
  return number(value);
}

// The name of a dimension.
export const plain = (dimension) => (dimension === "kubernetes_millicores" ? "kubernetes cores" : dimension.replace(/^special\./, "").replaceAll("_", " "));

export function withUnit(dimension, value) {
  const name = plain(dimension);
  if (dimension === "memory") return bytes(value);
  return `${amount(dimension, value)} ${Number(value) === 1 ? name.replace(/s$/, "") : name}`;
}

export function span(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 120) return `${whole}s`;
  if (whole < 7200) return `${Math.floor(whole / 60)}m`;
  if (whole < 172800) return `${Math.floor(whole / 3600)}h`;
  return `${Math.floor(whole / 86400)}d`;
}

// Seconds of a duration as proto3 writes it, like "1.5s".
export const seconds = (text) => (text ? Number.parseFloat(text) : 0);

let ahead = 0;

// Ages are relative to the clock of the service.
export function setClock(snapshotTime) {
  ahead = Date.parse(snapshotTime) - Date.now();
}

export const now = () => Date.now() + ahead;

export const age = (time) => (time ? (now() - Date.parse(time)) / 1000 : 0);

export const clock = (time) => `${time.slice(11, 19)}Z`;

// The dimensions of a resource, by their names in Limit.max.
export function dimensions(resource) {
  const amounts = {};
  const add = (prefix, fields, names) => {
    for (const name of names) if (fields[name] !== undefined) amounts[prefix + name] = Number(fields[name]);
  };
  for (const [kind, fields] of Object.entries(resource ?? {})) {
    if (kind === "yarn") add("", fields, ["queue_memory", "queue_cores", "queue_instances"]);
    else if (kind === "kubernetes") add("kubernetes_", fields, ["memory", "millicores"]);
    else if (kind === "special") add("", fields.resources, Object.keys(fields.resources ?? {}));
    else if (kind.startsWith("driver_and_")) Object.assign(amounts, dimensions(fields));
    else add("", fields, ["memory", "cores", "instances"]);
  }
  return amounts;
}

export function resource(value) {
  const parts = Object.entries(dimensions(value)).filter(([, held]) => held !== 0);
  return parts.map(([dimension, held]) => withUnit(dimension, held)).join(", ") || "nothing";
}

// By their keys: a map of a reply has no order.
export const labels = (map) => Object.entries(map ?? {}).sort(([one], [other]) => (one < other ? -1 : 1)).map(([key, value]) => `${key}=${value}`).join(", ");
