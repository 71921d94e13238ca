// A row to find words of a transcript and to put others in their place.

import { lower } from "./dom.js";

const LETTER = /[\p{L}\p{N}]/u;

export class Replace {
  constructor(card) {
    const { finding: button, replacing: element } = card;
    Object.assign(this, { card, button, element });
    [this.field, this.by, this.whole] = element.querySelectorAll("input");
    [this.one, this.all] = element.querySelectorAll("button");
    this.found = element.querySelector("[role=status]");
    button.onclick = () => this.#show(element.hidden);
    this.one.onclick = () => this.#replace(true);
    this.field.oninput = this.whole.onchange = () => this.#find();
    element.onkeydown = ({ key }) => {
      if (key === "Escape") this.#show(false);
    };
    element.onsubmit = (event) => {
      event.preventDefault();
      this.#replace(false);
    };
  }

  /** In lower case; empty while it is closed. */
  get query() {
    return this.element.hidden ? "" : lower(this.field.value.trim());
  }

  get isWhole() {
    return Boolean(this.query) && this.whole.checked;
  }

  #show(isOpen) {
    this.element.hidden = !isOpen;
    this.button.setAttribute("aria-expanded", isOpen);
    this.#find();
    (isOpen ? this.field : this.button).focus();
  }

  #find() {
    const number = this.card.mark();
    this.all.disabled = this.one.disabled = !this.query || !number;
    this.found.textContent = this.query && `${number} found`;
  }

  /** All places, or the one that was reached; then the next is. */
  #replace(isOne) {
    const { recording, transcript } = this.card;
    const { cursor, pieces, places: all } = transcript;
    const places = isOne ? all.filter(({ first }) => first === cursor) : all;
    const edits = replaced(pieces, places, this.by.value.trim().replace(/\s+/g, " "));
    if (edits.length) recording.edit(edits);
    if (isOne) transcript.reach((all.find(({ first }) => first > cursor) || all[0]).first);
    this.#find();
    this.found.textContent = `${places.length} replaced`;
    if (this.all.disabled) this.field.focus(); // the button has lost it
  }
}

/** Whether no word goes on at either end of a place. */
const isWhole = (text, at, end) => !LETTER.test(text[at - 1] ?? "") && !LETTER.test(text[end] ?? "");

/** {first, last, from, to} each: the words, and where it begins in the first and ends in the last. */
export function placesOf(pieces, query, areWhole = false) {
  const starts = [];
  const ends = [];
  let text = "";
  for (const piece of query ? pieces : []) {
    if (piece.text) text += piece.gap;
    starts.push(text.length);
    text += piece.text + piece.tail;
    ends.push(text.length);
  }
  text = lower(text);
  const places = [];
  let first = 0;
  for (let at = text.indexOf(query); query && at >= 0; at = text.indexOf(query, at + query.length)) {
    const end = at + query.length;
    while (ends[first] <= at) first++;
    let last = first;
    while (ends[last] < end) last++;
    if (!areWhole || isWhole(text, at, end)) places.push({ first, last, from: Math.max(0, at - starts[first]), to: Math.max(0, end - starts[last]) });
  }
  return places;
}

/** The words that change, as corrections. A place over several words becomes the first of them. */
function replaced(pieces, places, by) {
  const texts = new Map();
  for (const { first, last, from, to } of places.toReversed()) {
    const rest = (texts.get(last) ?? pieces[last].text).slice(to);
    for (let i = first + 1; i <= last; i++) texts.set(i, "");
    texts.set(first, pieces[first].text.slice(0, from) + by + rest);
  }
  return [...texts].map(([word, text]) => ({ word, text }));
}
