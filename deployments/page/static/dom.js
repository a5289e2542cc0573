// Elements, numbers and texts: the little that every view shares.  Nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (selector, root = document) => root.querySelector(selector);

// Make an element: `text` goes in as text, `on...` are listeners, all else are attributes.
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const motionIsReduced = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export const number = (value, digits = 0) =>
  Number.isFinite(value)
    ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })
    : "–";

export const percent = (share) => (Number.isFinite(share) ? `${number(100 * share)} %` : "–");

export const seconds = (ms) =>
  ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000, ms < 10000 ? 2 : 1)} s`;

// A token as one can see it; characters that turn the direction of text would move its neighbours.
export function visible(text, limit = 16) {
  const shown = text
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replace(/^ | $/g, "␣")
    .replace(/[\u0000-\u001f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "·");
  const letters = [...shown];
  return letters.length > limit ? `${letters.slice(0, limit - 1).join("")}…` : shown || "∅";
}

// Drafters keep their number, and with it colour and underline, as long as the page is open.
const numbers = new Map();
export const NUM_LOOKS = 6;

export function lookOf(name) {
  if (!numbers.has(name)) numbers.set(name, numbers.size % NUM_LOOKS);
  return numbers.get(name);
}

export function swatch(name, note = "") {
  const mark = el("span", { class: `swatch d${lookOf(name)}`, text: name });
  return el("span", { class: "key" }, mark, note ? el("span", { text: ` ${note}` }) : null);
}

// Sentence by sentence to screen readers: letter by letter nobody could follow.
export class Announcer {
  constructor(region) {
    this.region = region;
    this.rest = "";
  }

  say(text) {
    this.region.append(el("p", { text }));
    while (this.region.childElementCount > 20) this.region.firstElementChild.remove();
  }

  push(text) {
    this.rest += text;
    const end = this.rest.search(/[.!?:;]\s[^]*$|\n/);
    if (end < 0) return;
    const cut =
      Math.max(...[". ", "! ", "? ", ": ", "; ", "\n"].map((mark) => this.rest.lastIndexOf(mark))) +
      1;
    const whole = this.rest.slice(0, cut).trim();
    this.rest = this.rest.slice(cut);
    if (whole) this.say(whole);
  }

  end() {
    if (this.rest.trim()) this.say(this.rest.trim());
    this.rest = "";
  }
}
