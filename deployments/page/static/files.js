// Conversations and traces as files, which open without any server.

const KIND = "drafthouse";
const VERSION = 1;
const MAX_BYTES = 20e6;

function save(name, content) {
  const blob = new Blob([JSON.stringify(content)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${name}-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export const saveTrace = (trace) => save("trace", { [KIND]: "trace", version: VERSION, ...trace });

export function saveChat(model, messages) {
  save("conversation", { [KIND]: "conversation", version: VERSION, model, messages });
}

// Read one; raises Error with what is wrong.  All of it is made anew: a file may say anything.
export async function openFile(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 1e6} MB.`);
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is no JSON.`);
  }
  if (found?.[KIND] === "trace") return { trace: traceOf(found) };
  if (found?.[KIND] === "conversation") return { messages: list(found.messages).map(messageOf) };
  throw new Error(`${file.name} is neither a trace nor a conversation of Drafthouse.`);
}

const text = (value) => (typeof value === "string" ? value : "");
const num = (value) => (Number.isFinite(value) ? value : 0);
const list = (value) => (Array.isArray(value) ? value : []);
const texts = (value) => list(value).map(text);

function messageOf(found) {
  const role = found?.role === "assistant" ? "assistant" : "user";
  return {
    role,
    content: text(found?.content),
    answer: found?.answer ? answerOf(found.answer) : undefined,
  };
}

function traceOf(found) {
  const answers = list(found.answers).map(answerOf);
  const steps = list(found.steps).map(stepOf);
  return {
    model: text(found.model),
    made: text(found.made),
    prompt: text(found.prompt),
    answers,
    steps,
  };
}

function answerOf(found) {
  const stats = found?.stats ?? {};
  return {
    drafts: found?.drafts === true,
    finish: text(found?.finish),
    steps: list(found?.steps).map(stepOf),
    stats: {
      decode_time_s: num(stats.decode_time_s),
      num_draft_tokens: num(stats.num_draft_tokens),
      num_accepted_draft_tokens: num(stats.num_accepted_draft_tokens),
      mean_acceptance_length: num(stats.mean_acceptance_length),
      idle_because: text(stats.idle_because),
    },
    pieces: list(found?.pieces).map((piece) => ({
      ms: num(piece?.ms),
      text: text(piece?.text),
      tokens: list(piece?.tokens).map((token) => ({
        id: num(token?.id),
        bytes: list(token?.bytes).map(num),
        drafters: texts(token?.drafters),
      })),
    })),
  };
}

function stepOf(found) {
  const nodes = list(found?.nodes)
    .slice(0, 4096)
    .map((node, index) => [
      Math.min(Math.trunc(num(node?.[0])), index - 1),
      num(node?.[1]),
      text(node?.[2]),
      num(node?.[3]),
      num(node?.[4]),
    ]);
  return {
    n: num(found?.n),
    at_ms: num(found?.at_ms),
    drafters: texts(found?.drafters).slice(0, 32),
    nodes,
    path: list(found?.path)
      .map(num)
      .filter((at) => at in nodes),
    own: Array.isArray(found?.own) ? [num(found.own[0]), text(found.own[1])] : null,
    ms: { draft: num(found?.ms?.draft), step: num(found?.ms?.step) },
    batch: num(found?.batch),
    why: text(found?.why),
  };
}
