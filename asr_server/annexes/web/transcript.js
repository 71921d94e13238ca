// The text of a recording, whose words light up while it plays and can be clicked, walked through by keys, corrected.

import { colorsOf, paragraphsOf, sentenceOf, speakersOf } from "./answer.js";
import { clock, editInPlace, h, inSlices, wrap } from "./dom.js";
import { rewritten } from "./edits.js";
import { placesOf } from "./find.js";
import { Follow } from "./follow.js";

const LONG = 400; // words, above which the text scrolls in a box of its own
const HEARD = 2000; // letters of a paragraph while it is recognised

export class Transcript {
  constructor(card) {
    const { text, bar, reached, correcting, turns, giveTo, split, joining, sentence, owner } = card;
    Object.assign(this, { card, element: text, reached, giveTo });
    this.follow = new Follow(text, "Back to the playing word", owner, { bar });
    this.clear();
    text.addEventListener("mousedown", ({ target, detail }) => {
      if (detail < 2) this.pressed = target; // a field that closes then moves other words under the mouse
    });
    text.addEventListener("click", (event) => this.#onClick(event));
    text.addEventListener("dblclick", () => this.edit(this.#indexOf(this.pressed)));
    text.addEventListener("keydown", (event) => this.#onKey(event));
    owner.listen(document, "selectionchange", () => this.#onSelection());
    correcting.onclick = () => {
      turns.hidden = !text.classList.toggle("is-editing");
      correcting.setAttribute("aria-pressed", !turns.hidden);
    };
    giveTo.onchange = () => this.#giveSelected(giveTo.value);
    sentence.onclick = () => this.edit(Math.max(0, this.cursor), true);
    split.onclick = () => this.#split();
    joining.onclick = () => this.#join();
  }

  clear() {
    this.answer = null;
    this.numHeard = 0; // letters
    this.pieces = [];
    this.paragraphs?.return(); // those that are not shown yet
    this.spans = []; // of the words that are shown
    this.lit = -1; // the word that is heard
    this.cursor = -1; // the word that the arrow keys have reached
    this.selected = null; // as a range of the document
    this.reached.textContent = "";
    this.element.replaceChildren();
    this.element.dir = "auto";
    this.element.classList.remove("is-long");
  }

  /** What was recognised so far. */
  hear(text) {
    if (this.answer || text.length < this.numHeard) this.clear();
    if (text.length === this.numHeard) return;
    const { lastElementChild: last } = this.element;
    if (!last || last.textContent.length > HEARD) this.element.append(h("p", { dir: "auto" }));
    this.element.lastElementChild.append(text.slice(this.numHeard));
    this.numHeard = text.length;
  }

  /** The words of an answer. Where they are shown already, what is open stays open. */
  show({ answer, pieces }) {
    const paragraphs = paragraphsOf(pieces);
    const shape = paragraphs.map(({ first, isTurn }) => `${first} ${isTurn}`).join();
    const isSame = this.answer && pieces.length === this.pieces.length && shape === this.shape;
    if (!isSame && this.isBeingEdited) return;
    if (isSame) this.#update(pieces, paragraphs, answer);
    else this.#build(answer, pieces, paragraphs);
    Object.assign(this, { answer, shape });
    this.element.classList.toggle("is-empty", !answer.text);
    const names = ["Said by …", ...this.#names(), "somebody else"];
    this.giveTo.replaceChildren(...names.map((name, i) => h("option", { value: i ? name : "" }, name)));
  }

  /** The field that is open in it, which has the focus: a search for it would look at each word. */
  get isBeingEdited() {
    const { activeElement: field } = document;
    return this.element.contains(field) && field.matches("input, textarea");
  }

  #update(pieces, paragraphs, answer) {
    this.#span(pieces.length - 1);
    pieces.forEach(({ text, isDoubtful }, i) => {
      const [span, before] = [this.spans[i], this.pieces[i]];
      if (text !== before.text && !span.querySelector("input")) span.textContent = text;
      if (isDoubtful !== before.isDoubtful) span.classList.toggle("is-doubtful", Boolean(isDoubtful));
    });
    this.pieces = pieces;
    const colors = colorsOf(answer);
    paragraphs.forEach(({ speaker, isTurn }, i) => {
      const element = this.element.children[i];
      if (speaker) element.style = `--speaker: var(--${colors.get(speaker)})`;
      const name = isTurn && element.querySelector("bdi");
      if (name && name.textContent !== speaker) name.textContent = speaker;
    });
  }

  #build(answer, pieces, paragraphs) {
    const { cursor } = this;
    const isAnother = this.answer !== null;
    this.clear();
    this.pieces = pieces;
    if (!pieces.length) {
      this.element.textContent = answer.text || "Nothing was said.";
      return;
    }
    this.element.classList.toggle("is-long", pieces.length > LONG);
    this.element.removeAttribute("dir"); // each paragraph has its own
    this.paragraphs = this.#elementsOf(paragraphs, colorsOf(answer));
    inSlices(this.paragraphs, (paragraph) => this.element.append(paragraph));
    if (!isAnother || cursor < 0) return;
    this.#point(cursor);
    this.#bringIntoView(this.#span(cursor));
  }

  *#elementsOf(paragraphs, colors) {
    const { pieces } = this;
    for (const [i, { first, speaker, isTurn, isTimed }] of paragraphs.entries()) {
      const at = { "data-time": clock(pieces[first].start) };
      const label = isTurn ? h("span", { className: "speaker", title: "Rename", ...at }, h("bdi", {}, speaker)) : "";
      const element = h("p", isTimed && !label ? at : {}, label);
      if (speaker) element.style = `--speaker: var(--${colors.get(speaker)})`;
      element.classList.toggle("turn", Boolean(speaker));
      const own = pieces.slice(first, paragraphs[i + 1]?.first);
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
    const low = this.pieces.findLastIndex(({ start }) => start <= time + 0.01);
    const found = low >= 0 && time <= this.pieces[low].end + 0.15 ? low : -1;
    const isOther = found !== this.lit;
    if (isOther) this.#light(found);
    if (isPlaying && found >= 0 && !this.isBeingEdited) this.#point(found);
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

  #bringIntoView(span, isAgain = false) {
    if (!this.element.classList.contains("is-long")) return;
    const [box, word] = [this.element.getBoundingClientRect(), span.getBoundingClientRect()];
    if (word.top >= box.top && word.bottom <= box.bottom) return;
    this.element.scrollTop += word.top - box.top - box.height / 3;
    if (isAgain) return;
    const frame = () => new Promise(requestAnimationFrame);
    frame().then(frame).then(() => this.#bringIntoView(span, true)); // what is seen by then has its own height
  }

  // -- Being found --

  /** Marks where `query` stands, across words, and goes to the first. */
  find(query, areWhole) {
    for (const span of this.element.querySelectorAll(".is-found")) span.classList.remove("is-found");
    this.places = placesOf(this.pieces, query, areWhole);
    for (const { first, last } of this.places) for (let i = first; i <= last; i++) this.#span(i).classList.add("is-found");
    if (this.places.length) this.#bringIntoView(this.#span(this.places[0].first));
  }

  // -- Being walked through --

  #indexOf(target) {
    return this.spans.indexOf(target.closest(".word"));
  }

  #onClick(event) {
    const target = event.detail ? this.pressed : event.target; // a key or a script presses nothing
    const index = this.#indexOf(target);
    const label = target.closest(".speaker");
    if (target.matches("input, textarea") || (this.selected && event.detail === 1)) return;
    if (label) this.card.speakers.edit(label, label.textContent);
    else if (this.element.classList.contains("is-editing")) this.edit(index);
    else this.#choose(index);
  }

  #onKey(event) {
    if (event.target !== this.element || !this.pieces.length) return;
    const { direction } = getComputedStyle(this.#span(Math.max(0, this.cursor)).parentNode);
    const ahead = direction === "rtl" ? "ArrowLeft" : "ArrowRight";
    const step = event.key.startsWith("Arrow") && !/Up|Down/.test(event.key) && (event.key === ahead ? 1 : -1);
    if (step) this.reach(Math.min(this.pieces.length - 1, Math.max(0, this.cursor + step)));
    else if (event.key === "Enter" && this.cursor >= 0) this.edit(this.cursor, event.shiftKey);
    else return;
    event.preventDefault();
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
    this.card.player?.seek(this.pieces[index].start);
    this.#light(index);
    this.#point(index);
    this.follow.start();
    this.#bringIntoView(this.#span(index));
  }

  // -- Being corrected --

  /**
   * A word or its sentence. Enter takes and confirms it; Tab goes on to the next one, Shift+Tab back, Ctrl+Enter begins a
   * turn with it, Shift+Enter opens the whole sentence.
   */
  edit(index, isSentence = false) {
    if (this.spans[index]?.querySelector("input")) return;
    this.element.querySelector("input, textarea")?.blur(); // its words are back by then
    const span = this.#span(index);
    if (!span) return;
    this.#point(index);
    this.follow.stop();
    const { pieces } = this; // against which one writes
    const [first, last] = isSentence ? sentenceOf(pieces, index) : [index, index];
    const own = pieces.slice(first, last + 1);
    const before = own.map(({ gap, text }) => (text && /\s/.test(gap) ? " " : "") + text).join("").trim();
    const holder = isSentence ? wrap(this.spans[first], this.spans[last]) : span;
    const end = (text, key) => {
      const isSure = key?.key === "Enter" && own.some(({ isDoubtful }) => isDoubtful);
      if (isSentence) holder.replaceWith(...holder.childNodes);
      else span.textContent = this.pieces[index].text; // another tab may have corrected it meanwhile
      if (key) this.element.focus({ preventScroll: true });
      const edits = text === before && !isSure ? [] : rewritten(pieces, first, last, text, isSure);
      if (edits.length) this.card.recording.edit(edits);
      this.card.drawText();
      if (key?.key === "Tab") this.edit(key.shiftKey ? first - 1 : last + 1, isSentence);
      else if (key?.key === "Enter" && key.ctrlKey) this.#split();
      else if (key?.key === "Enter" && key.shiftKey) this.edit(index, true);
    };
    const label = before ? `Correct “${before}”` : "Put a word back";
    editInPlace(holder, before, label, end, { keys: ["Enter", "Tab"], tag: isSentence ? "textarea" : "input" });
  }

  // -- Who says it --

  #names() {
    return this.answer ? speakersOf(this.answer).map(({ name }) => name) : [];
  }

  #onSelection() {
    const selection = getSelection();
    if (!selection.rangeCount || !this.element.contains(selection.anchorNode)) return;
    this.selected = selection.isCollapsed ? null : selection.getRangeAt(0).cloneRange();
  }

  /** The words of the turn of a word: [first, last]. */
  #turnOf(index) {
    const isOther = ({ speaker }) => speaker !== this.pieces[index].speaker;
    const before = this.pieces.slice(0, index).findLastIndex(isOther);
    const after = this.pieces.findIndex((piece, i) => i > index && isOther(piece));
    return [before + 1, (after < 0 ? this.pieces.length : after) - 1];
  }

