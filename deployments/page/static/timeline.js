// Who computed when: the steps of an answer, or of the whole cluster while one watches it.

import { el, lookOf, number, percent, seconds } from "./dom.js";
import { attributed, draftersOf } from "./trace.js";

const ROW = 44;
const BLOCK = 26;
const LEFT = 96;
const AXIS = 24;
const LIVE_MS = 10000;
const NOTHING = "Ask something, or open a trace: its steps appear here.";
const WIDEST = 16000; // pixels: browsers draw no wider canvas
const TICKS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000];

export class Timeline {
  constructor(host, cluster) {
    this.trace = null;
    this.isLive = false;
    this.spans = [];
    this.rows = [];
    this.isOpen = false;
    this.canvas = el("canvas", { role: "img" });
    this.frame = el(
      "div",
      { class: "timeline-frame", tabindex: 0, role: "group", "aria-label": "Timeline" },
      this.canvas,
    );
    this.zoom = el("input", {
      type: "range",
      min: 0,
      max: 100,
      value: 0,
      id: "zoom",
      oninput: () => this.draw(),
    });
    this.title = el("p", { class: "note" });
    this.summary = el("p", {});
    const box = el("input", {
      type: "checkbox",
      id: "live",
      onchange: () => this.setLive(box.checked),
    });
    const live = [
      el(
        "span",
        { class: "option" },
        box,
        el("label", { for: "live", text: "the whole cluster, now" }),
      ),
    ];
    host.replaceChildren(
      el(
        "div",
        { class: "card" },
        el("h2", { text: "Who computed when" }),
        this.title,
        this.frame,
        el(
          "div",
          { class: "options" },
          ...live,
          el("label", { for: "zoom", text: "Zoom" }),
          this.zoom,
        ),
        this.summary,
      ),
    );
    new ResizeObserver(() => this.draw()).observe(this.frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.title.textContent = NOTHING;
    cluster.listen((event, data) => this.take(event, data));
  }

  setOpen(isOpen) {
    this.isOpen = isOpen;
    if (isOpen) this.draw();
  }

  setLive(isLive) {
    this.isLive = isLive;
    this.spans = [];
    this.rows = [];
    if (isLive) this.title.textContent = `The last ${LIVE_MS / 1000} seconds of the whole cluster`;
    else if (this.trace) this.show(this.trace);
    else this.title.textContent = NOTHING;
    if (isLive) this.summary.textContent = "";
    this.canvas.width = 0;
    this.draw();
  }

  // What all targets and the drafters of the pool did of late.
  take(event, data) {
    if (event !== "rounds" || !this.isLive) return;
    const { at_ms: at } = data;
    for (const [target, steps] of Object.entries(data.steps)) {
      for (const [ago, step, draft, , , nodes] of steps) {
        const [from, to] = [at - ago - step, at - ago];
        const row = this.rowOf(target);
        if (draft) this.spans.push({ row, from: from - draft, to: from, tone: "accent" });
        this.spans.push({ row, from, to, tone: nodes ? "ink" : "soft" });
      }
    }
    for (const [name, id, , , draft] of data.drafts) {
      this.spans.push({
        row: this.rowOf(`${name} ${id}`),
        from: at - draft,
        to: at,
        look: lookOf(name),
      });
    }
    this.spans = this.spans.filter((span) => span.to > at - LIVE_MS);
    this.draw();
  }

  rowOf(name) {
    if (!this.rows.includes(name)) this.rows.push(name);
    return this.rows.indexOf(name);
  }

  // The steps of one answer.  They are told when they end, and how long they took.
  show(trace) {
    this.trace = trace;
    if (this.isLive) return;
    this.rows = ["drafters", "target", "tokens"];
    this.spans = [];
    let [before, drafting, verifying] = [0, 0, 0];
    for (const step of attributed(trace)) {
      const end = step.at_ms;
      const begin = Math.max(before, end - step.ms.step);
      if (step.ms.draft) {
        const look = step.drafters.length === 1 ? lookOf(step.drafters[0]) : undefined;
        this.spans.push({
          row: 0,
          from: Math.max(before, begin - step.ms.draft),
          to: begin,
          look,
          tone: "accent",
        });
      }
      this.spans.push({ row: 1, from: begin, to: end, tone: "ink" });
      // The accepted nodes, and the model's own token.
      const tokens = [...step.path, ...(step.own ? [-1] : [])];
      tokens.forEach((node, place) => {
        const width = (end - begin) / tokens.length;
        const look = node < 0 ? undefined : lookOf(draftersOf(step, node)[0] ?? "");
        this.spans.push({
          row: 2,
          from: begin + place * width,
          to: begin + (place + 1) * width,
          look,
          tone: "ink",
        });
      });
      drafting += step.ms.draft;
      verifying += step.ms.step;
      before = end;
    }
    const count = trace.steps.reduce((sum, step) => sum + step.path.length + (step.own ? 1 : 0), 0);
    this.title.textContent = `${number(count)} tokens in ${number(trace.steps.length)} steps of ${trace.model}`;
    const share = percent(drafting / (drafting + verifying));
    this.summary.textContent = `Drafters computed for ${seconds(drafting)} (${share}), the target for ${seconds(verifying)}.`;
    this.canvas.setAttribute(
      "aria-label",
      `${this.title.textContent}. ${this.summary.textContent}`,
    );
    this.draw();
  }

  draw() {
    if (!this.isOpen || !this.spans.length) return;
    const last = Math.max(...this.spans.map((span) => span.to));
    const first = this.isLive ? last - LIVE_MS : this.spans[0].from;
    const room = this.frame.clientWidth - 2;
    const width = Math.min(WIDEST, room * (WIDEST / room) ** (this.zoom.value / 100));
    const height = this.rows.length * ROW + AXIS;
    const density = Math.min(devicePixelRatio, WIDEST / width);
    Object.assign(this.canvas, { width: width * density, height: height * density });
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(density, density);
    const scale = (width - LEFT - 12) / Math.max(1, last - first);
    const x = (ms) => LEFT + (ms - first) * scale;
    const ink = colours(this.frame);
    for (const { row, from, to, look, tone } of this.spans) {
      const y = row * ROW + (ROW - BLOCK) / 2;
      const wide = Math.max(1, (to - from) * scale);
      context.fillStyle = look === undefined ? ink[tone] : ink.looks[look];
      context.fillRect(x(from), y, wide > 3 ? wide - 1 : wide, BLOCK);
      if (look !== undefined && wide > 6) mark(context, look, x(from), y, wide - 1, ink.ground);
    }
    this.drawAxis(context, { first, last, scale, x, ink, height });
  }

  drawAxis(context, { first, last, scale, x, ink, height }) {
    context.font = "13px system-ui, sans-serif";
    context.textBaseline = "middle";
    // Over what has left on the left, while it is live.
    context.fillStyle = ink.ground;
    context.fillRect(0, 0, LEFT - 2, height);
    this.rows.forEach((name, row) => {
      context.fillStyle = ink.ink;
      context.fillText(name.slice(0, 13), 2, row * ROW + ROW / 2);
      context.fillStyle = ink.line;
      context.fillRect(0, (row + 1) * ROW - 0.5, x(last) + 12, 1);
    });
    const every = TICKS.find((ms) => ms * scale > 70) ?? TICKS.at(-1);
    const base = this.isLive ? first : 0;
    for (let ms = base + Math.ceil((first - base) / every) * every; ms <= last; ms += every) {
      context.fillStyle = ink.line;
      context.fillRect(x(ms), 0, 1, height - AXIS + 5);
      context.fillStyle = ink.soft;
      context.fillText(seconds(ms - base), x(ms) + 3, height - AXIS / 2 + 2);
    }
  }
}

// Colours are those of style.css, so that a canvas is dark where the page is.
export function colours(host) {
  const probe = el("i");
  host.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const names = ["ink", "soft", "line", "ground", "accent"];
  const found = Object.fromEntries(names.map((name) => [name, read(name)]));
  found.looks = [0, 1, 2, 3, 4, 5].map((look) => read(`d${look}`));
  probe.remove();
  return found;
}

// As many bars as the look's number: colour alone must not tell.
function mark(context, look, x, y, width, colour) {
  context.fillStyle = colour;
  for (let bar = 0; bar < look; bar += 1) context.fillRect(x + 1, y + 3 + bar * 4, width - 2, 1.5);
}
