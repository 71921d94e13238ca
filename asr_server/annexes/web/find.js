// Where a text stands in the words of a transcript, and what they are with another in its place.

import { lower } from "./dom.js";

const LETTER = /[\p{L}\p{N}]/u;

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

/** The words that change, by index. A place over several words becomes the first of them. */
export function replaced(pieces, places, by) {
  const texts = new Map();
  for (const { first, last, from, to } of places.toReversed()) {
    const rest = (texts.get(last) ?? pieces[last].text).slice(to);
    for (let i = first + 1; i <= last; i++) texts.set(i, "");
    texts.set(first, pieces[first].text.slice(0, from) + by + rest);
  }
  return texts;
}
