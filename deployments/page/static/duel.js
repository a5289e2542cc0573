// Two answers to one question beside each other: the race, and who wins by how much.

import { el, lookOf, motionIsReduced, number, percent, seconds } from "./dom.js";
import { emptyAnswer, firstMs, lastMs, sharesOf, speedOf, textOf, tokensOf } from "./api.js";
import { Painter } from "./text.js";
import { StepFilm } from "./steps.js";
import { mostTelling } from "./trace.js";

export class Duel {
  constructor(host, shared) {
    this.host = host;
    this.shared = shared;
    this.isReplaying = false;
    this.layOut();
    host.hidden = true;
  }

  // Empty lanes.  note: where the answers come from, if they are not asked for now.
  layOut(note = "") {
    this.status = el("p", { class: "status", role: "status" });
    this.verdict = el("div", { class: "verdict" });
    this.lanes = [lane(true, "With drafts"), lane(false, "Without")];
    this.more = el("div", {});
    this.host.replaceChildren(
      el("p", { class: "note", text: note }),
      this.status,
      this.verdict,
      el("div", { class: "two" }, ...this.lanes.map((one) => one.node)),
      this.more,
    );
    this.host.hidden = false;
  }

  say(text) {
    this.status.textContent = text;
  }

  stop() {
    this.isReplaying = false;
  }

  async present(trace, { replays }) {
    const [drafted = emptyAnswer(true), plain = emptyAnswer(false)] = trace.answers;
    const answers = [drafted, plain];
    const longest = Math.max(lastMs(drafted), lastMs(plain), 1);
    this.verdict.replaceChildren();
    this.more.replaceChildren();
    this.status.classList.remove("unseen");
    const { lanes } = this;
    lanes.forEach((lane, index) => lane.begin(answers[index], longest));
    if (replays && !motionIsReduced()) {
      this.say("Both again, together, as fast as they came:");
      await this.replay(lanes, longest);
      // Another text may have taken the place meanwhile.
      if (lanes !== this.lanes) return;
    }
    for (const lane of lanes) lane.paint(Infinity);
    this.judge(drafted, plain);
    this.showMore(trace, drafted);
  }

  replay(lanes, longest) {
    this.isReplaying = true;
    const began = performance.now();
    return new Promise((resolve) => {
      const frame = () => {
        const now = performance.now() - began;
        for (const lane of lanes) lane.paint(now);
        if (now >= longest || !this.isReplaying || lanes !== this.lanes) resolve();
        else requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    });
  }

  judge(drafted, plain) {
    const [ours, theirs] = [tokensOf(drafted), tokensOf(plain)];
    const idle = drafted.stats.idle_because;
    const meaning = this.shared.server?.idle_because[idle] ?? idle;
    const why = idle ? el("p", { class: "why", text: `No draft was verified: ${meaning}.` }) : null;
    // Seen, it is the verdict.
    this.status.classList.add("unseen");
    if (!theirs.length) {
      this.verdict.replaceChildren(...(why ? [why] : []));
      this.say(`${number(ours.length)} tokens`);
      return;
    }
    const count = Math.max(ours.length, theirs.length);
    const equal = ours.filter((token, index) => token.id === theirs[index]?.id).length;
    const isSame = equal === count && textOf(drafted) === textOf(plain);
    const tokens = `${number(equal)} of ${number(count)} tokens equal`;
    const ratio = speedOf(drafted) / speedOf(plain);
    const said = [
      el("strong", { text: `${number(ratio, 2)}×` }),
      el("span", { text: saidOf(ratio) }),
    ];
    const differs =
      "rounding can do that where two tokens are all but equally likely; else please report it";
    const same = isSame
      ? el("p", { class: "same", text: `✓ ${tokens}` })
      : el("p", { class: "same differs", text: `✗ ${tokens}: ${differs}` });
    this.verdict.replaceChildren(el("p", { class: "ratio" }, ...said), same, ...(why ? [why] : []));
    this.say(`${number(ratio, 2)} times ${saidOf(ratio)}; ${tokens}.`);
  }

  showMore(trace, drafted) {
    const shares = el(
      "ul",
      { class: "shares" },
      ...sharesOf(drafted).map((row) => shareOf(row, tokensOf(drafted).length)),
    );
    const film = el("div", { class: "film" });
    const replay = () => this.present(trace, { replays: true });
    const { num_draft_tokens: drafts, num_accepted_draft_tokens: accepted } = drafted.stats;
    const length = number(drafted.stats.mean_acceptance_length, 2);
    const counts = `${number(accepted)} of ${number(drafts)} drafted tokens were accepted, ${length} tokens per step with drafts.`;
    const left = el(
      "div",
      { class: "card" },
      el("h2", { text: "Whose tokens they are" }),
      shares,
      el("p", { class: "note", text: drafts ? counts : "No draft was verified." }),
      el("button", { type: "button", class: "quiet", text: "Replay", onclick: replay }),
    );
    const right = el("div", { class: "card" }, el("h2", { text: "Its steps" }), film);
    this.more.replaceChildren(el("div", { class: "two uneven" }, left, right));
    if (trace.steps.length) new StepFilm(film).show(trace, { at: mostTelling(trace.steps) });
    else film.append(el("p", { text: "This answer has no steps to show." }));
  }
}

// One of the two, which paints its answer as far as it had come at some time.
function lane(drafts, title) {
  const text = el("div", { class: "answer", tabindex: 0, role: "group", "aria-label": title });
  const bar = el("span", { class: drafts ? "bar fast" : "bar" });
  const figures = el("span", { class: "figures" });
  const track = el("div", { class: "track" }, bar);
  const node = el("div", { class: "lane" }, el("h3", { text: title }), track, figures, text);
  let [answer, longest, next, painter] = [emptyAnswer(drafts), 1, 0, null];

  function begin(whole, atMost) {
    [answer, longest, next, painter] = [whole, atMost, 0, new Painter(text)];
    const [first, all] = [seconds(firstMs(answer)), seconds(lastMs(answer))];
    figures.textContent = answer.pieces.length
      ? `${number(speedOf(answer))} tokens/s · first token after ${first} · ${all} in all`
      : "not asked";
  }

  function paint(until) {
    const { pieces } = answer;
    while (next < pieces.length && pieces[next].ms <= until) painter.push(pieces[next++]);
    if (next === pieces.length) painter.end();
    bar.style.setProperty("--share", Math.min(until, lastMs(answer)) / longest);
  }

  return { drafts, text, node, begin, paint };
}

// A row of "whose tokens".
function shareOf([name, count], total) {
  const share = count / total;
  const bar = el("i", { class: name ? `d${lookOf(name)}` : "own" });
  bar.style.setProperty("--share", share);
  const owner = name
    ? el("span", { class: `swatch d${lookOf(name)}`, text: name })
    : el("span", { text: "the model itself" });
  return el("li", {}, owner, bar, el("span", { text: `${number(count)} (${percent(share)})` }));
}

function saidOf(ratio) {
  if (!Number.isFinite(ratio)) return "too short to be timed";
  if (ratio >= 1.02) return "as fast with drafts";
  return `as fast: drafts do not pay here${ratio > 0.98 ? ", and cost nothing" : ""}`;
}
