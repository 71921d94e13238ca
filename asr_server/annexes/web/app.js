// Puts the page together: views, the queue of files, the microphone, the key.

import { jobs, request } from "./api.js";
import { Cards } from "./cards.js";
import { $, count, h, show } from "./dom.js";
import { listenToKeys } from "./keys.js";
import { Live } from "./live.js";
import { chosenOptions, offerModels, offerOptions, offerOwn } from "./options.js";
import { Scheduler } from "./scheduler.js";
import { watch } from "./server-view.js";
import { Serving } from "./serving.js";

const TITLE = document.title;

offerOwn();
const serving = new Serving();
const scheduler = new Scheduler(serving);
const cards = new Cards(scheduler);
const live = new Live(cards, serving);

// -- The model, and the key --

serving.addEventListener("change", showServing);
$("model-choice").onchange = showServing;

function showServing() {
  const { state, models, reason } = serving;
  $("key-form").hidden = state !== "locked";
  if (state === "served") {
    offerModels(models);
    const model = serving.find(chosenOptions().model);
    $("model").replaceChildren("Served here: ", h("strong", {}, model.id), `, ${model.description}.`);
    offerOptions(model);
    takeUpJobs();
  } else $("model").textContent = state === "locked" ? "This server is locked." : reason;
}

$("key-form").onsubmit = async (event) => {
  event.preventDefault();
  const isRight = await serving.refresh($("key").value.trim());
  show($("key-error"), isRight ? "" : "The server does not take this key.");
  if (isRight) $("main").focus();
};

// -- Files --

let isTakenUp = false;
async function takeUpJobs() {
  if (isTakenUp || !serving.models.some(({ background }) => background)) return;
  isTakenUp = true;
  cards.takeUp(await jobs().catch(() => []));
}

scheduler.addEventListener("end", ({ detail: { name, state } }) => {
  $("announce").textContent = state === "done" ? `${name} is transcribed.` : `${name} could not be transcribed.`;
});

scheduler.addEventListener("change", () => {
  const again = cards.retriable;
  const isWaiting = scheduler.isHeld && scheduler.size > 0;
  const why = serving.state === "locked" ? "The server asks for a key" : "The server is away";
  const held = `${why}: ${count(scheduler.size, "file")} will go on by ${scheduler.size === 1 ? "itself" : "themselves"}.`;
  $("queue").hidden = !isWaiting && again.length < 2;
  $("try-all").hidden = again.length < 2;
  const text = isWaiting ? held : `${again.length} files could not be transcribed.`;
  if ($("queue-text").textContent !== text) $("queue-text").textContent = text;
});

$("try-all").onclick = () => cards.enqueue(cards.retriable);

function add(files) {
  if (!files.length) return; // text or a link was dropped
  show($("message"), "");
  cards.enqueue(cards.add([...files].map((file) => [file, file.name])));
}

$("files").onchange = () => {
  add($("files").files);
  $("files").value = "";
};

$("sample").onclick = async () => {
  const reply = await request("web/sample.mp3").catch(({ message }) => show($("message"), message));
  if (reply) add([new File([await reply.blob()], "Sample.mp3")]);
};

document.addEventListener("dragleave", ({ relatedTarget }) => relatedTarget || $("drop").classList.remove("is-over"));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop").classList.add("is-over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("is-over");
  add(event.dataTransfer.files);
});

for (const type of ["click", "keydown"]) addEventListener(type, ({ key }) => [undefined, "Escape"].includes(key) && show($("message"), ""), true); // read by then

// -- Views --

function route() {
  const view = location.hash === "#server" ? "server" : "transcribe";
  for (const section of ["transcribe", "server"]) $(`${section}-view`).hidden = section !== view;
  for (const link of document.querySelectorAll("nav a")) link.ariaCurrent = link.dataset.view === view ? "page" : null;
  if (view === "server") watch(serving);
}

document.querySelector(".skip").onclick = (event) => {
  event.preventDefault(); // its address would be another view
  $("main").focus();
};

listenToKeys(() => (live.isOn ? [] : cards.open));

setInterval(() => { // also while the tab is hidden, where no frames are drawn
  const progress = cards.drawProgress();
  document.title = live.isOn ? `● ${TITLE}` : progress ? `${progress} · ${TITLE}` : TITLE;
}, 1000);

addEventListener("beforeunload", (event) => {
  if (scheduler.isNeeded || live.isOn || cards.isBusy) event.preventDefault();
});

addEventListener("hashchange", route);
route();
serving.refresh();
request("version").then(async (reply) => ($("version").textContent = `version ${(await reply.json()).version}`), () => {});
