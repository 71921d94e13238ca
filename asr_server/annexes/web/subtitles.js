// Subtitles that one can read: they end at sentences, clauses and pauses, and their lines are about as long.

import { piecesOf, runsOf, SENTENCE_END } from "./answer.js";

const [LEAST_S, MOST_S, PAUSE_S] = [1, 7, 1]; // no cue reaches across a pause
export const LETTERS_PER_S = 20; // of Netflix's Timed Text Style Guide, for adults
const LEAST_MOVED_S = 0.1; // of a cue that was moved
const CLAUSE_END = /[,;:—–，、；：،]["'”»)]?$/;
export const WIDE = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/gu;
const WIDE_LETTER = 42 / 16; // of the others

/** {start, end, lines, speaker, startAt, endAt} each, the last two as they are without moves, with room for a speaker's name where `isLabelled`. `layout` = {width, lines}. */
export function cuesOf(answer, layout, isLabelled = false) {
  const words = piecesOf(answer).filter(({ text }) => text).map(({ gap, text, tail, ...rest }) => ({ ...rest, text: (gap + text + tail).trim(), glue: /^\s/.test(gap) ? " " : "" }));
  const runs = runsOf(words, (word, before) => word.speaker !== before.speaker || word.start - before.end >= PAUSE_S);
  const cues = runs.flatMap((run) => cut(run, layout, isLabelled));
  cues.forEach((cue, i) => (cue.end = Math.min(lastsUntil(cue), Math.max(cue.end, cues[i + 1]?.start ?? answer.duration))));
  return answer.moves?.length ? moved(cues, answer.moves) : cues;
}

/** A cue ends before the next one where that was moved; what is over before the sound begins is left out. */
function moved(cues, moves) {
  const sums = new Map();
  for (const { side, at, by } of moves) sums.set(side + at, (sums.get(side + at) ?? 0) + by);
  const movedBy = (side, at) => sums.get(side + at) ?? 0;
  const all = movedBy("all", null);
  for (const cue of cues) cue.start += movedBy("start", cue.startAt);
  cues.forEach((cue, i) => {
    const next = cues[i + 1];
    const mostEnd = next && movedBy("start", next.startAt) ? next.start : Infinity;
    cue.end = Math.max(cue.start + LEAST_MOVED_S, Math.min(mostEnd, cue.end + movedBy("end", cue.endAt))) + all;
  });
  for (const cue of cues) cue.start = Math.max(0, cue.start + all);
  return cues.filter(({ end }) => end > 0);
}

/** Letters a second. */
export const speedOf = ({ start, end, lines }) => widthOf(lines.join(" ")) / (end - start);

function lastsUntil({ start, end, lines }) {
  return Math.max(end, start + Math.min(MOST_S, Math.max(LEAST_S, widthOf(lines.join(" ")) / LETTERS_PER_S)));
}

/** The cheapest way to cut a run of words; `best[i]` is that of the first i of them. */
function cut(words, { width, lines }, isLabelled) {
  const { speaker } = words[0];
  const label = isLabelled && speaker ? `${speaker}: ` : "";
  const best = [{ cost: 0 }];
  for (let end = 1; end <= words.length; end++) {
    best.push({ cost: Infinity });
    for (let first = end - 1; first >= 0; first--) {
      const own = words.slice(first, end);
      const fits = linesOf(own, width, label).length <= lines && own.at(-1).end - own[0].start <= MOST_S;
      if (!fits && own.length > 1) break;
      const cost = best[first].cost + costOf(own, words[end]);
      if (cost < best[end].cost) best[end] = { cost, first };
    }
  }
  const cues = [];
  for (let end = words.length; end; end = best[end].first) cues.unshift(cueOf(words.slice(best[end].first, end), width, label));
  return cues;
}

function costOf(words, next) {
  const last = words.at(-1);
  const numInside = words.slice(0, -1).filter(({ text }) => SENTENCE_END.test(text)).length;
  const shown = (next?.start ?? last.end + LEAST_S) - words[0].start;
  return 0.5 + numInside + (next ? breakCost(last) : 0) + (shown < LEAST_S ? 100 : 0);
}

const breakCost = ({ text }) => (SENTENCE_END.test(text) ? 0 : CLAUSE_END.test(text) ? 1 : 4);

const widthOf = (text) => text.length + (text.match(WIDE)?.length ?? 0) * (WIDE_LETTER - 1);

/** As many words a line as fit. */
function linesOf(words, width, label) {
  const lines = [];
  let [line, isFirst] = ["", true];
  for (const { text, glue } of words) {
    const longer = line ? line + glue + text : text;
    if (line && widthOf(longer) + (isFirst ? label.length : 0) > width) {
      lines.push(line);
      [line, isFirst] = [text, false];
    } else line = longer;
  }
  return [...lines, line];
}

/** No more lines than are needed, and none much shorter than the others. */
function cueOf(words, width, label) {
  const { length } = linesOf(words, width, label);
  let narrow = Math.ceil(width / 2);
  while (narrow < width && linesOf(words, narrow, label).length > length) narrow++;
  const lines = linesOf(words, narrow, label);
  const [{ start, speaker }, { end }] = [words[0], words.at(-1)];
  return { start, end, lines, speaker, startAt: start, endAt: end };
}
