// Numbers, sizes and times for display, and elements of the page. Values from the service are set as text, never as markup.

// An element. Children that are undefined or null are omitted; children that are no elements become text.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== undefined && child !== null));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// A link that opens a view.
export function link(text, show, title = text) {
  return element("button", { type: "button", class: "link", title, onclick: show }, text);
}

export const number = (value) => Number(value).toLocaleString("en-US", { maximumFractionDigits: 1 });

export const percent = (share) => `${Math.floor(share * 100 + 1e-9)}%`;

// A size as the command line prints it: binary, in the largest unit that it reaches.
export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let [size, unit] = [Math.abs(Number(value)), 0];
  // A value that rounds to 1024 of a unit is 1 of the next unit.
  while ((unit === 0 ? size : Math.round(size * 10) / 10) >= 1024 && unit < units.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${value < 0 ? "-" : ""}${size.toFixed(unit === 0 ? 0 : 1)} ${units[unit]}`;
}

// An amount of a dimension, by its name in Limit.max.
export function amount(dimension, value) {
  if (dimension.endsWith("memory")) return bytes(value);
  if (dimension === "kubernetes_millicores") return number(value / 1000);
  return number(value);
}

// The name of a dimension.
export const plain = (dimension) => dimension.replace(/^special\./, "").replaceAll("_", " ");

export function withUnit(dimension, value) {
  const name = plain(dimension);
  if (dimension === "memory") return bytes(value);
  if (dimension === "kubernetes_millicores") return `${amount(dimension, value)} kubernetes cores`;
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

export const labels = (map) => Object.entries(map ?? {}).map(([key, value]) => `${key}=${value}`).join(", ");

// A bar of parts, each a class and a share.
export function bar(...parts) {
  const made = element("div", { class: "bar" });
  let room = 1;
  for (const [kind, share] of parts) {
    const shown = Math.max(0, Math.min(room, Number.isFinite(share) ? share : 0));
    room -= shown;
    const part = element("i", { class: kind });
    part.style.width = `${shown * 100}%`;
    made.append(part);
  }
  return made;
}

// A table of columns, each with its name and its content of a row.
export function table(columns, rows, empty) {
  if (rows.length === 0) return element("p", { class: "faint" }, empty);
  const widths = columns.map((column) => {
    const made = element("col", { class: column.class });
    if (column.width) made.style.width = column.width;
    return made;
  });
  const heads = columns.map((column) => element("th", { class: column.class, scope: "col" }, column.name));
  const cells = (row) => columns.map((column) => {
    const shown = column.of(row);
    const title = typeof shown === "string" ? shown : undefined;
    return element("td", { class: column.class, title }, shown);
  });
  return element("table", {},
    element("colgroup", {}, widths),
    element("thead", {}, element("tr", {}, heads)),
    element("tbody", {}, rows.map((row) => element("tr", {}, cells(row)))));
}

// Replaces the content of a place, unless the keyboard focus is in it.
export function show(id, ...shown) {
  const place = document.getElementById(id);
  if (place.querySelector(":focus-visible")) return;
  place.replaceChildren(...shown);
}
