// The text of a recording, whose words light up while it plays and can be clicked, walked through by keys, corrected.

import { paragraphsOf, speakersOf } from "./answer.js";
import { clock, h, inSlices } from "./dom.js";
import { editInPlace } from "./field.js";
import { placesOf } from "./find.js";
import { Follow } from "./follow.js";

const LONG = 400; // words, above which the text scrolls in a box of its own
const BY_KEYS = { tabindex: 0, role: "group", "aria-label": "Transcript. Left and right arrow keys go from word to word, Enter corrects one." };

export class Transcript {
  /**
   * `bar` lies over its top. `on.seek(time)` for a word that is chosen; `on.correct(index, text)`; `on.rename(label, name)` for a speaker who
   * is clicked; `on.give(segments, name)` for a turn of another speaker; `on.closed()` behind each field.
   */
  constructor(element, bar, owner, on) {
    this.element = element;
    this.on = on;
    this.follow = new Follow(element, "Back to the playing word", owner, { bar });
    this.reached = h("span", { className: "visually-hidden", role: "status" });
    this.clear();
    element.addEventListener("mousedown", (event) => this.#onPress(event));
    element.addEventListener("click", (event) => this.#onClick(event));
    element.addEventListener("dblclick", () => this.edit(this.#indexOf(this.pressed)));
    element.addEventListener("keydown", (event) => this.#onKey(event));
  }

  clear() {
    this.answer = null;
    this.numHeard = 0; // letters
    this.pieces = [];
    this.paragraphs?.return(); // those that are not shown yet
    this.spans = []; // of the words that are shown
    this.lit = -1; // the word that is heard
    this.cursor = -1; // the word that the arrow keys have reached
    this.reached.textContent = "";
    this.element.replaceChildren();
    for (const name of Object.keys(BY_KEYS)) this.element.removeAttribute(name);
    this.element.classList.remove("is-long");
  }

  /** What was recognised so far. */
  hear(text) {
    if (this.answer || text.length < this.numHeard) this.clear();
    this.element.append(text.slice(this.numHeard));
    this.numHeard = text.length;
  }

  /** The words of an answer. Where they are shown already, what is open stays open. */
  show({ answer, pieces }) {
    const isSame = this.answer && pieces.length === this.pieces.length && speakerLine(answer) === speakerLine(this.answer);
    if (isSame) this.#update(pieces);
    else if (!this.isBeingEdited) this.#build(answer, pieces);
    if (isSame || !this.isBeingEdited) this.answer = answer;
    this.element.classList.toggle("is-empty", !answer.text);
  }

  /** A field is open in it. */
  get isBeingEdited() {
    return Boolean(this.element.querySelector("input"));
  }

  #update(pieces) {
    pieces.forEach(({ text, isDoubtful }, i) => {
      const span = this.#span(i);
      if (text !== this.pieces[i].text && !span.querySelector("input")) span.textContent = text;
      span.classList.toggle("is-doubtful", Boolean(isDoubtful));
    });
    this.pieces = pieces;
  }

  #build(answer, pieces) {
    const place = this.answer ? this.element.scrollTop : 0;
    const { cursor } = this;
    this.clear();
    Object.assign(this, { answer, pieces });
    if (!pieces.length) {
      this.element.textContent = answer.text || "Nothing was said.";
      return;
    }
    this.element.classList.toggle("is-long", pieces.length > LONG);
    for (const [name, value] of Object.entries(BY_KEYS)) this.element.setAttribute(name, value);
    this.paragraphs = this.#paragraphsOf(answer, pieces);
    inSlices(this.paragraphs, (paragraph) => this.element.append(paragraph));
    if (!place) return;
    this.#point(cursor);
    this.#span(pieces.length - 1);
    this.element.scrollTop = place;
  }

  *#paragraphsOf(answer, pieces) {
    const colors = new Map(speakersOf(answer).map(({ name, color }) => [name, color]));
    const all = paragraphsOf(answer, pieces);
    for (const [i, { first, speaker, isTurn, isTimed }] of all.entries()) {
      const at = { "data-time": clock(pieces[first].start) };
      const giving = h("button", { type: "button", className: "give", title: "Somebody else has said this" });
      giving.setAttribute("aria-label", `${speaker} did not say this`);
      const label = isTurn ? h("span", { className: "speaker", title: "Rename", ...at }, h("bdi", {}, speaker), giving) : "";
      const element = h("p", isTimed && !label ? at : {}, label);
      if (speaker) element.style = `--speaker: var(--${colors.get(speaker)})`;
      element.classList.toggle("turn", Boolean(speaker));
      const own = pieces.slice(first, all[i + 1]?.first);
      this.spans.push(...own.map(({ text, isDoubtful }) => h("span", { className: isDoubtful ? "word is-doubtful" : "word" }, text)));
      element.append(...own.flatMap(({ gap, tail }, k) => [gap, this.spans[first + k], tail]).filter(Boolean));
      element.dir = "auto"; // last: it looks at each letter
      yield element;
    }
  }

  /** That of a word; what is not shown yet is shown for it. */
  #span(index) {
    if (index >= this.spans.length) this.element.append(...this.paragraphs);
    return this.spans[index];
  }

  // -- Being played --

  /** The arrow keys go on from there while it plays. */
  light(time, isPlaying = false) {
    let [low, high] = [0, this.pieces.length]; // the first that begins later
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.pieces[middle].start <= time + 0.01) low = middle + 1;
      else high = middle;
    }
    const found = low && time <= this.pieces[low - 1].end + 0.15 ? low - 1 : -1;
    const isOther = found !== this.lit;
    if (isOther) this.#light(found);
    if (isPlaying && found >= 0) this.#point(found);
    if (isPlaying || this.isPlaying) this.#follow(isPlaying);
    else if (isOther && found >= 0 && this.follow.isOn) this.#bringIntoView(this.spans[found]);
  }

  #follow(isPlaying) {
    if (isPlaying && !this.isPlaying && !this.isBeingEdited) this.follow.start();
    if (!isPlaying && this.isPlaying) this.follow.rest();
    this.isPlaying = isPlaying;
    if (isPlaying && this.lit >= 0 && this.follow.target !== this.spans[this.lit]) this.follow.show(this.spans[this.lit]);
  }

  #point(index) {
    this.#span(this.cursor)?.classList.remove("is-reached");
    this.#span(index)?.classList.add("is-reached");
    this.cursor = index;
  }

  #light(index) {
    this.#span(this.lit)?.classList.remove("is-lit");
    this.#span(index)?.classList.add("is-lit");
    this.lit = index;
  }

  #bringIntoView(span) {
    if (!this.element.classList.contains("is-long")) return;
    const [box, word] = [this.element.getBoundingClientRect(), span.getBoundingClientRect()];
    if (word.top >= box.top && word.bottom <= box.bottom) return;
    this.element.scrollTop += word.top - box.top - box.height / 3;
  }

  // -- Being found --

  /** Marks where `query` stands, across words, and goes to the first. */
  find(query, areWhole) {
    for (const span of this.element.querySelectorAll(".is-found")) span.classList.remove("is-found");
    const places = placesOf(this.pieces, query, areWhole);
    for (const { first, last } of places) for (let i = first; i <= last; i++) this.#span(i).classList.add("is-found");
    if (places.length) this.#bringIntoView(this.#span(places[0].first));
  }

  // -- Being corrected --

  #indexOf(target) {
    return this.spans.indexOf(target.closest(".word"));
  }

  /** What is pressed first: a field that closes then moves other words under the mouse. */
  #onPress({ target, detail }) {
    if (detail < 2) this.pressed = target;
  }

  #onClick(event) {
    const target = event.detail ? this.pressed : event.target; // a key or a script presses nothing
    const index = this.#indexOf(target);
    const label = target.closest(".speaker");
    if (target.matches("input")) return;
    if (target.matches(".give")) this.#give(target.closest("p"));
    else if (label) this.on.rename(label, label.textContent);
    else if (this.element.classList.contains("is-editing")) this.edit(index);
    else this.#choose(index);
  }

  /** The turn of a paragraph, to the next speaker. */
  #give(paragraph) {
    const first = this.pieces[this.spans.indexOf(paragraph.querySelector(".word"))].segment;
    const { segments } = this.answer;
    const names = speakersOf(this.answer).map(({ name }) => name);
    if (names.length < 2) names.push("Speaker 2");
    const { speaker } = segments[first];
    const end = segments.findIndex((segment, i) => i > first && segment.speaker !== speaker);
    const turn = [...segments.keys()].slice(first, end < 0 ? undefined : end);
    this.on.give(turn, names[(names.indexOf(speaker) + 1) % names.length]);
  }

  #onKey(event) {
    if (event.target !== this.element || !this.pieces.length) return;
    const ahead = this.#isRightToLeft() ? "ArrowLeft" : "ArrowRight";
    const step = event.key.startsWith("Arrow") && !/Up|Down/.test(event.key) && (event.key === ahead ? 1 : -1);
    if (step) this.reach(Math.min(this.pieces.length - 1, Math.max(0, this.cursor + step)));
    else if (event.key === "Enter" && this.cursor >= 0) this.edit(this.cursor);
    else return;
    event.preventDefault();
  }

  #isRightToLeft() {
    return getComputedStyle(this.#span(Math.max(0, this.cursor)).parentNode).direction === "rtl";
  }

  reach(index) {
    this.#choose(index);
    const { text, isDoubtful } = this.pieces[index];
    this.reached.textContent = `${text || "deleted word"}${isDoubtful ? ", doubtful" : ""}`;
  }

  /** The next one behind the word that was reached, or the first. */
  reachDoubtful() {
    const after = this.pieces.findIndex(({ isDoubtful }, i) => isDoubtful && i > this.cursor);
    this.reach(after < 0 ? this.pieces.findIndex(({ isDoubtful }) => isDoubtful) : after);
    this.#span(this.cursor)?.scrollIntoView({ block: "nearest" });
    this.element.focus({ preventScroll: true });
  }

  #choose(index) {
    if (index < 0) return;
    this.on.seek(this.pieces[index].start);
    this.#light(index);
    this.#point(index);
    this.follow.start();
    this.#bringIntoView(this.#span(index));
  }

  edit(index) {
    const span = this.#span(index);
    if (!span || span.querySelector("input")) return;
    this.#point(index);
    this.follow.stop();
    const before = this.pieces[index].text;
    editInPlace(span, before, before ? `Correct “${before}”` : "Put a word back", (text, isByKey, isConfirmed) => {
      const isSure = isConfirmed && this.pieces[index].isDoubtful;
      span.textContent = this.pieces[index].text; // another tab may have corrected it meanwhile
      if (isByKey) this.element.focus();
      if (text !== before || isSure) this.on.correct(index, text);
      this.on.closed();
    });
  }
}

const speakerLine = ({ segments }) => segments.map(({ speaker }) => speaker || "").join("\n");
