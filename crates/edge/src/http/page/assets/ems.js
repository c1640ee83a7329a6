// Map of EMs: one cell each on a canvas, coloured by the fullest dimension, and a list of the same EMs.

import { element, link, number, show, table } from "/page/format.js";
import { showEm } from "/page/panel.js";

// Names by the numbers of EmState.
const STATES = ["", "healthy", "unreported", "warn", "unhealthy", "draining", "silent", "unregistering"];
const CHOSEN = 3;

const LISTED = 200;
const HEIGHT = 190;
const [CELL_MIN, CELL_MAX] = [3, 26];

const STEPS = [[0, "empty"], [1, "less than half"], [50, "half"], [75, "three quarters"], [90, "90% and more"], [100, "full"]];

// A code is the number of the state times 128, and the percentage of the fullest dimension.
const state = (code) => code >> 7;
const fullness = (code) => code & 127;
const step = (code) => STEPS.findLastIndex(([from]) => fullness(code) >= from);

export class EmMap {
  constructor() {
    this.canvas = document.getElementById("map");
    this.tip = document.getElementById("map-tip");
    this.clear();
    this.marked = "";
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.textContent = "\u00a0"));
    this.canvas.addEventListener("click", (event) => {
      const place = this.placeOf(event);
      if (place !== undefined) showEm(this.names[place]);
    });
    document.getElementById("em-list").addEventListener("toggle", () => this.list());
    this.legend();
  }

  clear() {
    this.names = [];
    this.codes = [];
  }

  // Applies an update. Places count in the order of the names: first EMs are removed, then added, then changed.
  take({ gone = [], came = [], codes = [] }) {
    for (const place of [...gone].reverse()) {
      this.names.splice(place, 1);
      this.codes.splice(place, 1);
    }
    for (const [place, application_name, run] of came) {
      const names = run.map(([instance]) => ({ application_name, instance }));
      const now = run.map(([, code]) => code);
      // A spread could exceed the maximum number of arguments.
      this.names = [...this.names.slice(0, place), ...names, ...this.names.slice(place)];
      this.codes = [...this.codes.slice(0, place), ...now, ...this.codes.slice(place)];
    }
    for (let place = 0; place < codes.length; place += 2) this.codes[codes[place]] = codes[place + 1];
    if (gone.length > 0 || came.length > 0) this.draw();
    else this.paint(codes.filter((_, place) => place % 2 === 0));
    if (gone.length + came.length + codes.length > 0) this.list();
  }

  matches(name) {
    return this.marked === "" || `${name.application_name}/${name.instance}`.toLowerCase().includes(this.marked);
  }

  mark(text) {
    // A search that matches no EM dims none.
    const wanted = text.toLowerCase();
    this.marked = wanted;
    if (!this.names.some((name) => this.matches(name))) this.marked = "";
    this.draw();
    this.list();
  }

  draw() {
    const count = this.names.length;
    const width = this.canvas.clientWidth;
    if (count === 0 || width === 0) return;
    const fitting = Math.floor(Math.sqrt((width * HEIGHT) / count));
    this.size = Math.max(CELL_MIN, Math.min(CELL_MAX, fitting));
    this.across = Math.max(1, Math.floor(width / this.size));
    const height = Math.ceil(count / this.across) * this.size;
    const scale = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    [this.canvas.width, this.canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.colours = { steps: STEPS.map((_, place) => colour(`--cell-${place}`)), off: colour("--cell-off"), ground: colour("--card") };
    this.paint(this.names.keys());
    this.canvas.setAttribute("aria-label", `${number(count)} EMs; the list below has the same content`);
  }

  paint(places) {
    if (!this.pen) return;
    const inner = this.size - (this.size > 4 ? 1 : 0.5);
    for (const place of places) {
      const [x, y] = [(place % this.across) * this.size, Math.floor(place / this.across) * this.size];
      this.pen.globalAlpha = 1;
      this.pen.fillStyle = this.colours.ground;
      this.pen.fillRect(x, y, this.size, this.size);
      this.pen.globalAlpha = this.matches(this.names[place]) ? 1 : 0.15;
      this.pen.fillStyle = this.colours.steps[step(this.codes[place])];
      this.pen.fillRect(x, y, inner, inner);
      if (state(this.codes[place]) > CHOSEN) {
        // Half of the cell, so that the fullness stays visible.
        this.pen.fillStyle = this.colours.off;
        this.pen.beginPath();
        this.pen.moveTo(x, y + inner);
        this.pen.lineTo(x + inner, y + inner);
        this.pen.lineTo(x + inner, y);
        this.pen.fill();
      }
    }
    this.pen.globalAlpha = 1;
  }

  placeOf(event) {
    const [column, row] = [Math.floor(event.offsetX / this.size), Math.floor(event.offsetY / this.size)];
    const place = row * this.across + column;
    return column < this.across && place < this.names.length ? place : undefined;
  }

  point(event) {
    const place = this.placeOf(event);
    this.tip.textContent = place === undefined ? "\u00a0" : `${this.names[place].instance}: ${this.describe(place)}`;
  }

  describe(place) {
    const most = fullness(this.codes[place]);
    return `${STATES[state(this.codes[place])]}, ${most === 127 ? "over" : `${most}%`} of its fullest dimension held`;
  }

  legend() {
    const entry = (colour, text) => {
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = `var(${colour})`;
      return element("li", {}, swatch, text);
    };
    const steps = STEPS.map(([, text], place) => entry(`--cell-${place}`, text));
    show("legend", ...steps, entry("--cell-off", "corner: unhealthy, draining, silent or unregistering"));
  }

  list() {
    if (!document.getElementById("em-list").open) return;
    const places = [...this.names.keys()].filter((place) => this.matches(this.names[place]));
    places.sort((one, other) => fullness(this.codes[other]) - fullness(this.codes[one]));
    const columns = [
      { name: "EM", of: (place) => link(this.names[place].instance, () => showEm(this.names[place])) },
      { name: "kind", class: "wide", of: (place) => this.names[place].application_name },
      { name: "state", width: "8em", of: (place) => STATES[state(this.codes[place])] },
      { name: "held", class: "n", width: "5em", of: (place) => `${fullness(this.codes[place])}%` },
    ];
    const more = places.length > LISTED ? element("p", { class: "faint" }, `the first ${LISTED} of ${number(places.length)}, the fullest first; search for others`) : undefined;
    show("em-rows", ...[table(columns, places.slice(0, LISTED), "none"), more].filter(Boolean));
  }
}
