// One step's tree of drafts: as a drawing, and as a list that says the same.

import { el, lookOf, percent, svg, visible } from "./dom.js";
import { draftersOf } from "./trace.js";

export const MAX_NODES = 64;
const ROW = 36;
const HEIGHT = 26;
const GAP = 26;
const LETTER = 7.9;

// The nodes that are drawn: the accepted ones, and others as far as there is room.
function drawn(step) {
  const path = new Set(step.path);
  const kept = new Map();
  const room = MAX_NODES - path.size;
  let others = 0;
  step.nodes.forEach(([parent, , text, survival], index) => {
    const hasParent = parent < 0 || kept.has(parent);
    if (!hasParent || (!path.has(index) && others >= room)) return;
    if (!path.has(index)) others += 1;
    const drafters = draftersOf(step, index);
    const depth = parent < 0 ? 1 : kept.get(parent).depth + 1;
    const isAccepted = path.has(index);
    kept.set(index, { index, parent, text, survival, drafters, depth, isAccepted });
  });
  return [...kept.values()];
}

const childrenOf = (nodes, parent) =>
  nodes
    .filter((node) => node.parent === parent)
    .sort((one, other) => other.isAccepted - one.isAccepted || other.survival - one.survival);

// Every leaf has a row, and every node stands in the row of its best child.
function place(nodes) {
  let row = 0;
  const walk = (parent) => {
    childrenOf(nodes, parent).forEach((node, position) => {
      if (position) row += 1;
      node.row = row;
      walk(node.index);
    });
  };
  walk(-1);
  return row + 1;
}

const widthOf = (label) => Math.max(30, [...label].length * LETTER + 18);

// Draw it.  before: the end of the text that it goes on with.
export function drawTree(step, before) {
  const nodes = drawn(step);
  const rows = place(nodes);
  const root = { label: visible(before.slice(-14), 15) || "start", depth: 0, row: 0 };
  const last = nodes.filter((node) => node.isAccepted).at(-1) ?? root;
  const all = [root, ...nodes];
  if (step.own)
    all.push({
      label: visible(step.own[1]),
      depth: last.depth + 1,
      row: last.row,
      isOwn: true,
      from: last,
    });
  for (const node of all) node.label ??= visible(node.text);
  // The model's own token has a place of its own where drafts went on after the last accepted one.
  const own = all.at(-1);
  const isTaken =
    own.isOwn && nodes.some((node) => node.depth === own.depth && node.row === own.row);
  if (isTaken) own.row = rows;
  const columns = [];
  for (const node of all)
    columns[node.depth] = Math.max(columns[node.depth] ?? 0, widthOf(node.label));
  const starts = columns.map(
    (_, depth) => 2 + columns.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0),
  );
  for (const node of all) {
    node.x = starts[node.depth];
    node.y = 2 + node.row * ROW;
    node.width = widthOf(node.label);
  }
  const width = starts.at(-1) + columns.at(-1) + 4;
  const height = (rows + isTaken - 1) * ROW + HEIGHT + 8;
  const byIndex = new Map(nodes.map((node) => [node.index, node]));
  const picture = svg("svg", {
    class: "tree",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": summaryOf(step),
  });
  for (const node of all.slice(1)) {
    picture.append(edge(node.from ?? byIndex.get(node.parent) ?? root, node));
  }
  for (const node of all) picture.append(box(node));
  return { picture, numHidden: step.nodes.length - nodes.length };
}

const stateOf = (node) =>
  node.isOwn ? "own" : node.depth === 0 ? "context" : node.isAccepted ? "accepted" : "rejected";

function edge(from, to) {
  const x = from.x + from.width;
  const [y, end] = [from.y + HEIGHT / 2, to.y + HEIGHT / 2];
  const middle = to.x - GAP / 2;
  const d = `M${x} ${y}H${middle - 8}C${middle} ${y} ${middle} ${end} ${to.x} ${end}`;
  const line = svg("path", { class: `edge ${stateOf(to)}`, d });
  line.style.setProperty("--depth", to.depth);
  return line;
}

function box(node) {
  const { x, y, width, drafters = [], depth } = node;
  const look = drafters.length ? ` d${lookOf(drafters[0])}` : "";
  const group = svg("g", { class: `node ${stateOf(node)}${look}` });
  group.style.setProperty("--depth", depth);
  group.append(svg("title", { text: sentenceOf(node) }));
  group.append(svg("rect", { x, y, width, height: HEIGHT, rx: 6 }));
  group.append(
    svg("text", { x: x + width / 2, y: y + 17, "text-anchor": "middle", text: node.label }),
  );
  if (look) group.append(underline(x + 8, y + HEIGHT - 4.5, width - 16, lookOf(drafters[0])));
  return group;
}

// The same six lines that style.css draws below texts.
function underline(x, y, width, look) {
  let d = `M${x} ${y}h${width}`;
  if (look === 3) d = `M${x} ${y - 1.2}h${width}M${x} ${y + 1.6}h${width}`;
  if (look === 4) {
    const waves = Math.max(1, Math.round(width / 6));
    const half = width / waves / 2;
    d = `M${x} ${y}${`q${half / 2} -3 ${half} 0t${half} 0`.repeat(waves)}`;
  }
  return svg("path", { class: "underline", d });
}

function sentenceOf(node) {
  if (node.isOwn) return `${node.label}: the model's own token`;
  if (node.depth === 0) return "the text so far";
  const who = node.drafters.join(", ") || "unknown";
  const end = node.isAccepted ? "accepted" : "rejected";
  return `${node.label}: drafted by ${who}; expected to survive ${percent(node.survival)}; ${end}`;
}

export function summaryOf(step) {
  const own = step.own ? `, then the model's own “${visible(step.own[1])}”` : "";
  if (!step.nodes.length) return `A step without drafts${own}`;
  return `${step.path.length} of ${step.nodes.length} drafted tokens accepted${own}`;
}

export function listTree(step) {
  const nodes = drawn(step);
  for (const node of nodes) node.label = visible(node.text, 40);
  const list = (parent) => {
    const children = childrenOf(nodes, parent);
    if (!children.length) return null;
    return el(
      "ul",
      {},
      ...children.map((node) => el("li", { text: sentenceOf(node) }, list(node.index))),
    );
  };
  const hidden = step.nodes.length - nodes.length;
  return el(
    "div",
    { class: "tree-list" },
    list(-1) ?? el("p", { text: "No drafts were verified in this step." }),
    hidden ? el("p", { text: `${hidden} more nodes are not shown.` }) : null,
    step.own ? el("p", { text: `Then the model's own token: ${visible(step.own[1], 40)}` }) : null,
  );
}
