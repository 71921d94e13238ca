// The text of a recording, whose words light up while it plays and can be clicked, walked through by keys, corrected.

import { correct, piecesOf, speakersOf } from "./answer.js";
import { clock, h } from "./dom.js";
import { editInPlace } from "./field.js";

const PARAGRAPH = 60; // words, after which a sentence's end begins a new one
const SENTENCE_END = /[.!?。！？…]["'”»)]?$/;
const PAUSE_S = 4; // as good as a sentence's end
const LONG = 400; // words, above which the text scrolls in a box of its own

export class Transcript {
  /**
   * `on.seek(time)` for a word that is chosen; `on.change()` behind a correction; `on.rename(label, name)` for a
   * speaker who is clicked.
   */
  constructor(element, on) {
    this.element = element;
    this.on = on;
    this.clear();
    element.addEventListener("click", (event) => this.#onClick(event));
    element.addEventListener("dblclick", (event) => this.edit(this.#indexOf(event)));
    element.addEventListener("keydown", (event) => this.#onKey(event));
  }

  clear() {
    this.pieces = [];
    this.spans = [];
    this.lit = -1;
    this.element.replaceChildren();
    this.element.removeAttribute("tabindex");
    this.element.removeAttribute("role");
    this.element.removeAttribute("aria-label");
    this.element.classList.remove("is-long");
  }

  append(text) {
    this.element.append(text);
  }

  /** Shows the words of an answer, or again where its speakers have other names. */
  finish(answer) {
    const place = this.answer === answer ? this.element.scrollTop : 0;
    this.clear();
    this.answer = answer;
    this.pieces = piecesOf(answer);
    this.spans = this.pieces.map(({ text }) => h("span", { className: "word" }, text));
    this.element.replaceChildren(...this.#paragraphs());
    this.element.classList.toggle("is-empty", !answer.text);
    if (!this.pieces.length) {
      this.element.textContent = answer.text || "Nothing was said.";
      return;
    }
    this.element.classList.toggle("is-long", this.pieces.length > LONG);
    this.element.scrollTop = place;
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", "Transcript. Left and right arrow keys go from word to word, Enter corrects one.");
  }

  #paragraphs() {
    const isLong = this.pieces.length > PARAGRAPH * 2;
    const colors = new Map(speakersOf(this.answer).map(({ name, color }) => [name, color]));
    const paragraphs = [];
    let paragraph = null;
    this.pieces.forEach((piece, i) => {
      const { speaker } = this.answer.segments[piece.segment];
      const isTurn = speaker !== paragraph?.speaker;
      if (!paragraph || isTurn || (isLong && this.#begins(i, paragraph.first))) {
        const at = { "data-time": clock(piece.start) };
        const label = speaker && isTurn ? h("span", { className: "speaker", title: "Rename", ...at }, speaker) : "";
        paragraph = { first: i, speaker, element: h("p", isLong && !label ? at : {}, label) };
        if (speaker) paragraph.element.style = `--speaker: var(--${colors.get(speaker)})`;
        paragraph.element.classList.toggle("turn", Boolean(speaker));
        paragraphs.push(paragraph);
      }
      paragraph.element.append(piece.gap, this.spans[i], piece.tail);
    });
    return paragraphs.map(({ element }) => element);
  }

  #begins(i, first) {
    const [before, piece] = [this.pieces[i - 1], this.pieces[i]];
    const isEnd = SENTENCE_END.test(before.text + before.tail) || piece.start - before.end > PAUSE_S;
    return i - first >= PARAGRAPH * 3 || (i - first >= PARAGRAPH && isEnd);
  }

  // -- Being played --

  light(time) {
    let [low, high] = [0, this.pieces.length]; // the first that begins later
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.pieces[middle].start <= time + 0.01) low = middle + 1;
      else high = middle;
    }
    const found = low && time <= this.pieces[low - 1].end + 0.15 ? low - 1 : -1;
    if (found !== this.lit) this.#light(found);
  }

  #light(index) {
    this.spans[this.lit]?.classList.remove("is-lit");
    this.spans[index]?.classList.add("is-lit");
    this.lit = index;
    if (index >= 0 && this.element.classList.contains("is-long")) this.#bringIntoView(this.spans[index]);
  }

  #bringIntoView(span) {
    const [box, word] = [this.element.getBoundingClientRect(), span.getBoundingClientRect()];
    if (word.top >= box.top && word.bottom <= box.bottom) return;
    this.element.scrollTop += word.top - box.top - box.height / 3;
  }

  // -- Being found --

  /** Marks where `query` stands, across words, and goes to the first. */
  find(query) {
    for (const span of this.element.querySelectorAll(".is-found")) span.classList.remove("is-found");
    if (!query) return;
    const ends = [];
    let text = "";
    for (const piece of this.pieces) {
      text += piece.gap + piece.text + piece.tail;
      ends.push(text.length);
    }
    text = text.toLowerCase();
    let [index, first] = [0, null];
    for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + query.length)) {
      while (ends[index] <= at) index++;
      for (let i = index; i < ends.length; i++) {
        this.spans[i].classList.add("is-found");
        first ??= this.spans[i];
        if (ends[i] >= at + query.length) break;
      }
    }
    if (first && this.element.classList.contains("is-long")) this.#bringIntoView(first);
  }

  // -- Being corrected --

  #indexOf(event) {
    return this.spans.indexOf(event.target.closest(".word"));
  }

  #onClick(event) {
    const index = this.#indexOf(event);
    if (event.target.matches("input")) return;
    if (event.target.matches(".speaker")) this.on.rename(event.target, event.target.textContent);
    else if (this.element.classList.contains("is-editing")) this.edit(index);
    else this.#choose(index);
  }

  #onKey(event) {
    if (event.target !== this.element || !this.pieces.length) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) this.#choose(Math.min(this.pieces.length - 1, Math.max(0, this.lit + step)));
    else if (event.key === "Enter" && this.lit >= 0) this.edit(this.lit);
    else return;
    event.preventDefault();
  }

  #choose(index) {
    if (index < 0) return;
    this.on.seek(this.pieces[index].start);
    this.#light(index);
  }

  edit(index) {
    const span = this.spans[index];
    if (!span || span.querySelector("input")) return;
    const before = this.pieces[index].text;
    editInPlace(span, before, `Correct “${before}”`, (text, isByKey) => {
      if (isByKey) this.element.focus();
      if (text === before) return;
      span.replaceChildren(text);
      correct(this.answer, this.pieces, index, text);
      this.on.change();
    });
  }
}
