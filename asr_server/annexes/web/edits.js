// Corrections as a list of operations over the words that the server sent, so that each can be undone, kept and merged.
// An operation is {id, word, text, parts} with the index of a word and the times of the parts of its text, {id, from, to} with
// the names of a speaker, {id, first, last, to} with the indexes of words that somebody else has said, or {id, side, at, by}
// with the times of subtitles that are moved by seconds: of "all", or of the "start" or "end" that is `at` a word's time.

import { piecesOf, runsOf, shared, textOf } from "./answer.js";
import { WIDE } from "./subtitles.js";

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
  return { pieces, answer: { ...base, ...correctedOf(base, pieces, changed), moves, translation } };
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
function correctedOf(base, pieces, changed) {
  const byWord = new Map(pieces.map((piece) => [piece.word, piece]));
  const words = base.words?.flatMap((word) => wordsOf(word, byWord.get(word)));
  const bySegment = Map.groupBy(pieces, ({ segment }) => segment);
  const segments = (base.segments || []).flatMap((segment, i) => partsOf(segment, bySegment.get(i) || [], changed.has(i)));
  const numbered = segments.map((segment, id) => ({ ...segment, id }));
  return { text: changed.size ? textOf(pieces) : base.text, segments: numbered, ...(words && { words }) };
}

function wordsOf(word, piece) {
  if (piece?.text === "") return [];
  if (!piece || (piece.text === word.word && piece.speaker === word.speaker)) return [word];
  return (piece.parts ?? [piece]).map(({ text, start, end }) => ({ ...word, word: text, start, end, ...voiced(piece) }));
}

function partsOf(segment, pieces, isChanged) {
  const runs = runsOf(pieces, (piece, before) => piece.speaker !== before.speaker);
  if (runs.length < 2 && !isChanged) return { ...segment, ...voiced(pieces[0] ?? segment) };
  const space = segment.text.match(/^\s*/)[0];
  const start = (run) => (run === runs[0] ? segment.start : run[0].start);
  const end = (run) => (run === runs.at(-1) ? segment.end : run.at(-1).end);
  const tokens = segment.tokens && { tokens: [] }; // they say what was heard
  return runs.map((run) => ({ ...segment, start: start(run), end: end(run), ...voiced(run[0]), text: space + textOf(run), ...tokens }));
}

const voiced = ({ speaker }) => speaker && { speaker };

// -- Another text for some words: those that stay keep their times, the others share the time between them by their letters --

const TOKEN = new RegExp(`\\s*(?:${WIDE.source}|(?:(?!${WIDE.source})\\S)+)`, "gu"); // with the space before it

/** The words from `first` to `last` that change, or were doubtful where one `isSure`, as corrections. */
export function rewritten(pieces, first, last, text, isSure = false) {
  const before = pieces.slice(first, last + 1).flatMap((piece, i) => tokensOf(piece).map((token) => ({ ...token, index: first + i })));
  const after = (text.match(TOKEN) ?? []).map((token) => ({ text: token.trim(), glue: /^\s/.test(token) ? " " : "" }));
  keepSame(before, after);
  for (let from = 0, to; from < after.length; from = to + 1) {
    to = after.findIndex((token, i) => i >= from && "index" in token);
    if (to < 0) to = after.length;
    place(after.slice(from, to), after[from - 1], after[to], pieces, first, last);
  }
  const byWord = Map.groupBy(after, ({ index }) => index);
  const changed = [];
  for (let index = first; index <= last; index++) {
    const parts = joined(byWord.get(index) ?? []);
    const own = parts.map((part) => part.text).join(" ");
    if (own !== pieces[index].text || (isSure && pieces[index].isDoubtful)) changed.push({ word: index, text: own, parts });
  }
  return changed;
}

const textsOf = (text) => (text.match(TOKEN) ?? []).map((token) => token.trim());
const tokensOf = ({ text, parts, start, end }) => (parts ?? [{ text, start, end }]).flatMap((part) => shared(textsOf(part.text), part.start, part.end));

/** Gives the tokens of the longest common order the words and the times of before. */
function keepSame(before, after) {
  const longest = Array.from({ length: before.length + 1 }, () => new Array(after.length + 1).fill(0));
  for (let i = before.length - 1; i >= 0; i--) {
    for (let k = after.length - 1; k >= 0; k--) {
      const isSame = before[i].text === after[k].text;
      longest[i][k] = isSame ? longest[i + 1][k + 1] + 1 : Math.max(longest[i + 1][k], longest[i][k + 1]);
    }
  }
  for (let [i, k] = [0, 0]; i < before.length && k < after.length; ) {
    if (before[i].text === after[k].text) {
      const { index, start, end } = before[i++];
      Object.assign(after[k++], { index, start, end });
    } else if (longest[i + 1][k] >= longest[i][k + 1]) i++;
    else k++;
  }
}

/** New tokens take the words that lie between those that stay; where there are none they belong to one of these. */
function place(tokens, left, right, pieces, first, last) {
  const from = left ? left.index + 1 : first;
  const to = right ? right.index - 1 : last;
  const isRoom = from <= to;
  const start = isRoom ? pieces[from].start : (left?.end ?? pieces[first - 1]?.end ?? 0);
  const end = isRoom ? pieces[to].end : (right?.start ?? pieces[last + 1]?.start ?? start);
  const times = shared(tokens.map(({ text }) => text), start, end);
  const indexOf = (i) => (isRoom ? from + Math.floor((i * (to - from + 1)) / tokens.length) : (left ?? right).index);
  tokens.forEach((token, i) => Object.assign(token, times[i], { index: indexOf(i) }));
}

/** What no space parts is one. */
function joined(tokens) {
  const whole = (run) => ({ text: run.map(({ text }) => text).join(""), start: run[0].start, end: run.at(-1).end });
  return runsOf(tokens, ({ glue }) => glue).map(whole);
}
