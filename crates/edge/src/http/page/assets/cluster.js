// Cluster totals: tiles, and charts of the last fifteen minutes.

import { age, amount, bar, drawn, element, number, percent, plain, seconds, show, span } from "/page/format.js";

const MINUTES = 15;
const USUAL = ["memory", "cores", "instances"];

// States of EMs that accept grants.
const CHOSEN = ["EM_STATE_HEALTHY", "EM_STATE_UNREPORTED", "EM_STATE_WARN"];

// The sums of each dimension over all EMs. Capacity left on EMs that accept no grants counts as `out`.
export function totals(ems) {
  const sums = new Map();
  for (const group of ems ?? []) {
    for (const [dimension, amounts] of Object.entries(group.dimensions ?? {})) {
      const sum = sums.get(dimension) ?? { total: 0, protected: 0, used: 0, locked: 0, free: 0, out: 0 };
      sum.total += Number(amounts.total);
      sum.protected += Number(amounts.protected_amount);
      sum.used += Number(amounts.used);
      sum.locked += Number(amounts.locked);
      sum[CHOSEN.includes(group.state) ? "free" : "out"] += Math.max(0, Number(amounts.left));
      sums.set(dimension, sum);
    }
  }
  const order = (name) => (USUAL.includes(name) ? USUAL.indexOf(name) : USUAL.length);
  return [...sums].sort(([one], [other]) => order(one) - order(other) || (one < other ? -1 : 1));
}

function tile(id, name, value, more, ...below) {
  return element("div", { class: "card tile", id: `tile-${id}` },
    element("span", { class: "name" }, name), element("b", {}, value), element("span", { class: "more" }, more), ...below);
}

function dimensionTile([dimension, sum]) {
  const grantable = sum.total - sum.protected;
  const held = sum.used + sum.locked;
  const part = (value) => value / sum.total;
  const shown = (value) => amount(dimension, value);
  const out = sum.out > 0 ? `, ${shown(sum.out)} on EMs that accept no grants` : "";
  const kept = sum.protected > 0 ? `, ${shown(sum.protected)} protected` : "";
  return tile(dimension, plain(dimension), grantable > 0 ? percent(held / grantable) : "–",
    `${shown(sum.used)} used, ${shown(sum.locked)} locked${kept}, ${shown(sum.free)} free${out}`,
    bar(["used", part(sum.used)], ["locked", part(sum.locked)], ["protected", part(sum.protected)], ["out", part(sum.out)]));
}

export function stateName(state) {
  return state.replace("EM_STATE_", "").toLowerCase();
}

function emsTile(ems) {
  const states = new Map();
  for (const group of ems ?? []) states.set(group.state, (states.get(group.state) ?? 0) + Number(group.ems));
  const all = [...states.values()].reduce((sum, one) => sum + one, 0);
  const counts = [...states].map(([state, count]) => `${number(count)} ${stateName(state)}`);
  return tile("ems", "EMs", number(all), counts.join(", ") || "none");
}

export function showTiles(overview) {
  const { ems, tickets, line, throughput } = overview;
  const tiles = totals(ems).map(dimensionTile);
  tiles.push(emsTile(ems));
  if (tickets) {
    const oldest = tickets.oldest_locked ? `, the oldest for ${span(age(tickets.oldest_locked.locked_time))}` : "";
    const more = tickets.locked_partial ? " or more" : "";
    tiles.push(tile("tickets", "tickets in use", number(tickets.used), `${number(tickets.locked)}${more} locked${oldest}`));
  }
  if (line) {
    const longest = line.longest_wait ? `the longest for ${span(seconds(line.longest_wait))}` : "none";
    tiles.push(tile("waiting", "waiting", number(line.waiting), longest));
  }
  if (throughput) {
    tiles.push(tile("grants", "grants a second", number(throughput.grants_per_second), `${number(throughput.refusals_per_second)} refusals a second`));
  }
  show("tiles", ...tiles);
}

