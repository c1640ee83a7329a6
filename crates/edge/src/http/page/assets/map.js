// Map of EMs: up to 150 as tiles, more as cells of canvases, in groups by a label on request.
//
// Colour shows the fullest dimension; shapes show states, so that the map can be read without colours. The map is one stop
// of the tab key: arrows move over it by rows and columns, and each name is announced.

import { toEm, toList } from "/page/address.js";
import { CHOSEN, cluster, emKey, emLabels, full, fullness, labelValues, sharedParts, stateOf } from "/page/cluster.js";
import { at, bar, element, link, muted, show } from "/page/elements.js";
import { number } from "/page/format.js";

const TILES_MAX = 150;
const GROUPS_MAX = 300;
const HEIGHT = 380;
const [CELL_MIN, CELL_MAX, FINGER] = [5, 11, 24];
const FINGERS_MAX = 600;
const NARROW = 700;

export const STEPS = [[0, "empty"], [1, "under 50%"], [50, "50%"], [75, "75%"], [90, "90%"], [100, "full"]];
const step = (code) => STEPS.findLastIndex(([from]) => fullness(code) >= from);

export const describe = (place) => `${cluster.names[place].instance}: ${stateOf(cluster.codes[place])}, ${full(cluster.codes[place])} of its fullest dimension held`;

export class EmMap {
  constructor(place, tip) {
    Object.assign(this, { place, tip, groups: [], label: "", marked: "", current: 0, wide: true });
    this.size = new ResizeObserver(() => this.draw());
    this.size.observe(place);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
    place.addEventListener("keydown", (event) => this.key(event));
    place.addEventListener("pointermove", (event) => this.point(this.placeAt(event)));
    place.addEventListener("pointerleave", () => this.point(undefined));
    place.addEventListener("focusin", () => this.announce());
    place.addEventListener("click", (event) => {
      const found = event.target.matches("canvas") ? this.placeAt(event) : undefined;
      if (found !== undefined) location.hash = toEm(cluster.names[found]);
    });
  }

  leave() {
    this.size.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
  }

  // Groups by the values of a label; without one there is one group.
  async group(label) {
    const labels = label ? await emLabels() : undefined;
    Object.assign(this, { label, labels });
    this.draw();
  }

  mark(text) {
    // A search that matches no EM dims none.
    this.marked = text.toLowerCase();
    if (!cluster.names.some((_, place) => this.matches(place))) this.marked = "";
    this.draw();
  }

  matches(place) {
    return this.marked === "" || emKey(cluster.names[place]).toLowerCase().includes(this.marked) || stateOf(cluster.codes[place]) === this.marked;
  }

  // The places of each group, in the order of its values; EMs without the label come last.
  grouped() {
    const all = [...cluster.names.keys()];
    if (!this.label) return [["", all]];
    const groups = Map.groupBy(all, (place) => this.labels.get(emKey(cluster.names[place]))?.[this.label] ?? "");
    const sorted = [...groups].sort(([one], [other]) => (one === "") - (other === "") || one.localeCompare(other, "en", { numeric: true }));
    const rest = sorted.splice(GROUPS_MAX).flatMap(([, places]) => places);
    return rest.length > 0 ? [...sorted, ["", rest]] : sorted;
  }

  draw() {
    const width = this.place.clientWidth;
    if (width === 0 || cluster.names.length === 0) return;
    this.areTiles = cluster.names.length <= TILES_MAX && innerWidth >= NARROW;
    this.current = Math.min(this.current, cluster.names.length - 1);
    [this.prefix, this.suffix] = this.areTiles ? sharedParts(cluster.names) : ["", ""];
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.colours = { steps: STEPS.map((_, at) => colour(`--ramp-${at}`)), out: colour("--out"), outGround: colour("--out-ground"), red: colour("--red"), ground: colour("--card"), focus: colour("--used") };
    this.groups = this.grouped().map(([value, places]) => ({ value, places }));
    const fit = Math.floor(Math.sqrt((width * HEIGHT) / cluster.names.length));
    const isTouched = matchMedia("(pointer: coarse)").matches || innerWidth < NARROW;
    this.cell = isTouched && cluster.names.length <= FINGERS_MAX ? FINGER : Math.max(CELL_MIN, Math.min(CELL_MAX, fit));
    this.across = Math.max(1, Math.floor(width / this.cell));
    show(this.place, this.groups.map((group) => this.section(group)));
    this.point(this.pointed);
    this.place.setAttribute("aria-label", `${number(cluster.names.length)} EMs; arrow keys move, Enter opens`);
    this.place.tabIndex = this.areTiles ? -1 : 0;
    for (const group of this.groups) if (group.canvas) this.paint(group, group.places);
  }

