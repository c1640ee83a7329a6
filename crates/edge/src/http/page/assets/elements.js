// Elements of the page. Values from the service are set as text, never as markup.

// An element. Children that are undefined or null are omitted; children that are no elements become text.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export const at = (id) => document.getElementById(id);

export const link = (text, to, title) => element("a", { href: to, title }, text);

// A link whose address replaces the present one: filters, sorts and pages of one list.
export const chip = (text, to, isOn) => element("a", { class: "chip", href: to, "data-replace": true, "aria-current": isOn ? "true" : undefined }, text);

export const muted = (...text) => element("span", { class: "muted" }, ...text);

export const line = (...text) => element("p", { class: "muted" }, ...text);

// A time as an age; the full time is its title.
export const when = (text, time) => element("time", { datetime: time, title: time?.replace(/\.\d+/, "") }, text);

// A bar of parts, each a class and a share of the whole.
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

// The heading of bars is for screen readers alone.
function heading({ name, class: kind, sort }) {
  if (!sort) return element("th", { class: kind, scope: "col" }, kind?.startsWith("bars") ? element("span", { class: "unseen" }, "bar") : name);
  const order = { ascending: " ↑", descending: " ↓" }[sort.order] ?? "";
  return element("th", { class: kind, scope: "col", "aria-sort": sort.order }, element("a", { href: sort.to, "data-replace": true }, name + order));
}

// A table of columns, each with its name and its content of a row. `empty` is shown without rows.
export function table(columns, rows, empty) {
  if (rows.length === 0) return line(empty);
  const cell = (column, row) => {
    const shown = column.of(row);
    return element("td", { class: column.class, title: typeof shown === "string" ? shown : undefined }, shown);
  };
  return element("table", {},
    element("thead", {}, element("tr", {}, columns.map(heading))),
    element("tbody", {}, rows.map((row) => element("tr", {}, columns.map((column) => cell(column, row))))));
}

// A command, ready to copy. Where a browser gives no clipboard, as without TLS, the text is selected instead.
export function copyable(text) {
  const code = element("code", {}, text);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "selected";
    }
  };
  const button = element("button", { type: "button", class: "copy", onclick: copy }, "copy");
  return element("div", { class: "command" }, code, button);
}

// Replaces the content of an element. The keyboard focus stays on the link with the same address; a selection of text
// stays, and so does the content around it.
export function show(place, ...shown) {
  const selection = getSelection();
  if (!selection.isCollapsed && place.contains(selection.anchorNode)) return;
  const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  place.replaceChildren(...shown.flat(Infinity).filter((part) => part !== undefined && part !== null));
  if (focused) [...place.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus({ preventScroll: true });
}
