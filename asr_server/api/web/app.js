// Puts the page together: views, the queue of files, the microphone, the key.

import { models, request, setApiKey } from "./api.js";
import { Card } from "./card.js";
import { $, clock, color, context2d, h, show } from "./dom.js";
import { Microphone } from "./microphone.js";
import { startWatching, stopWatching } from "./server-view.js";

const AT_ONCE = 2; // files; the others wait in the queue

let model = "";
let maxUploadBytes = Infinity;
const queue = [];
let running = 0;

// -- The model, and the key --

async function greet() {
  try {
    const served = (await models())[0];
    model = served.id;
    maxUploadBytes = served.max_upload_bytes;
    $("model").replaceChildren("Served here: ", h("strong", {}, model), `, ${served.description}.`);
    offerLanguages(served.languages);
    $("key-form").hidden = true;
    return true;
  } catch (error) {
    $("key-form").hidden = error.status !== 401;
    $("model").textContent = error.status === 401 ? "This server is locked." : error.message;
    return false;
  }
}

/** A choice where the model knows more than one. */
function offerLanguages(codes) {
  $("language-row").hidden = codes.length < 2;
  const names = new Intl.DisplayNames(["en"], { type: "language" });
  const options = codes.map((code) => h("option", { value: code }, names.of(code)));
  options.sort((a, b) => a.textContent.localeCompare(b.textContent));
  $("language").replaceChildren(h("option", { value: "" }, "detected"), ...options);
}

$("key-form").onsubmit = async (event) => {
  event.preventDefault();
  setApiKey($("key").value.trim());
  const isRight = await greet();
  show($("key-error"), isRight ? "" : "The server does not take this key.");
  if (isRight) $("files").focus();
};

// -- Files --

function add(files) {
  show($("message"), "");
  for (const file of files) {
    const card = addCard(file, file.name);
    queue.push(card);
  }
  advance();
}

function addCard(file, name) {
  const card = new Card(file, name, {
    onRemove: removeCard,
    onRetry: (again) => {
      queue.push(again);
      advance();
    },
  });
  $("cards").prepend(card.element);
  $("drop").classList.add("is-compact");
  return card;
}

function removeCard(card) {
  if (queue.includes(card)) queue.splice(queue.indexOf(card), 1);
  const next = card.element.nextElementSibling || card.element.previousElementSibling;
  card.element.remove();
  (next?.querySelector("button") || $("files")).focus();
}

async function advance() {
  while (running < AT_ONCE && queue.length) run(queue.shift());
}

async function run(card) {
  running++;
  const isDone = (model || (await greet())) && (await card.run(model, $("language").value, maxUploadBytes));
  $("announce").textContent = isDone ? `${card.name} is transcribed.` : `${card.name} could not be transcribed.`;
  running--;
  advance();
}

$("files").onchange = () => {
  add($("files").files);
  $("files").value = "";
};

let depth = 0; // dragging enters and leaves children too
document.addEventListener("dragenter", (event) => {
  event.preventDefault();
  depth++;
  $("drop").classList.add("is-over");
});
document.addEventListener("dragleave", () => {
  if (--depth <= 0) $("drop").classList.remove("is-over");
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  depth = 0;
  $("drop").classList.remove("is-over");
  add(event.dataTransfer.files);
});

// -- The microphone --

let microphone = null;
let recordings = 0;
const levels = [];

$("record").onclick = () => (microphone ? microphone.stop() : record());

async function record() {
  show($("message"), "");
  microphone = new Microphone({ text: showLive, level: showLevel, end: endRecording });
  setRecording(true);
  try {
    await microphone.start();
  } catch (error) {
    if (!microphone) return; // stopped meanwhile
    show($("message"), error.message);
    microphone.hasEnded = true;
    microphone = null;
    setRecording(false);
  }
}

function setRecording(isOn) {
  $("record").classList.toggle("is-recording", isOn);
  $("record").setAttribute("aria-pressed", isOn);
  $("record-label").textContent = isOn ? "Stop" : "Speak";
  $("live").hidden = !isOn;
  $("live-text").replaceChildren();
  $("live-time").textContent = "";
  levels.length = 0;
}

function showLive(turns) {
  const spans = turns.map((turn) => h("span", { className: turn.final ? "" : "pending" }, `${turn.failed || turn.text} `));
  $("live-text").replaceChildren(...spans);
}

function showLevel(block) {
  levels.push(Math.sqrt(block.reduce((sum, value) => sum + (value / 32768) ** 2, 0) / block.length));
  $("live-time").textContent = clock(microphone?.duration);
  const { context, width, height } = context2d($("live-level"));
  context.fillStyle = color("accent");
  levels.slice(-Math.floor(width / 5)).forEach((level, i) => {
    const bar = Math.max(2, Math.min(1, Math.sqrt(level * 3)) * height);
    context.fillRect(i * 5, (height - bar) / 2, 3, bar);
  });
}

async function endRecording(turns, error) {
  const spoken = microphone;
  microphone = null;
  setRecording(false);
  if (error) show($("message"), error);
  if (!spoken.blocks.length) return;
  const name = `Recording ${++recordings}`;
  const card = addCard(spoken.recording(`${name}.wav`), name);
  await card.ready;
  card.finish(answerOf(turns, spoken.duration));
}

/** The same shape as the answer to a file. */
function answerOf(turns, duration) {
  const said = turns.filter((turn) => turn.text);
  const segments = said.map(({ start, end, text }, id) => ({ id, start, end: Math.min(end ?? duration, duration), text }));
  return { text: said.map((turn) => turn.text).join(" "), duration, segments };
}

// -- Views --

function route() {
  const view = location.hash === "#server" ? "server" : "transcribe";
  for (const section of ["transcribe", "server"]) $(`${section}-view`).hidden = section !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view === "server") startWatching();
  else stopWatching();
}

addEventListener("hashchange", route);
route();
greet();
request("version").then(async (reply) => ($("version").textContent = `version ${(await reply.json()).version}`), () => {});