  section(group) {
    const name = group.value === "" ? "without this label" : link(`${this.label} ${group.value}`, toList("ems", { label: `${this.label}=${group.value}` }));
    const head = this.label ? element("h3", {}, name, muted(` ${number(group.places.length)} EMs`)) : undefined;
    return element("div", { class: "group" }, head, this.areTiles ? element("div", { class: "tiles" }, group.places.map((place) => this.tile(place))) : this.canvas(group));
  }

  tile(place) {
    const { instance } = cluster.names[place];
    const [code, state] = [cluster.codes[place], stateOf(cluster.codes[place])];
    const short = instance.slice(this.prefix.length, instance.length - this.suffix.length) || instance;
    const kind = ["tile", CHOSEN.includes(state) ? "" : state, this.matches(place) ? "" : "dim"].filter(Boolean).join(" ");
    return element("a", { class: kind, href: toEm(cluster.names[place]), title: describe(place), tabindex: place === this.current ? 0 : -1, "data-place": place },
      element("span", { class: "name" }, short), element("span", { class: "state" }, CHOSEN.includes(state) && state !== "warn" ? full(code) : state),
      bar([fullness(code) >= 100 ? "full" : "used", fullness(code) / 100]));
  }

  canvas(group) {
    const [width, height] = [this.across * this.cell, Math.ceil(group.places.length / this.across) * this.cell];
    const scale = devicePixelRatio || 1;
    group.canvas = element("canvas", { width: Math.round(width * scale), height: Math.round(height * scale), "aria-hidden": "true" });
    Object.assign(group.canvas.style, { width: `${width}px`, height: `${height}px` });
    group.pen = group.canvas.getContext("2d");
    group.pen.scale(scale, scale);
    return group.canvas;
  }

  // Repaints the changed places.
  tick(places) {
    if (!places) {
      this.pointed = undefined;
      return this.draw();
    }
    const changed = new Set(places);
    for (const group of this.groups) {
      if (group.canvas) this.paint(group, group.places.filter((place) => changed.has(place)));
    }
    if (!this.areTiles) return;
    for (const tile of this.place.querySelectorAll(".tile")) {
      if (!changed.has(Number(tile.dataset.place))) continue;
      const isFocused = tile === document.activeElement;
      const made = this.tile(Number(tile.dataset.place));
      tile.replaceWith(made);
      if (isFocused) made.focus();
    }
  }

  paint({ pen, places: all }, places) {
    const index = places === all ? undefined : new Map(all.map((place, at) => [place, at]));
    const inner = this.cell - (this.cell > 6 ? 1 : 0.5);
    places.forEach((place, order) => {
      const at = index ? index.get(place) : order;
      const [x, y] = [(at % this.across) * this.cell, Math.floor(at / this.across) * this.cell];
      pen.globalAlpha = 1;
      pen.fillStyle = this.colours.ground;
      pen.fillRect(x, y, this.cell, this.cell);
      pen.globalAlpha = this.matches(place) ? 1 : 0.2;
      pen.fillStyle = this.colours.steps[step(cluster.codes[place])];
      pen.fillRect(x, y, inner, inner);
      this.shape(pen, stateOf(cluster.codes[place]), x, y, inner);
      if (place === this.current && document.activeElement === this.place) {
        pen.globalAlpha = 1;
        Object.assign(pen, { strokeStyle: this.colours.focus, lineWidth: 2 });
        pen.strokeRect(x + 1, y + 1, inner - 2, inner - 2);
      }
    });
    pen.globalAlpha = 1;
  }