  /** The words that are selected, or else the turn of the one that was reached. */
  #giveSelected(name) {
    const within = this.spans.flatMap((span, i) => (this.selected?.intersectsNode(span) ? [i] : []));
    const [first, last] = within.length ? [within[0], within.at(-1)] : this.#turnOf(Math.max(0, this.cursor));
    this.#give(first, last, name === "somebody else" ? this.#newName() : name);
  }

  #newName() {
    const names = this.#names();
    let number = Math.max(2, names.length + 1);
    while (names.includes(`Speaker ${number}`)) number++;
    return `Speaker ${number}`;
  }

  /** Where nobody has a name all others get one too. */
  #give(first, last, name) {
    this.selected = null;
    const others = this.#names().length ? [] : [{ first: 0, last: this.pieces.length - 1, to: "Speaker 1" }];
    this.card.recording.edit([...others, { first, last, to: name }]);
  }

  /** With the word that was reached another one begins: the next of those who speak. */
  #split() {
    const { cursor } = this;
    if (cursor < 0) return;
    const names = this.#names();
    const next = names[(names.indexOf(this.pieces[cursor].speaker) + 1) % names.length];
    this.#give(cursor, this.#turnOf(cursor)[1], names.length < 2 ? this.#newName() : next);
  }

  /** The turn of the word that was reached is of the one who spoke before. */
  #join() {
    const [first, last] = this.#turnOf(Math.max(0, this.cursor));
    if (first) this.#give(first, last, this.pieces[first - 1].speaker);
  }
}
