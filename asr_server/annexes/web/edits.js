// Corrections as a list of operations over the words that the server sent, so that each can be undone, kept and merged.
// An operation is {id, word, text} with the index of a word, or {id, from, to} with the names of a speaker.

import { piecesOf } from "./answer.js";
import { newId } from "./dom.js";

export const wordEdit = (word, text) => ({ id: newId(), word, text });
export const nameEdit = (from, to) => ({ id: newId(), from, to });

/** The answer as corrected and its words, of which an emptied one stays as an empty text. */
export function applyEdits(base, edits) {
  const pieces = piecesOf(base);
  const [texts, names] = effectOf(base, edits);
  for (const index of base.doubtful || []) pieces[index].isDoubtful = !texts.has(index);
  if (!edits.length) return { pieces, answer: base };
  const changed = new Set();
  for (const [index, text] of texts) {
    if (!pieces[index] || pieces[index].text === text) continue;
    pieces[index].text = text;
    changed.add(pieces[index].segment);
  }
  return { pieces, answer: { ...base, ...rewritten(base, pieces, changed, names) } };
}

function effectOf({ segments, words }, edits) {
  const texts = new Map();
  const names = new Map();
  for (const { speaker } of [...(segments || []), ...(words || [])]) if (speaker) names.set(speaker, speaker);
  for (const edit of edits) {
    if ("word" in edit) texts.set(edit.word, edit.text);
    else for (const [name, now] of names) if (now === edit.from) names.set(name, edit.to);
  }
  return [texts, names];
}

function rewritten(base, pieces, changed, names) {
  const named = (item) => (item.speaker ? { ...item, speaker: names.get(item.speaker) } : item);
  const texts = new Map(pieces.filter(({ word }) => word).map(({ word, text }) => [word, text]));
  const words = base.words
    ?.filter((word) => texts.get(word) !== "")
    .map((word) => named({ ...word, word: texts.get(word) ?? word.word }));
  const bySegment = Map.groupBy(pieces, ({ segment }) => segment);
  const segments = (base.segments || []).map((segment, i) => {
    if (!changed.has(i)) return named(segment);
    const text = segment.text.match(/^\s*/)[0] + join(bySegment.get(i));
    return named({ ...segment, text, ...(segment.tokens && { tokens: [] }) }); // tokens say what was heard
  });
  return { text: changed.size ? join(pieces) : base.text, segments, ...(words && { words }) };
}

const join = (pieces) => pieces.map(({ gap, text, tail }) => (text ? gap + text : "") + tail).join("").trim();
