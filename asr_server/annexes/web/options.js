// What is chosen before a recording is sent: its language, what to do with it, its speakers, and words to expect.

import { $, attempt, h } from "./dom.js";

// Whisper's names that are not the browsers'
const OTHER_NAMES = { bashkir: "ba", bengali: "bn", maori: "mi", myanmar: "my", nynorsk: "nn", tagalog: "tl", tibetan: "bo" };
const codes = new Map(Object.entries(OTHER_NAMES)); // by a language's name in English

/** For `lang` in HTML: of an answer's language, by name or by code. */
export const codeOf = (language = "") => codes.get(language) || "";

const STORED = "asr-server-choices";
const FIELDS = ["model-choice", "language", "task", "speakers", "prompt"];
let choices = attempt(() => JSON.parse(localStorage.getItem(STORED))) || {}; // by a field's id

function keepChoices() {
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
  for (const id of ["language", "task", "speakers", "prompt"]) restore(id);
  $("task").onchange = () => ($("language").disabled = $("speakers").disabled = $("task").value === "translate");
  $("task").onchange();
  $("options").onchange = keepChoices;
  $("options").hidden = false;
}

export function chosenOptions() {
  const task = $("task-field").hidden ? "transcribe" : $("task").value;
  const speakers = task === "translate" ? "" : $("speakers").value;
  const model = $("model-field").hidden ? "" : $("model-choice").value;
  return { model, task, language: $("language").value, speakers, prompt: $("prompt").value.trim() };
}
