// Starts the page: who answers, the tabs, the files, and what all views share.

import { $, swatch } from "./dom.js";
import { about, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { Figures } from "./figures.js";
import { openFile, saveChat, saveTrace } from "./files.js";
import { Race } from "./race.js";
import { StepFilm } from "./steps.js";
import { mostTelling } from "./trace.js";
import { Timeline } from "./timeline.js";

const TABS = ["chat", "race", "tree", "timeline", "figures"];

// What the views share.  server: who answers, null while nobody does.  trace: the last one with
// steps, which Tree and Timeline show.
const shared = {
  server: null,
  trace: null,
  use(trace) {
    shared.trace = trace;
    $("#save-trace").disabled = false;
    $("#tree .note").textContent = `Step by step, as ${trace.model} answered.`;
    film.show(trace, { at: mostTelling(trace.steps) });
    views.timeline.show(trace);
  },
  fail(error) {
    if (error.name === "AbortError") return;
    if (error.status === 401) $("#key-form").hidden = false;
    $("#alert").textContent = error.message;
    $("#alert").hidden = false;
  },
  clear() {
    $("#alert").hidden = true;
  },
};

const cluster = new Cluster((error) => shared.fail(error));
const film = new StepFilm($("#tree .film"));
const views = {
  chat: new Chat($("#chat"), shared),
  race: new Race($("#race"), shared),
  timeline: new Timeline($("#timeline"), cluster),
  figures: new Figures($("#figures"), cluster),
};

function open(name) {
  for (const tab of TABS) {
    const isOpen = tab === name;
    $(`#tab-${tab}`).setAttribute("aria-selected", isOpen);
    $(`#tab-${tab}`).tabIndex = isOpen ? 0 : -1;
    $(`#${tab}`).hidden = !isOpen;
  }
  views.timeline.setOpen(name === "timeline");
  views.figures.setOpen(name === "figures");
  cluster.setOpen(name === "timeline" || name === "figures");
}

$("[role=tablist]").addEventListener("click", (event) => {
  if (event.target.role === "tab") open(event.target.id.slice(4));
});
$("[role=tablist]").addEventListener("keydown", (event) => {
  const at = TABS.indexOf(event.target.id.slice(4));
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: TABS.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  const name = TABS[(next + TABS.length) % TABS.length];
  open(name);
  $(`#tab-${name}`).focus();
});

document.addEventListener("keydown", (event) => {
  const view = [views.chat, views.race].find((one) => !one.host.hidden);
  if (event.key === "Escape") view?.stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) view?.ask();
});

$("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("#key").value);
  $("#key-form").hidden = true;
  shared.clear();
  greet();
});

$("#open").addEventListener("click", () => $("#file").click());
$("#file").addEventListener("change", async () => {
  const [file] = $("#file").files;
  $("#file").value = "";
  if (!file) return;
  shared.clear();
  try {
    const { trace, messages } = await openFile(file);
    if (messages) views.chat.load(messages);
    else views.race.load(trace);
    open(messages ? "chat" : "race");
  } catch (error) {
    shared.fail(error);
  }
});
$("#save-trace").addEventListener("click", () => saveTrace(shared.trace));
$("#save-chat").addEventListener("click", () =>
  saveChat(shared.server?.model ?? "", views.chat.messages),
);

async function greet() {
  try {
    shared.server = await about();
  } catch (error) {
    $("#who").textContent = "No server answers yet.";
    shared.fail(error);
    return;
  }
  const { model, drafters, tasks, version } = shared.server;
  const names = tasks.default ?? Object.keys(drafters);
  const model_name = document.createElement("strong");
  model_name.textContent = model;
  const drafted = names.length ? " drafted by " : " without drafters";
  $("#who").replaceChildren(model_name, drafted, ...names.map((name) => swatch(name)));
  $("#version").textContent = `Drafthouse ${version}`;
  document.title = `${model} · Drafthouse`;
}

// A step of a real answer, until there is one of this server.
async function play() {
  const recording = await (await fetch("ui/static/recording.json")).json();
  const made = `A recording of ${recording.model}, made ${recording.made}: nothing is computed for it.`;
  views.race.play(recording, made);
  if (shared.trace) return;
  $("#tree .note").textContent = made;
  film.show(recording, { at: mostTelling(recording.steps) });
}

await greet();
await play();
