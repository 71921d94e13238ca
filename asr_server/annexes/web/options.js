// What is chosen before a recording is sent: its language, what to do with it, its speakers, and words to expect.

import { $, h } from "./dom.js";

// Whisper's names that are not the browsers'
const OTHER_NAMES = { bashkir: "ba", bengali: "bn", maori: "mi", myanmar: "my", nynorsk: "nn", tagalog: "tl", tibetan: "bo" };
const codes = new Map(Object.entries(OTHER_NAMES)); // by a language's name in English

/** For `lang` in HTML: of an answer's language, by name or by code. */
export const codeOf = (language = "") => codes.get(language) || "";

/** Shows the choices that the model has. */
export function offerOptions({ languages, tasks = [] }) {
  const names = new Intl.DisplayNames(["en"], { type: "language" });
  for (const code of languages) codes.set(code, code).set(names.of(code).toLowerCase(), code);
  const chosen = $("language").value; // the server may have been away meanwhile
  const offered = languages.map((code) => h("option", { value: code }, names.of(code)));
  offered.sort((a, b) => a.textContent.localeCompare(b.textContent));
  $("language").replaceChildren(h("option", { value: "" }, "detected"), ...offered);
  if (codes.has(chosen)) $("language").value = chosen;
  $("language-field").hidden = languages.length < 2;
  $("task-field").hidden = !tasks.includes("translate");
  $("task").onchange = () => ($("language").disabled = $("speakers").disabled = $("task").value === "translate");
  $("options").hidden = false;
}

export function chosenOptions() {
  const task = $("task-field").hidden ? "transcribe" : $("task").value;
  const speakers = task === "translate" ? "" : $("speakers").value;
  return { task, language: $("language").value, speakers, prompt: $("prompt").value.trim() };
}
