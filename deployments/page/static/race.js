// The same text twice: with drafts and without, asked in turn and replayed together.

import { Announcer, el } from "./dom.js";
import { ask, freshSalt } from "./api.js";
import { Duel } from "./duel.js";
import { PRESETS } from "./presets.js";
import { Painter } from "./text.js";
import { StepFilm } from "./steps.js";

const WARM_UP_TOKENS = 4;

export class Race {
  constructor(host, shared) {
    this.host = host;
    this.shared = shared;
    this.abort = null;
    this.preset = PRESETS[0];
    this.build();
    this.announcer = new Announcer(document.getElementById("spoken"));
  }

  build() {
    this.prompt = el("textarea", { id: "race-prompt", rows: 7, spellcheck: "false" });
    this.note = el("p", { class: "note" });
    this.button = el("button", {
      type: "submit",
      class: "go",
      text: "Same text, twice: with drafts and without",
    });
    const choices = PRESETS.map((preset, index) => {
      const input = el("input", {
        type: "radio",
        name: "preset",
        id: `preset-${index}`,
        onchange: () => this.choose(preset),
      });
      input.checked = !index;
      return el("span", {}, input, el("label", { for: `preset-${index}`, text: preset.name }));
    });
    const form = el(
      "form",
      { class: "card", onsubmit: (event) => this.submit(event) },
      el("h2", { text: "The same text, sooner" }),
      el("p", {
        class: "lead",
        text: "Drafters guess the next tokens. The model checks a whole tree of guesses at once and keeps those that it would have written anyway.",
      }),
      el(
        "fieldset",
        { class: "choices" },
        el("legend", { class: "unseen", text: "What to ask" }),
        ...choices,
      ),
      el("label", { for: "race-prompt", text: "Prompt" }),
      this.prompt,
      this.note,
      this.button,
    );
    const recording = el("div", { class: "film" });
    this.recording = new StepFilm(recording, { isSmall: true });
    this.recordingLabel = el("p", { class: "note" });
    const side = el(
      "div",
      { class: "card recording" },
      el("h2", { text: "One step at a time" }),
      this.recordingLabel,
      recording,
    );
    const result = el("div", {});
    this.duel = new Duel(result, this.shared);
    this.host.replaceChildren(el("div", { class: "two" }, form, side), result);
    this.choose(this.preset);
  }

  choose(preset) {
    this.preset = preset;
    this.prompt.value = preset.prompt;
    this.note.textContent = preset.note;
  }

  // What a step is, before one is asked for.
  play(recording, label) {
    this.recordingLabel.textContent = label;
    this.recording.show(recording, { at: 0, plays: true });
  }

  submit(event) {
    event.preventDefault();
    if (this.abort) this.stop();
    else this.ask();
  }

  stop() {
    this.abort?.abort();
    this.duel.stop();
  }

  async ask() {
    if (this.abort) return;
    this.shared.clear();
    this.recording.stop();
    this.abort = new AbortController();
    this.button.textContent = "Stop";
    const prompt = this.prompt.value;
    const isPreset = prompt === this.preset.prompt;
    const fields = { ...(isPreset ? this.preset.fields : { max_tokens: 200, temperature: 0 }) };
    fields.messages = [{ role: "user", content: prompt }];
    fields.seed = 1;
    const { signal } = this.abort;
    const trace = {
      model: this.shared.server?.model ?? "",
      made: new Date().toISOString(),
      prompt,
      answers: [],
      steps: [],
    };
    this.duel.layOut();
    const { lanes } = this.duel;
    try {
      this.duel.say("Warming up …");
      // The first requests after a start are slower than those that follow.
      await ask(
        { ...fields, max_tokens: WARM_UP_TOKENS },
        { drafts: true, salt: freshSalt(), signal },
      );
      for (const lane of lanes) {
        this.duel.say(lane.drafts ? "Asking with drafts …" : "Asking without drafts …");
        const painter = new Painter(lane.text);
        const onPiece = (piece) => {
          painter.push(piece);
          if (lane.drafts) this.announcer.push(piece.text);
        };
        // Each from a new salt: what one answer leaves behind must not help the other.
        trace.answers.push(
          await ask(fields, { drafts: lane.drafts, salt: freshSalt(), signal, onPiece }),
        );
        painter.end();
        this.announcer.end();
      }
      trace.steps = trace.answers[0].steps;
      this.shared.use(trace);
      await this.duel.present(trace, { replays: true });
    } catch (error) {
      // A trace may have been opened meanwhile.
      if (lanes === this.duel.lanes) this.duel.say(error.name === "AbortError" ? "Stopped." : "");
      this.shared.fail(error);
    } finally {
      this.abort = null;
      this.button.textContent = "Same text, twice: with drafts and without";
    }
  }

  // An opened trace, which asks nobody.
  load(trace) {
    this.stop();
    this.prompt.value = trace.prompt;
    this.duel.layOut(`A saved trace of ${trace.model}, made ${trace.made.slice(0, 10)}.`);
    this.duel.present(trace, { replays: false });
    this.shared.use(trace);
  }
}
