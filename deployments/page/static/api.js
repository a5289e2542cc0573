// Everything that goes over the network, which is this server alone.

// Draft trees show what shared stores have learned, so this tab shares with nobody.
const random = () =>
  [...crypto.getRandomValues(new Uint8Array(12))]
    .map((byte) => byte.toString(16).padStart(2, "0"))
    .join("");
export const tabSalt = `page-${random()}`;
// Nothing that an earlier answer left helps the next one: what a comparison wants.
export const freshSalt = () => `page-${random()}`;

let apiKey = "";
let model;
export const useKey = (key) => {
  apiKey = key.trim();
};

export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function send(path, { body, signal } = {}) {
  const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  let reply;
  try {
    const method = body ? "POST" : "GET";
    reply = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it still running?", 0);
  }
  if (reply.ok) return reply;
  let message = `The server answers with status ${reply.status}.`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // It was no JSON, so the status says all.
  }
  throw new Refusal(message, reply.status);
}

// Who answers; what is asked after it is asked of that model.
export async function about() {
  const found = await (await send("ui/about")).json();
  model = found.model;
  return found;
}

// The server-sent events of a reply, as {event, data}; data is what its JSON says.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const found = { event: "message", data: "" };
      for (const line of block.split("\n")) {
        const [, name, said] = /^(event|data): ?(.*)$/.exec(line) ?? [];
        if (name) found[name] = said;
      }
      if (found.data === "[DONE]") return;
      if (found.data) yield { event: found.event, data: JSON.parse(found.data) };
    }
  }
}

// How the parts do, as they tell it; ends when the signal aborts or the server stops.
export async function* watch(signal) {
  yield* events(await send("ui/events", { signal }));
}

// One answer.  pieces: as they came, ms after the question; content: their text without reasoning.
export const emptyAnswer = (drafts) => ({ drafts, pieces: [], steps: [], stats: {}, finish: "" });

// Ask, and tell of every piece as it comes.
export async function ask(fields, { drafts, salt, signal, onPiece }) {
  const answer = emptyAnswer(drafts);
  const began = performance.now();
  const body = {
    model,
    ...fields,
    stream: true,
    cache_salt: salt,
    speculation: { enabled: drafts },
    return_token_ids: true,
    return_draft_sources: true,
    return_draft_trees: drafts,
  };
  const reply = await send("v1/chat/completions", { body, signal });
  for await (const { data } of events(reply)) {
    if (data.error) throw new Refusal(data.error.message, 500);
    answer.stats = data.metrics?.speculative_decoding ?? answer.stats;
    for (const choice of data.choices ?? []) {
      const piece = taken(choice, performance.now() - began);
      answer.steps.push(...(choice.draft_steps ?? []));
      answer.finish = choice.finish_reason ?? answer.finish;
      if (!piece.text && !piece.tokens.length) continue;
      answer.pieces.push(piece);
      onPiece?.(piece);
    }
  }
  return answer;
}

function taken(choice, ms) {
  const sources = choice.draft_sources ?? [];
  const tokens = sources.map((source, index) => ({
    id: choice.token_ids?.[index] ?? -1,
    bytes: source.bytes,
    drafters: source.drafters,
  }));
  const said = choice.delta ?? {};
  const content = said.content ?? "";
  return { ms, text: `${said.reasoning_content ?? ""}${content}`, content, tokens };
}

export const textOf = (answer) => answer.pieces.map((piece) => piece.text).join("");
export const contentOf = (answer) => answer.pieces.map((piece) => piece.content).join("");
export const tokensOf = (answer) => answer.pieces.flatMap((piece) => piece.tokens);
export const lastMs = (answer) => answer.pieces.at(-1)?.ms ?? 0;
export const firstMs = (answer) => answer.pieces[0]?.ms ?? 0;

// Tokens per second after the first, as the server measured it: pieces may come together.
export function speedOf(answer) {
  const count = tokensOf(answer).length;
  const measured = answer.stats.decode_time_s;
  if (measured > 0 && count > 1) return (count - 1) / measured;
  const first = answer.pieces[0]?.tokens.length ?? 0;
  const taken = (lastMs(answer) - firstMs(answer)) / 1000;
  return taken > 0 ? (count - first) / taken : NaN;
}

// How many tokens of the text count for each drafter; "" is the model itself.
export function sharesOf(answer) {
  const shares = new Map();
  for (const token of tokensOf(answer)) {
    const owner = token.drafters[0] ?? "";
    shares.set(owner, (shares.get(owner) ?? 0) + 1);
  }
  return [...shares].sort((one, other) => other[1] - one[1]);
}
