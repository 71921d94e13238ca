// Corrections as a list of operations over the words that the server sent, so that each can be undone, kept and merged.
// An operation is {id, word, text} with the index of a word, {id, from, to} with the names of a speaker, or
// {id, segments, to} with the indexes of segments that somebody else has said.

import { piecesOf } from "./answer.js";
import { newId } from "./dom.js";

export const wordEdit = (word, text) => ({ id: newId(), word, text });
export const turnEdit = (segments, to) => ({ id: newId(), segments, to });
export const nameEdit = (from, to) => ({ id: newId(), from, to });

/** The answer as corrected and its words, of which an emptied one stays as an empty text. */
export function applyEdits(base, edits) {
  const pieces = piecesOf(base);
  const [texts, names, given] = effectOf(base, edits);
  for (const index of base.doubtful || []) pieces[index].isDoubtful = !texts.has(index);
  if (!edits.length) return { pieces, answer: base };
  const changed = new Set();
  for (const [index, text] of texts) {
    if (!pieces[index] || pieces[index].text === text) continue;
    pieces[index].text = text;
    changed.add(pieces[index].segment);
  }
  return { pieces, answer: { ...base, ...rewritten(base, pieces, changed, (speaker, segment) => given.get(segment) ?? names.get(speaker)) } };
}

function effectOf({ segments, words }, edits) {
  const texts = new Map();
  const names = new Map();
  const given = new Map(); // names by segment
  for (const { speaker } of [...(segments || []), ...(words || [])]) if (speaker) names.set(speaker, speaker);
  for (const edit of edits) {
    if ("word" in edit) texts.set(edit.word, edit.text);
    else if ("segments" in edit) for (const segment of edit.segments) given.set(segment, edit.to);
    else for (const map of [names, given]) for (const [key, now] of map) if (now === edit.from) map.set(key, edit.to);
  }
  return [texts, names, given];
}

function rewritten(base, pieces, changed, nameOf) {
  const named = (item, segment) => (item.speaker ? { ...item, speaker: nameOf(item.speaker, segment) } : item);
  const places = new Map(pieces.map(({ word, segment }) => [word, segment]));
  const texts = new Map(pieces.filter(({ word }) => word).map(({ word, text }) => [word, text]));
  const words = base.words
    ?.filter((word) => texts.get(word) !== "")
    .map((word) => named({ ...word, word: texts.get(word) ?? word.word }, places.get(word)));
  const bySegment = Map.groupBy(pieces, ({ segment }) => segment);
  const segments = (base.segments || []).map((segment, i) => {
    if (!changed.has(i)) return named(segment, i);
    const text = segment.text.match(/^\s*/)[0] + join(bySegment.get(i));
    return named({ ...segment, text, ...(segment.tokens && { tokens: [] }) }, i); // tokens say what was heard
  });
  return { text: changed.size ? join(pieces) : base.text, segments, ...(words && { words }) };
}

const join = (pieces) => pieces.map(({ gap, text, tail }) => (text ? gap + text : "") + tail).join("").trim();
