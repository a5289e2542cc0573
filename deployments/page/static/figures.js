// How the cluster does, as long as this tab is open: speed, acceptance, drafters, requests.

import { el, number, percent, swatch } from "./dom.js";
import { colours } from "./timeline.js";

const KEPT_S = 120;
const CHART_HEIGHT = 200;
// A coordinator says how it does once a second; one that was silent for so long has gone.
const SILENCE_MS = 10000;
// Of a drafter's circuit breaker.
const STATES = { closed: "drafts", open: "left alone after faults", half_open: "on trial" };

export class Figures {
  constructor(host, cluster) {
    this.cluster = cluster;
    this.isOpen = false;
    // Per second: tokens, and steps with and without drafts.
    this.seconds = [];
    this.chart = el("div", { class: "chart", role: "img", "aria-label": "Tokens per second" });
    this.now = el("dl", { class: "now" });
    this.scores = el("tbody", {});
    this.drafters = el("tbody", {});
    host.replaceChildren(
      el("h2", { class: "unseen", text: "Figures" }),
      el(
        "div",
        { class: "card" },
        el("h3", { text: "Tokens per second that targets write" }),
        this.chart,
        this.now,
      ),
      el(
        "div",
        { class: "two" },
        table("Drafters", ["Drafter", "Texts", "State"], this.drafters),
        table(
          "Accepted tokens a step, of late",
          ["Drafter", "Task", "Texts", "At", "of 4 drafts", "of 16"],
          this.scores,
        ),
      ),
    );
    this.told = new Map(); // by coordinator: its latest state, drafters and scores, and when it spoke
    cluster.listen((event, data) => this.take(event, data));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.remake());
    new ResizeObserver(() =>
      this.plot?.setSize({ width: this.width(), height: CHART_HEIGHT }),
    ).observe(this.chart);
  }

  setOpen(isOpen) {
    this.isOpen = isOpen;
    if (isOpen) this.remake();
  }

  take(event, data) {
    if (event === "rounds") this.count(data);
    const told = this.told.get(data.coordinator) ?? {};
    this.told.set(data.coordinator, { ...told, [event]: data, at: performance.now() });
    if (!this.isOpen || event === "rounds") return;
    if (event === "state") this.showNow();
    if (event === "drafters") this.showDrafters();
    if (event === "scores") this.showScores();
  }

  // The tokens of a step: one of each text, and the accepted drafts.  A target writes more than clients
  // are told, and usage counts: what stands behind a stop text, and samples that are not chosen.
  count({ at_ms: at, steps }) {
    for (const [ago, , , texts, , nodes, accepted] of Object.values(steps).flat()) {
      const second = Math.floor((at - ago) / 1000);
      let slot = this.seconds.find((one) => one.second === second);
      if (!slot) this.seconds.push((slot = { second, tokens: 0, nodes: 0, accepted: 0 }));
      slot.tokens += texts + accepted;
      slot.nodes += nodes;
      slot.accepted += accepted;
    }
    this.seconds = this.seconds.filter((one) => one.second > at / 1000 - KEPT_S);
  }

  all(event) {
    const since = performance.now() - SILENCE_MS;
    return [...this.told.values()].flatMap((told) => (told.at > since && told[event]) || []);
  }

  showNow() {
    const sum = (of) => this.all("state").reduce((total, state) => total + state[of], 0);
    const loads = new Map(
      this.all("state").flatMap((state) => state.targets.map((one) => [one.id, one.load])),
    );
    const pages = [...loads.values()].map((load) => load.pages_in_use / load.pages_total);
    const recent = this.seconds.slice(-10);
    const of = (name) => recent.reduce((total, one) => total + one[name], 0);
    const rows = [
      ["Running", number(sum("running"))],
      ["Waiting", number(sum("waiting"))],
      ["Targets", number(loads.size)],
      ["KV cache", percent(Math.max(0, ...pages))],
      ["Accepted of late", percent(of("accepted") / of("nodes"))],
    ];
    this.now.replaceChildren(
      ...rows.map(([name, value]) =>
        el("div", {}, el("dt", { text: name }), el("dd", { text: value })),
      ),
    );
    this.plot?.setData(this.columns());
  }

  showDrafters() {
    const rows = this.all("drafters").flatMap(({ drafters, left_alone: alone, refused }) => [
      ...drafters.map(({ name, sessions, breaker }) => [
        name,
        number(sessions),
        alone.includes(name) ? STATES.open : (STATES[breaker] ?? breaker),
      ]),
      ...Object.entries(refused).map(([name, why]) => [name, "–", `refused: ${why}`]),
    ]);
    this.drafters.replaceChildren(...rows.map(row));
  }

  showScores() {
    const rows = this.all("scores").flatMap(({ coordinator, pool, targets }) => [
      ...pool.map((score) => [coordinator, score]),
      ...Object.entries(targets).flatMap(([id, scores]) => scores.map((score) => [id, score])),
    ]);
    this.scores.replaceChildren(
      ...rows.map(([at, { drafter, task, law, accepted }]) =>
        row([drafter, task, law, at, number(accepted["4"], 2), number(accepted["16"], 2)]),
      ),
    );
  }

  width() {
    return Math.max(200, this.chart.clientWidth);
  }

  columns() {
    const last = Math.floor(Date.now() / 1000);
    const at = Array.from({ length: KEPT_S }, (_, index) => last - KEPT_S + index);
    const found = new Map(this.seconds.map((one) => [one.second, one.tokens]));
    return [at, at.map((second) => found.get(second) ?? 0)];
  }

  async remake() {
    if (!this.isOpen) return;
    const { default: UPlot } = await import("./vendor/uplot.js");
    if (!document.getElementById("uplot-style")) {
      const href = "ui/static/vendor/uplot.css";
      document.head.append(el("link", { id: "uplot-style", rel: "stylesheet", href }));
    }
    this.plot?.destroy();
    const ink = colours(this.chart);
    const axis = {
      stroke: ink.soft,
      grid: { stroke: ink.line, width: 1 },
      ticks: { stroke: ink.line },
    };
    this.plot = new UPlot(
      {
        width: this.width(),
        height: CHART_HEIGHT,
        legend: { show: false },
        cursor: { show: false },
        axes: [axis, axis],
        scales: { y: { range: (_, least, most) => [0, Math.max(10, most * 1.1)] } },
        series: [
          {},
          {
            stroke: ink.accent,
            width: 2,
            fill: `color-mix(in srgb, ${ink.accent} 15%, transparent)`,
          },
        ],
      },
      this.columns(),
      this.chart,
    );
    this.showNow();
    this.showDrafters();
    this.showScores();
  }
}

const row = ([name, ...values]) =>
  el(
    "tr",
    {},
    el("th", { scope: "row" }, swatch(name)),
    ...values.map((value) => el("td", { text: value })),
  );

const table = (title, heads, body) =>
  el(
    "div",
    { class: "card" },
    el("h3", { text: title }),
    el(
      "div",
      { class: "table-frame", tabindex: 0, role: "group", "aria-label": title },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col", text })))),
        body,
      ),
    ),
  );