  shape(pen, state, x, y, inner) {
    if (CHOSEN.includes(state)) return;
    const lines = (...ends) => {
      pen.beginPath();
      for (const [fromX, fromY, toX, toY] of ends) {
        pen.moveTo(x + fromX, y + fromY);
        pen.lineTo(x + toX, y + toY);
      }
      pen.stroke();
    };
    pen.lineWidth = Math.max(1, inner / 8);
    pen.strokeStyle = state === "silent" || state === "unhealthy" ? this.colours.red : this.colours.out;
    if (state === "silent") {
      pen.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
      lines([0, 0, inner, inner], [inner, 0, 0, inner]);
    } else if (state === "unhealthy") {
      pen.strokeRect(x + 1, y + 1, inner - 2, inner - 2);
    } else {
      pen.fillStyle = this.colours.outGround;
      pen.fillRect(x, y, inner, inner);
      lines([0, inner / 2, inner / 2, 0], [0, inner, inner, 0], [inner / 2, inner, inner, inner / 2]);
    }
  }

  placeAt(event) {
    if (this.areTiles) return event.target.closest?.(".tile") ? Number(event.target.closest(".tile").dataset.place) : undefined;
    const group = this.groups.find(({ canvas }) => canvas === event.target);
    if (!group) return undefined;
    const [column, row] = [Math.floor(event.offsetX / this.cell), Math.floor(event.offsetY / this.cell)];
    return column < this.across ? group.places[row * this.across + column] : undefined;
  }

  point(place) {
    this.pointed = place;
    const text = place === undefined || place >= cluster.names.length ? this.names() : describe(place);
    if (this.tip.textContent !== text) this.tip.textContent = text;
  }

  // What tiles leave out of the names.
  names() {
    const parts = [this.prefix, this.suffix].filter(Boolean).join(" and ");
    return parts ? `Names without ${parts}` : "\u00a0";
  }

  announce() {
    const focused = document.activeElement.closest?.(".tile");
    if (focused) this.current = Number(focused.dataset.place);
    this.point(this.current);
    this.repaint(this.current);
  }

  repaint(place) {
    const group = this.groups.find(({ places }) => places.includes(place));
    if (group?.canvas) this.paint(group, [place]);
  }

  key(event) {
    if (event.key === "Enter" && !this.areTiles) location.hash = toEm(cluster.names[this.current]);
    const next = { ArrowLeft: () => this.beside(-1), ArrowRight: () => this.beside(1), ArrowUp: () => this.above(-1), ArrowDown: () => this.above(1) }[event.key]?.();
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const before = this.current;
    this.current = next;
    if (this.areTiles) {
      for (const tile of this.place.querySelectorAll(".tile")) tile.tabIndex = Number(tile.dataset.place) === next ? 0 : -1;
      this.place.querySelector(`[data-place="${next}"]`).focus();
    }
    this.repaint(before);
    this.announce();
  }

  // The place before or after the current one, over all groups.
  beside(by) {
    const order = this.groups.flatMap(({ places }) => places);
    return order[Math.max(0, Math.min(order.length - 1, order.indexOf(this.current) + by))];
  }

  // The place in the same column of the row above or below, also in the group above or below.
  above(by) {
    const across = this.areTiles ? this.tilesAcross() : this.across;
    const rows = this.groups.flatMap(({ places }) => Array.from({ length: Math.ceil(places.length / across) }, (_, row) => places.slice(row * across, (row + 1) * across)));
    const row = rows.findIndex((places) => places.includes(this.current));
    const next = rows[row + by];
    return next === undefined ? this.current : next[Math.min(next.length - 1, rows[row].indexOf(this.current))];
  }

  tilesAcross() {
    return getComputedStyle(this.place.querySelector(".tiles")).gridTemplateColumns.split(" ").length;
  }
}

// The labels that can group EMs: those with more than one value, and not too many.
export async function groupings() {
  return [...(await labelValues())].filter(([, values]) => values.size <= GROUPS_MAX).map(([key]) => key);
}

export const legend = () => [
  ...STEPS.map(([, text], at) => element("li", {}, element("i", { class: `swatch ramp-${at}` }), text)),
  ...[["draining", "draining, unregistering"], ["unhealthy", "unhealthy"], ["silent", "silent"]].map(([kind, text]) => element("li", {}, element("i", { class: `swatch ${kind}` }), text)),
];
