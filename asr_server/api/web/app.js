// Puts the page together: views, the queue of files, the microphone, the key.

import { models, request, setApiKey } from "./api.js";
import { Cards } from "./cards.js";
import { $, h, show } from "./dom.js";
import { Live } from "./live.js";
import { chosenOptions, offerOptions } from "./options.js";
import { startWatching, stopWatching } from "./server-view.js";

const AT_ONCE = 2; // files; the others wait in the queue

let model = "";
let maxUploadBytes = Infinity;
const queue = []; // [card, options] each
let running = 0;

// -- The model, and the key --

async function greet() {
  try {
    const served = (await models())[0];
    model = served.id;
    maxUploadBytes = served.max_upload_bytes;
    $("model").replaceChildren("Served here: ", h("strong", {}, model), `, ${served.description}.`);
    offerOptions(served);
    $("key-form").hidden = true;
    return true;
  } catch (error) {
    $("key-form").hidden = error.status !== 401;
    $("model").textContent = error.status === 401 ? "This server is locked." : error.message;
    return false;
  }
}

$("key-form").onsubmit = async (event) => {
  event.preventDefault();
  setApiKey($("key").value.trim());
  const isRight = await greet();
  show($("key-error"), isRight ? "" : "The server does not take this key.");
  if (isRight) $("files").focus();
};

// -- Files --

const cards = new Cards({
  retry: (card) => enqueue([card]),
  forget: (card) => queue.splice(0, queue.length, ...queue.filter(([other]) => other !== card)),
});

/** With what is chosen now, whatever is chosen when their turn comes. */
function enqueue(added) {
  const options = chosenOptions();
  queue.push(...added.map((card) => [card, options]));
  while (running < AT_ONCE && queue.length) run(...queue.shift());
}

async function run(card, options) {
  running++;
  const isDone = (model || (await greet())) && (await card.run({ model, ...options }, maxUploadBytes));
  $("announce").textContent = isDone ? `${card.name} is transcribed.` : `${card.name} could not be transcribed.`;
  running--;
  if (queue.length) run(...queue.shift());
}

function add(files) {
  show($("message"), "");
  enqueue(cards.add([...files].map((file) => [file, file.name])));
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

new Live(
  () => cards.nextName(),
  async (file, answer, name) => {
    const [card] = cards.add([[file, name]]);
    const { task, speakers } = chosenOptions();
    if (task === "translate" || speakers) return enqueue([card]); // neither is done while one speaks
    await card.ready;
    card.finish(answer);
  },
);

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
cards.restore();
request("version").then(async (reply) => ($("version").textContent = `version ${(await reply.json()).version}`), () => {});
