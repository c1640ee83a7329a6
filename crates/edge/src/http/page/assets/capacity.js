// Capacity by dimension: one row each, with a bar whose legend is the header of the columns.

import { drawn, element, bar, table } from "/page/elements.js";
import { amount, percent, plain } from "/page/format.js";

export const USUAL = ["memory", "cores", "instances"];

const usualFirst = (one, other) => {
  const order = (name) => (USUAL.includes(name) ? USUAL.indexOf(name) : USUAL.length);
  return order(one) - order(other) || (one < other ? -1 : 1);
};

const swatch = (kind, name) => [element("i", { class: `swatch ${kind}` }), name];

const part = (kind, name, extra = "") => ({ name: swatch(kind, name), class: `n ${extra}`, of: ([dimension, sum]) => amount(dimension, sum[kind]) });

// The share of the grantable capacity that is used or locked.
export const heldShare = ({ total, protected: kept, used, locked }) => (total > kept ? (used + locked) / (total - kept) : undefined);

// `dimensions` are pairs of a name and its sums; `more` are further columns.
export function capacityTable(dimensions, ...more) {
  const rows = [...dimensions].sort(([one], [other]) => usualFirst(one, other));
  const hasIdle = rows.some(([, { idle }]) => idle > 0);
  const hasOut = rows.some(([, { out }]) => out > 0);
  const share = (sum, value) => value / Math.max(1, sum.total);
  const columns = [
    { name: "dimension", class: "text", of: ([dimension]) => plain(dimension) },
    { name: "held", class: "n", of: ([, sum]) => { const held = heldShare(sum); return element("b", {}, held === undefined ? "–" : percent(held)); } },
    { class: "bars", of: ([, sum]) => {
      const kind = (heldShare(sum) ?? 0) >= 0.995 ? "full" : "used";
      return bar([kind, share(sum, sum.used)], ["locked", share(sum, sum.locked)], ["out", share(sum, sum.out)], ["protected", share(sum, sum.protected)]);
    } },
    part("used", "used", "wide"),
    ...(hasIdle ? [{ name: "of these idle", class: "n wide", of: ([dimension, sum]) => amount(dimension, sum.idle) }] : []),
    part("locked", "locked", "wide"),
    ...(hasOut ? [part("out", "taking no grants", "wide")] : []),
    part("protected", "protected", "wide"),
    part("free", "free"),
    { name: "total", class: "n wide", of: ([dimension, sum]) => amount(dimension, sum.total) },
    ...more,
  ];
  return table(columns, rows, "no capacity");
}

// A line of values over time, the last 15 minutes, without a figure: the figure is beside it. Undefined values are gaps.
export function spark(name, points, of, most = 0) {
  const [width, height] = [90, 20];
  const known = points.map((point) => [point.t, of(point)]).filter(([, value]) => value !== undefined);
  const svg = drawn("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}, the last 15 minutes` });
  if (known.length < 2) return svg;
  const [first, last] = [known[0][0], known.at(-1)[0]];
  const highest = Math.max(most, ...known.map(([, value]) => value), 1e-9);
  const place = ([time, value]) => `${(((time - first) / (last - first)) * width).toFixed(1)},${(height - 1 - (value / highest) * (height - 3)).toFixed(1)}`;
  const line = known.map(place).join(" ");
  svg.append(drawn("polygon", { points: `0,${height} ${line} ${width},${height}`, class: "area" }), drawn("polyline", { points: line, class: "line", "vector-effect": "non-scaling-stroke" }));
  return svg;
}
