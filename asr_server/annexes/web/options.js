// What is chosen: of the next recording its sound, language, speakers and words to expect; of all texts how they are written.

import { $, attempt, h } from "./dom.js";

// Whisper's names that are not the browsers'
const OTHER_NAMES = { bashkir: "ba", bengali: "bn", maori: "mi", myanmar: "my", nynorsk: "nn", tagalog: "tl", tibetan: "bo" };
const codes = new Map(Object.entries(OTHER_NAMES)); // by a language's name in English

/** For `lang` in HTML: of an answer's language, by name or by code. */
export const codeOf = (language = "") => codes.get(language) || "";

const STORED = "asr-server-choices";
const SENT = ["language", "task", "speakers", "prompt"];
const WRITTEN = ["sort", "cue-width", "cue-lines", "times"];
const FIELDS = ["model-choice", "source", ...SENT, ...WRITTEN];
export const SCREEN = "screen"; // the sound of a tab or the computer
let choices = attempt(() => JSON.parse(localStorage.getItem(STORED))) || {}; // by a field's id

export function keepChoices() {
  choices = Object.fromEntries(FIELDS.map((id) => [id, $(id).value]));
  attempt(() => localStorage.setItem(STORED, JSON.stringify(choices)));
}

/** As one has chosen before, where that is offered. */
function restore(id) {
  const field = $(id);
  const before = field.value;
  field.value = choices[id] ?? before;
  if (field.selectedIndex < 0) field.value = before;
}

export function offerModels(models) {
  $("model-choice").replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
  $("model-field").hidden = models.length < 2;
  restore("model-choice");
}

/** Shows the choices that the model has. */
export function offerOptions({ languages, tasks = [] }) {
  const names = new Intl.DisplayNames(["en"], { type: "language" });
  for (const code of languages) codes.set(code, code).set(names.of(code).toLowerCase(), code);
  const offered = languages.map((code) => h("option", { value: code }, names.of(code)));
  offered.sort((a, b) => a.textContent.localeCompare(b.textContent));
  $("language").replaceChildren(h("option", { value: "" }, "detected"), ...offered);
  $("language-field").hidden = languages.length < 2;
  $("task-field").hidden = !tasks.includes("translate");
  SENT.forEach(restore);
  $("task").onchange = () => ($("language").disabled = $("speakers").disabled = $("task").value === "translate");
  $("task").onchange();
  $("options").hidden = false;
}

/** What can be chosen without a server. */
export function offerOwn() {
  WRITTEN.forEach(restore);
  $("options").onchange = $("writing").onchange = keepChoices;
  offerSources();
  navigator.mediaDevices?.addEventListener("devicechange", offerSources);
}

/** Browsers name microphones to pages that have been given one. */
export async function offerSources() {
  const devices = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
  const named = devices.filter(({ kind, label }) => kind === "audioinput" && label);
  const offered = named.map(({ deviceId, label }) => h("option", { value: deviceId }, label));
  if (navigator.mediaDevices?.getDisplayMedia) offered.push(h("option", { value: SCREEN }, "a tab or the computer"));
  $("source").replaceChildren(h("option", { value: "" }, "microphone"), ...offered);
  restore("source");
}

export function chosenOptions() {
  const task = canTranslate() ? $("task").value : "transcribe";
  const speakers = task === "translate" ? "" : $("speakers").value;
  const model = $("model-field").hidden ? "" : $("model-choice").value;
  return { model, task, language: $("language").value, speakers, prompt: $("prompt").value.trim(), source: $("source").value };
}

export const canTranslate = () => !$("task-field").hidden;

/** Letters a line, and lines, of a subtitle. */
export const subtitleLayout = () => ({ width: Number($("cue-width").value) || 42, lines: Number($("cue-lines").value) || 2 });

/** Whether texts, documents and copies have the times of their paragraphs. */
export const writesTimes = () => $("times").value !== "";
