// A trace as a film of its steps: what was drafted, what the model kept, and how long it took.

import { drawTree, listTree, summaryOf } from "./tree.js";
import { attributed } from "./trace.js";
import { el, motionIsReduced, seconds, swatch } from "./dom.js";

// How long each part of a step is shown: drafts grow, the model reads them, the rest falls away.
const STAGES = [
  ["draft", 900],
  ["verify", 700],
  ["done", 1900],
];

export class StepFilm {
  // isSmall: without controls but play and pause, and only steps with drafts.
  constructor(host, { isSmall = false } = {}) {
    this.isSmall = isSmall;
    this.steps = [];
    this.at = 0;
    this.timer = 0;
    this.picture = el("div", {
      class: "tree-frame",
      tabindex: 0,
      role: "group",
      "aria-label": "Tree of drafts",
    });
    this.caption = el("p", { class: "caption" });
    this.legend = el("p", { class: "legend" });
    this.play = el("button", {
      type: "button",
      class: "quiet",
      text: "Play",
      onclick: () => this.toggle(),
    });
    this.slider = el("input", {
      type: "range",
      min: 0,
      value: 0,
      "aria-label": "Step",
      oninput: () => this.seek(+this.slider.value),
    });
    this.before = el("p", { class: "so-far" });
    this.list = el("details", {}, el("summary", { text: "The same as a list" }));
    this.list.addEventListener("toggle", () => this.fillList());
    const step = (by, text, label) =>
      el("button", {
        type: "button",
        class: "quiet",
        text,
        "aria-label": label,
        onclick: () => this.seek(this.at + by),
      });
    const controls = isSmall
      ? [this.play]
      : [step(-1, "‹", "Previous step"), this.slider, step(1, "›", "Next step"), this.play];
    const bar = el("div", { class: "film-bar" }, ...controls, this.caption);
    host.replaceChildren(
      this.before,
      this.picture,
      bar,
      this.legend,
      ...(isSmall ? [] : [this.list]),
    );
  }

  // trace: with its steps; a text is what they said before.
  show(trace, { at = 0, plays = false } = {}) {
    this.stop();
    const steps = attributed(trace);
    this.steps = this.isSmall ? steps.filter((step) => step.nodes.length > 2) : steps;
    if (!this.steps.length) this.steps = steps;
    this.slider.max = Math.max(0, this.steps.length - 1);
    const names = [...new Set(this.steps.flatMap((step) => step.drafters))];
    this.legend.replaceChildren(
      ...names.map((name) => swatch(name)),
      el("span", { class: "key own", text: "the model itself" }),
    );
    this.go(Math.min(at, this.steps.length - 1), "done");
    if (plays && !motionIsReduced()) this.toggle();
  }

  seek(at) {
    this.stop();
    this.go(Math.max(0, Math.min(at, this.steps.length - 1)), "done");
  }

  go(at, stage) {
    const step = this.steps[at];
    if (!step) return;
    this.at = at;
    this.slider.value = at;
    const { picture, numHidden } = drawTree(step, step.before);
    this.drawing = picture;
    this.picture.replaceChildren(picture);
    this.before.textContent = `…${step.before.slice(-160)}`;
    this.setStage(stage);
    const more = numHidden ? `, ${numHidden} not drawn` : "";
    const why = step.nodes.length || !step.why ? "" : ` (${step.why.replaceAll("_", " ")})`;
    const time = `drafts ${seconds(step.ms.draft)}, step ${seconds(step.ms.step)}`;
    this.caption.textContent = `Step ${step.n + 1}: ${summaryOf(step)}${more}${why}. ${time}`;
    this.slider.setAttribute("aria-valuetext", this.caption.textContent);
    this.fillList();
  }

  fillList() {
    if (this.list.open && this.steps[this.at])
      this.list.replaceChildren(this.list.firstElementChild, listTree(this.steps[this.at]));
  }

  setStage(stage) {
    this.drawing?.setAttribute("data-stage", stage);
  }

  toggle() {
    if (this.timer) {
      this.stop();
      return;
    }
    this.play.textContent = "Pause";
    if (this.at === this.steps.length - 1) this.at = -1;
    this.run(this.isSmall ? this.at : this.at + 1, 0);
  }

  run(at, stage) {
    if (at >= this.steps.length && !this.isSmall) {
      this.stop();
      return;
    }
    const [name, ms] = STAGES[stage];
    if (stage === 0) this.go(at % this.steps.length, name);
    else this.setStage(name);
    const isLast = stage === STAGES.length - 1;
    this.timer = setTimeout(() => this.run(isLast ? at + 1 : at, isLast ? 0 : stage + 1), ms);
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.setStage("done");
    this.play.textContent = "Play";
  }
}