// One chart: series of [time, value], stacked or not, over the last minutes up to `now`.
function chart(name, now, series, { stacked = false, most = 0, format = number } = {}) {
  const [width, height] = [300, 64];
  const from = now - MINUTES * 60;
  const x = (time) => ((time - from) / (now - from)) * width;
  const sums = new Map();
  const lines = series.map(({ label, points }) => {
    const known = stacked ? points.map(([time, value]) => [time, value ?? 0]) : points.filter(([, value]) => value !== undefined);
    const shown = known.map(([time, value]) => {
      const base = stacked ? (sums.get(time) ?? 0) : 0;
      sums.set(time, base + value);
      return [time, base, base + value];
    });
    return { label, shown };
  });
  const highest = Math.max(most, ...lines.flatMap(({ shown }) => shown.map(([, , top]) => top)), 1e-9);
  const y = (value) => height - 1 - (value / highest) * (height - 4);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": name });
  lines.forEach(({ shown }, place) => {
    if (shown.length === 0) return;
    const top = shown.map(([time, , value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
    const colour = `var(--series-${place % 6})`;
    if (stacked || series.length === 1) {
      const bottom = shown.map(([time, base]) => `${x(time).toFixed(1)},${y(base).toFixed(1)}`).reverse();
      const area = drawn("polygon", { points: [...top, ...bottom].join(" "), "fill-opacity": stacked ? 0.75 : 0.2 });
      area.style.fill = colour;
      svg.append(area);
    }
    const line = drawn("polyline", { points: top.join(" "), fill: "none", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" });
    line.style.stroke = colour;
    svg.append(line);
  });
  const last = stacked ? [...sums.values()].at(-1) : lines[0]?.shown.at(-1)?.[2];
  const legend = lines.filter(({ label }) => label).map(({ label }, place) => {
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = `var(--series-${place % 6})`;
    return element("li", {}, swatch, label);
  });
  const scale = lines.length === 0 ? "" : `top ${format(highest)}`;
  return element("div", { class: "card chart" },
    element("div", { class: "head" }, element("span", { class: "name" }, name), element("b", {}, last === undefined || (series.length > 1 && !stacked) ? "" : format(last))),
    svg,
    element("div", { class: "axis" }, element("span", {}, `${MINUTES} min ago`), element("span", {}, scale), element("span", {}, "now")),
    legend.length > 0 ? element("ul", {}, legend) : undefined);
}

// The values of all points under a key, as one series for each name.
function byName(points, key) {
  const names = [...new Set(points.flatMap((point) => Object.keys(point[key] ?? {})))];
  const order = (name) => (USUAL.includes(name) ? USUAL.indexOf(name) : USUAL.length);
  names.sort((one, other) => order(one) - order(other) || (one < other ? -1 : 1));
  return names.map((label) => ({ label: plain(label), points: points.map((point) => [point.t, point[key]?.[label]]) }));
}

const REASONS = { em: "EM full", creator: "creator's limit", user: "user's limit", labels: "limit of labels", queue: "queue full", elsewhere: "by other instances" };

export function showCharts({ points }) {
  const now = points.at(-1)?.t ?? 0;
  const one = (key) => [{ points: points.map((point) => [point.t, point[key]]) }];
  const charts = [chart("share held", now, byName(points, "held"), { most: 1, format: percent })];
  // A viewer that is bound to users receives no other points.
  if (points.some((point) => point.grants !== undefined)) {
    const refused = byName(points, "refused").map((series) => ({ ...series, label: REASONS[series.label] ?? series.label }));
    charts.unshift(
      chart("grants a second", now, one("grants")),
      refused.length > 0 ? chart("refusals a second", now, refused, { stacked: true }) : chart("refusals a second", now, one("refusals")),
      chart("waiting requests", now, one("waiting")));
  }
  show("charts", ...charts);
}
