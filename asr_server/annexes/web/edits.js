// Corrections as a list of operations over the words that the server sent, so that each can be undone, kept and merged.
// An operation is {id, word, text, parts} with the index of a word and the times of the parts of its text, {id, from, to} with
// the names of a speaker, {id, first, last, to} with the indexes of words that somebody else has said, or {id, side, at, by}
// with the times of subtitles that are moved by seconds: of "all", or of the "start" or "end" that is `at` a word's time.

import { piecesOf } from "./answer.js";

const LEAST_CONFIDENCE = 0.6; // of a word that is sure

/** The answer as corrected and its words, of which an emptied one stays as an empty text. */
export function applyEdits(base, edits) {
  const pieces = piecesOf(base);
  for (const piece of pieces) piece.isDoubtful = piece.word?.confidence < LEAST_CONFIDENCE;
  if (!edits.length) return { pieces, answer: base };
  const changed = new Set(); // segments
  const moves = [];
  for (const edit of edits) {
    if ("word" in edit) correct(pieces[edit.word], edit, changed);
    else if ("side" in edit) moves.push(edit);
    else if ("first" in edit) for (let i = edit.first; i <= edit.last && pieces[i]; i++) pieces[i].speaker = edit.to;
    else for (const piece of pieces) if (piece.speaker === edit.from) piece.speaker = edit.to;
  }
  const translation = base.translation && { ...base.translation, moves: moves.filter(({ side }) => side === "all") };
  return { pieces, answer: { ...base, ...rewritten(base, pieces, changed), moves, translation } };
}

/** Operations of older pages have no parts: their text has the time of the word. */
function correct(piece, { text, parts }, changed) {
  if (!piece) return;
  piece.isDoubtful = false;
  if (piece.text === text) return;
  Object.assign(piece, { text, parts });
  if (parts?.length) [piece.start, piece.end] = [parts[0].start, parts.at(-1).end];
  changed.add(piece.segment);
}

/** A segment of several speakers becomes several. */
function rewritten(base, pieces, changed) {
  const byWord = new Map(pieces.map((piece) => [piece.word, piece]));
  const words = base.words?.flatMap((word) => wordsOf(word, byWord.get(word)));
  const bySegment = Map.groupBy(pieces, ({ segment }) => segment);
  const segments = (base.segments || []).flatMap((segment, i) => partsOf(segment, bySegment.get(i) || [], changed.has(i)));
  const numbered = segments.map((segment, id) => ({ ...segment, id }));
  return { text: changed.size ? join(pieces) : base.text, segments: numbered, ...(words && { words }) };
}

function wordsOf(word, piece) {
  if (piece?.text === "") return [];
  if (!piece || (piece.text === word.word && piece.speaker === word.speaker)) return [word];
  return (piece.parts ?? [piece]).map(({ text, start, end }) => ({ ...word, word: text, start, end, ...voiced(piece) }));
}

function partsOf(segment, pieces, isChanged) {
  const runs = runsOf(pieces);
  if (runs.length < 2 && !isChanged) return { ...segment, ...voiced(pieces[0] ?? segment) };
  const space = segment.text.match(/^\s*/)[0];
  const start = (run) => (run === runs[0] ? segment.start : run[0].start);
  const end = (run) => (run === runs.at(-1) ? segment.end : run.at(-1).end);
  const tokens = segment.tokens && { tokens: [] }; // they say what was heard
  return runs.map((run) => ({ ...segment, start: start(run), end: end(run), ...voiced(run[0]), text: space + join(run), ...tokens }));
}

const voiced = ({ speaker }) => speaker && { speaker };

/** Of one speaker each. */
function runsOf(pieces) {
  const runs = [];
  for (const piece of pieces) {
    const last = runs.at(-1);
    if (last && last[0].speaker === piece.speaker) last.push(piece);
    else runs.push([piece]);
  }
  return runs;
}

const join = (pieces) => pieces.map(({ gap, text, tail }) => (text ? gap + text : "") + tail).join("").trim();
