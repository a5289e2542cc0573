// A conversation.  Answers are shown as their drafts were, or rendered as Markdown.

import { Announcer, el, number, percent } from "./dom.js";
import { ask, contentOf, sharesOf, speedOf, tabSalt, tokensOf } from "./api.js";
import { render } from "./markdown.js";
import { Painter } from "./text.js";

export class Chat {
  constructor(host, shared) {
    this.host = host;
    this.shared = shared;
    this.messages = [];
    this.abort = null;
    this.announcer = new Announcer(document.getElementById("spoken"));
    this.build();
  }

  build() {
    this.log = el("div", { class: "log" });
    this.prompt = el("textarea", { id: "chat-prompt", rows: 3, placeholder: "Ask something" });
    this.drafts = el("input", { type: "checkbox", id: "chat-drafts" });
    this.drafts.checked = true;
    const option = (id, label, value, limits) => {
      const input = el("input", { id, type: "number", value, ...limits });
      return [input, el("span", { class: "option" }, el("label", { for: id, text: label }), input)];
    };
    const [temperature, first] = option("temperature", "Temperature", 0, {
      min: 0,
      max: 2,
      step: 0.1,
    });
    const [maxTokens, second] = option("max-tokens", "Tokens at most", 400, { min: 1, max: 8192 });
    Object.assign(this, { temperature, maxTokens });
    this.button = el("button", { type: "submit", class: "go", text: "Ask" });
    const anew = el("button", {
      type: "button",
      class: "quiet",
      text: "New conversation",
      onclick: () => this.load([]),
    });
    const form = el(
      "form",
      { class: "card", onsubmit: (event) => this.submit(event) },
      el("label", { for: "chat-prompt", text: "Your message" }),
      this.prompt,
      el(
        "div",
        { class: "options" },
        this.button,
        first,
        second,
        el(
          "span",
          { class: "option" },
          this.drafts,
          el("label", { for: "chat-drafts", text: "with drafts" }),
        ),
        anew,
      ),
    );
    this.host.replaceChildren(el("h2", { class: "unseen", text: "Conversation" }), this.log, form);
    this.load([]);
  }

  // Begin with these messages, which ask nobody.
  load(messages) {
    this.stop();
    this.messages = messages;
    this.log.replaceChildren(
      ...(messages.length
        ? messages.map((message) => this.shown(message))
        : [
            el("p", {
              class: "note",
              text: "Every token of an answer wears the look of the drafter that guessed it.",
            }),
          ]),
    );
    this.changed();
    const last = messages.findLast((message) => message.answer?.steps.length);
    if (last) this.share(last.answer, "");
  }

  changed() {
    document.getElementById("save-chat").disabled = !this.messages.length;
  }

  share(answer, prompt) {
    const model = this.shared.server?.model ?? "";
    const made = new Date().toISOString();
    if (answer.steps.length)
      this.shared.use({ model, made, prompt, answers: [answer], steps: answer.steps });
  }

  submit(event) {
    event.preventDefault();
    if (this.abort) this.stop();
    else this.ask();
  }

  stop() {
    this.abort?.abort();
  }

  async ask() {
    const prompt = this.prompt.value.trim();
    if (this.abort || !prompt) return;
    this.shared.clear();
    if (!this.messages.length) this.log.replaceChildren();
    this.prompt.value = "";
    const question = { role: "user", content: prompt };
    const own = this.messages;
    own.push(question);
    this.log.append(this.shown(question));
    const bubble = el("div", { class: "answer live" });
    this.log.append(bubble);
    const painter = new Painter(bubble);
    this.abort = new AbortController();
    this.button.textContent = "Stop";
    const pieces = [];
    const onPiece = (piece) => {
      pieces.push(piece);
      painter.push(piece);
      this.announcer.push(piece.text);
    };
    let answer = null;
    try {
      const fields = {
        messages: own.map(({ role, content }) => ({ role, content })),
        temperature: Number(this.temperature.value),
        max_tokens: Number(this.maxTokens.value) || undefined,
      };
      answer = await ask(fields, {
        drafts: this.drafts.checked,
        salt: tabSalt,
        signal: this.abort.signal,
        onPiece,
      });
    } catch (error) {
      this.shared.fail(error);
      if (pieces.length)
        answer = { drafts: this.drafts.checked, pieces, steps: [], stats: {}, finish: "stopped" };
    } finally {
      this.abort = null;
      this.button.textContent = "Ask";
      this.announcer.end();
    }
    bubble.remove();
    // Another conversation may have been opened meanwhile.
    if (own === this.messages) this.finish(question, answer);
  }

  finish(question, answer) {
    if (answer) {
      // Reasoning is shown, but is no part of what the model is told it said.
      const message = { role: "assistant", content: contentOf(answer), answer };
      this.messages.push(message);
      this.log.append(this.shown(message));
      this.share(answer, question.content);
    } else {
      // What was not answered is asked again, not kept.
      this.messages.pop();
      this.log.lastElementChild?.remove();
      this.prompt.value = question.content;
    }
    this.changed();
  }

  shown({ role, content, answer }) {
    if (role === "user")
      return el(
        "div",
        { class: "asked" },
        el("h3", { class: "unseen", text: "You" }),
        el("p", { text: content }),
      );
    const body = el("div", { class: "answer" });
    const paint = () => {
      body.className = "answer";
      const painter = new Painter(body);
      for (const piece of answer?.pieces ?? [{ text: content, tokens: [] }]) painter.push(piece);
      painter.end();
    };
    const toggle = el("button", {
      type: "button",
      class: "quiet",
      text: "Rendered",
      "aria-pressed": "false",
    });
    toggle.addEventListener("click", () => {
      const isRendered = toggle.getAttribute("aria-pressed") === "false";
      toggle.setAttribute("aria-pressed", isRendered);
      if (isRendered) {
        body.className = "answer rendered";
        render(content, body);
      } else paint();
    });
    paint();
    return el(
      "div",
      { class: "said" },
      el("h3", { class: "unseen", text: "The model" }),
      body,
      el(
        "div",
        { class: "options" },
        toggle,
        el("span", { class: "note", text: answer ? figuresOf(answer) : "" }),
      ),
    );
  }
}

function figuresOf(answer) {
  const total = tokensOf(answer).length;
  const shares = sharesOf(answer).map(
    ([name, count]) => `${name || "the model itself"} ${percent(count / total)}`,
  );
  return `${number(total)} tokens, ${number(speedOf(answer))} a second: ${shares.join(", ")}`;
}
