// One list: a heading, filters, a table with its pages, and the command that prints the same.
//
// A list is `{ name, title, filters, chips, columns, read, command, empty }`. `read` returns the rows of one page, the
// token of the next one, and a note. All of its state is in the address.

import { call } from "/page/api.js";
import { changed, toList } from "/page/address.js";
import { chip, copyable, element, line, show, table } from "/page/elements.js";
import { number } from "/page/format.js";
import { live } from "/page/live.js";

const AGAIN = 5000;
const TYPED = 300;
const SIZES = [25, 100, 1000];
const SIZE = SIZES[0];

// `settled` is called when the rows are there.
export function listView(list, settled) {
  let [fields, stop, timer] = [new URLSearchParams(), undefined, undefined];
  const parts = { chips: element("div", { class: "chips" }), rows: element("div", { id: "rows" }), foot: element("div", { class: "foot" }), command: element("div", {}) };
  const inputs = (list.filters ?? []).map((filter) => field(filter));
  const form = element("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, inputs, parts.chips);

  const to = (changes) => changed(list.name, fields, changes);

  function field({ name, label, choices }) {
    // All fields together: another one may have been filled within the pause.
    const set = (event) => {
      clearTimeout(timer);
      const filled = () => to(Object.fromEntries(inputs.map((input) => [input.name, input.value.trim()])));
      timer = setTimeout(() => location.replace(filled()), event.type === "input" ? TYPED : 0);
    };
    if (choices) {
      return element("select", { name, "aria-label": label, onchange: set }, choices.map(([value, text]) => element("option", { value }, `${label}: ${text}`)));
    }
    return element("input", { type: "search", name, placeholder: label, "aria-label": label, spellcheck: "false", autocomplete: "off", oninput: set });
  }

  // A column that a call can sort by has the order in `sort`, with a minus if it is descending; `only` is its single order.
  function sorted(column) {
    if (!column.sort) return column;
    const now = fields.get("sort") ?? list.sort;
    const order = now === column.sort ? "ascending" : now === `-${column.sort}` ? "descending" : undefined;
    const next = order === "descending" ? column.sort : `-${column.sort}`;
    return { ...column, sort: { order, to: to({ sort: column.only ?? next }) } };
  }

  function foot(page, size) {
    const first = Number(fields.get("row") ?? 0);
    const range = page.rows.length > 0 ? `${number(first + 1)}–${number(first + page.rows.length)}` : "";
    const of = page.all === undefined ? (page.next ? `${range}, more follow` : range) : `${range} of ${number(page.all)}`;
    const sizes = SIZES.filter((one) => one <= (list.largest ?? Infinity)).map((one) => chip(`${one}`, to({ size: one === SIZE ? undefined : one }), one === size));
    const moved = (name, token, row, label) => element("a", { class: name, href: toList(list.name, { ...Object.fromEntries(fields), page: token, row }) }, label);
    return [
      element("span", { class: "muted" }, [of, page.note].filter(Boolean).join(". ")),
      element("span", { class: "pages" }, element("span", { class: "muted" }, "a page:"), sizes,
        first > 0 || fields.has("page") ? moved("first", undefined, undefined, "first page") : undefined,
        page.next ? moved("next", page.next, first + page.rows.length, "next page") : undefined),
    ];
  }

  async function read(isOver) {
    const size = SIZES.includes(Number(fields.get("size"))) ? Math.min(Number(fields.get("size")), list.largest ?? Infinity) : SIZE;
    const page = await list.read(fields, size, fields.get("page") ?? undefined);
    if (isOver()) return;
    show(parts.chips, (list.chips?.(fields) ?? []).map(({ text, set, isOn }) => chip(text, to(set), isOn)));
    show(parts.rows, table(list.columns(fields, page).map(sorted), page.rows, list.empty));
    show(parts.foot, foot(page, size));
    settled();
  }

  function failed(error) {
    show(parts.rows, line(error.message));
    show(parts.foot);
    settled();
  }

  return {
    open(place, next) {
      stop?.();
      fields = next;
      if (!form.isConnected) {
        place.append(element("section", { class: "card list", id: `list-${list.name}` },
          element("div", { class: "head" }, element("h1", {}, list.title), list.note ? element("span", { class: "muted" }, list.note) : undefined, parts.command),
          form, parts.rows, parts.foot));
        parts.rows.append(element("div", { class: "loading" }));
      }
      for (const input of inputs) if (document.activeElement !== input) input.value = fields.get(input.name) ?? "";
      show(parts.command, list.command ? copyable(list.command(fields)) : undefined);
      stop = live(AGAIN, read, failed);
    },
    leave() {
      stop?.();
      clearTimeout(timer);
    },
  };
}

// A list that one call reads. `entries` is the field of its reply. `matches` is a filter that the call lacks. It applies to
// the entries of each page. The page is then as large as possible, and the note states how many entries were read.
export function called(method, entries, toFields, matches) {
  return async (fields, size, token) => {
    const filter = matches?.(fields);
    const reply = await call(method, { ...toFields(fields), page_size: filter ? 1000 : size, page_token: token });
    const rows = filter ? reply[entries].filter(filter) : reply[entries];
    const note = filter ? `of ${number(reply[entries].length)} that this page has read` : undefined;
    return { rows, next: reply.next_page_token || undefined, note, reply };
  };
}
