// What the steps of an answer say of its tokens.

import { tokensOf } from "./api.js";

// The steps, each with the text before it, and the drafters that its accepted nodes count for.
export function attributed(trace) {
  const tokens = trace.answers.length ? tokensOf(trace.answers[0]) : [];
  let [before, count] = ["", 0];
  return trace.steps.map((step) => {
    const owners = step.path.map((node, place) => [node, tokens[count + place]?.drafters[0]]);
    const found = { ...step, before, owners: new Map(owners) };
    before += step.path.map((node) => step.nodes[node][2]).join("") + (step.own?.[1] ?? "");
    count += step.path.length + (step.own ? 1 : 0);
    return found;
  });
}

// Who proposed a node, the one that it counts for first.
export function draftersOf(step, index) {
  const names = step.drafters.filter((_, bit) => (step.nodes[index][4] >>> bit) & 1);
  const owner = step.owners.get(index);
  return owner ? [owner, ...names.filter((name) => name !== owner)] : names;
}

// The step that shows most: with accepted drafts, and with branches that were not.
const worth = (step) =>
  Math.min(step.path.length, 4) * (1 + Math.min(step.nodes.length - step.path.length, 8));
export const mostTelling = (steps) =>
  steps.reduce((top, step, at) => (worth(step) > worth(steps[top]) ? at : top), 0);
