// The text of a recording, whose words light up while it plays and can be clicked or walked through by keys.

import { h } from "./dom.js";

/** Words with times: the server's own; else each segment's words, spread over its time. */
export function wordsOf(answer) {
  if (answer.words?.length) return answer.words.map(({ word, start, end }) => ({ text: word, start, end }));
  return (answer.segments || []).flatMap(spread);
}

function spread({ text, start, end }) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  const total = words.join("").length || 1;
  let at = start;
  return words.map((word) => {
    const from = at;
    at += ((end - start) * word.length) / total;
    return { text: word, start: from, end: at };
  });
}

export class Transcript {
  /** `seek(time)` is called for a word that is chosen. */
  constructor(element, seek) {
    this.element = element;
    this.words = [];
    this.lit = -1;
    this.seek = seek;
    element.addEventListener("click", (event) => this.#choose(this.spans?.indexOf(event.target.closest(".word"))));
    element.addEventListener("keydown", (event) => this.#onKey(event));
  }

  append(text) {
    this.element.append(text);
  }

  finish(answer) {
    this.words = wordsOf(answer);
    this.spans = this.words.map(({ text }) => h("span", { className: "word" }, text));
    this.element.replaceChildren(...this.spans.flatMap((span) => [span, " "]));
    if (this.words.length) {
      this.element.tabIndex = 0;
      this.element.setAttribute("role", "group");
      this.element.setAttribute("aria-label", "Transcript. Left and right arrow keys go from word to word.");
      return;
    }
    this.element.textContent = answer.text || "Nothing was said.";
    this.element.classList.toggle("is-empty", !answer.text);
  }

  light(time) {
    let found = -1;
    for (let i = 0; i < this.words.length && this.words[i].start <= time + 0.01; i++) found = i;
    if (found >= 0 && time > this.words[found].end + 0.15) found = -1;
    if (found === this.lit) return;
    this.spans[this.lit]?.classList.remove("is-lit");
    this.spans[found]?.classList.add("is-lit");
    this.lit = found;
  }

  #onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this.words.length) return;
    event.preventDefault();
    this.#choose(Math.min(this.words.length - 1, Math.max(0, this.lit + step)));
  }

  #choose(index) {
    if (index === undefined || index < 0) return;
    this.seek(this.words[index].start);
    this.light(this.words[index].start);
  }
}
