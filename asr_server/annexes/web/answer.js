// A transcript as data: its words within its text, its speakers, and what is downloaded.

import { clock } from "./dom.js";

const REACH = 32; // most characters between two words of a text

/**
 * The words of an answer with what stands between them: {gap, text, tail, start, end, segment, speaker, word}. `segment`
 * is an index; `word` is the answer's own word, null where it has none and a segment's time is shared out.
 */
export function piecesOf(answer) {
  const words = answer.words || [];
  const pieces = [];
  let [at, next] = [0, 0];
  (answer.segments || []).forEach((segment, index) => {
    const body = segment.text.trim();
    const found = answer.text.indexOf(body, at);
    const gap = found < 0 ? " " : answer.text.slice(at, found);
    if (found >= 0) at = found + body.length;
    let within = 0;
    const own = [];
    for (; next < words.length; next++) {
      const word = words[next];
      const place = body.indexOf(word.word, within);
      if (place >= 0 && place - within <= REACH) {
        own.push({ gap: body.slice(within, place), text: word.word, tail: "", start: word.start, end: word.end, segment: index, word });
        within = place + word.word.length;
      } else if (word.start >= segment.end) break;
    }
    if (own.length) own[own.length - 1].tail = body.slice(within);
    else own.push(...spread(segment, body, index));
    if (own.length) own[0].gap = gap + own[0].gap;
    for (const piece of own) piece.speaker = segment.speaker;
    pieces.push(...own);
  });
  return pieces;
}

function spread({ start, end }, body, segment) {
  const words = shared(body.split(/\s+/).filter(Boolean), start, end);
  return words.map((word, i) => ({ gap: i ? " " : "", tail: "", segment, word: null, ...word }));
}

/** `items` in pieces: another one begins where `begins(item, before)`. */
export function runsOf(items, begins) {
  const starts = items.flatMap((item, i) => (i && !begins(item, items[i - 1]) ? [] : [i]));
  return starts.map((first, i) => items.slice(first, starts[i + 1]));
}

/** Without what is deleted, and the space before it. */
export const textOf = (pieces) => pieces.map(({ gap, text, tail }) => (text ? gap + text : "") + tail).join("").trim();

/** Texts that share a time by their letters: {text, start, end} each. */
export function shared(texts, start, end) {
  const total = texts.join("").length || 1;
  let at = start;
  return texts.map((text) => ({ text, start: at, end: (at += ((end - start) * text.length) / total) }));
}

// -- As paragraphs --

const PARAGRAPH = 60; // words, after which a sentence's end begins a new one
export const SENTENCE_END = /[.!?。！？…]["'”»)]?$/;
const PAUSE_S = 4; // as good as a sentence's end

/** Where they begin: {first, speaker, isTurn, isTimed} each, `first` an index of `pieces`. */
export function paragraphsOf(pieces) {
  const isLong = pieces.length > PARAGRAPH * 2;
  const paragraphs = [];
  pieces.forEach(({ speaker }, i) => {
    const last = paragraphs.at(-1);
    const isTurn = Boolean(speaker) && speaker !== last?.speaker;
    const isOther = !last || speaker !== last.speaker || (isLong && begins(pieces, i, last.first));
    if (isOther) paragraphs.push({ first: i, speaker, isTurn, isTimed: isLong });
  });
  return paragraphs;
}

/** The words around one, between two sentences' ends and in one paragraph: [first, last]. */
export function sentenceOf(pieces, index) {
  const starts = new Set([...paragraphsOf(pieces).map(({ first }) => first), pieces.length]);
  const isEnd = (i) => SENTENCE_END.test(pieces[i].text + pieces[i].tail) || starts.has(i + 1);
  let [first, last] = [index, index];
  while (first > 0 && !isEnd(first - 1)) first--;
  while (!isEnd(last)) last++;
  return [first, last];
}

/** The same with their text, and the time at which each begins. */
export function writtenParagraphs(answer) {
  const pieces = piecesOf(answer);
  const all = paragraphsOf(pieces);
  const textAt = (i) => textOf(pieces.slice(all[i].first, all[i + 1]?.first));
  return all.map((one, i) => ({ ...one, at: clock(pieces[one.first].start), text: textAt(i) }));
}

function begins(pieces, i, first) {
  const [before, piece] = [pieces[i - 1], pieces[i]];
  const isEnd = SENTENCE_END.test(before.text + before.tail) || piece.start - before.end > PAUSE_S;
  return i - first >= PARAGRAPH * 3 || (i - first >= PARAGRAPH && isEnd);
}

// -- Who speaks, where that was asked for --

const NUM_COLORS = 8; // in style.css

/** In the order in which they first speak: {name, seconds, color}, the name of a colour of the page. */
export function speakersOf({ segments }) {
  const seconds = new Map();
  for (const { speaker, start, end } of segments || []) {
    if (speaker) seconds.set(speaker, (seconds.get(speaker) || 0) + end - start);
  }
  return [...seconds].map(([name, seconds], i) => ({ name, seconds, color: `speaker-${(i % NUM_COLORS) + 1}` }));
}

export const colorsOf = (answer) => new Map(speakersOf(answer).map(({ name, color }) => [name, color]));

// -- As text and as a document --

/** With a line for each turn of a speaker, where there are any, or for each paragraph and its time. */
export function plainText(answer, withTimes = false) {
  const paragraphs = writtenParagraphs(answer);
  if (withTimes) return paragraphs.map(({ at, speaker, text }) => `[${at}] ${speaker ? `${speaker}: ` : ""}${text}`).join("\n\n");
  if (!paragraphs.some(({ speaker }) => speaker)) return answer.text;
  return paragraphs.map(({ speaker, isTurn, text }) => (isTurn ? `\n${speaker}: ${text}` : ` ${text}`)).join("").trim();
}

/** As the server writes `verbose_json`. */
export function verboseJson({ task = "transcribe", language = "unknown", duration, text, segments, words, truncated, tracks, dropped }) {
  const usage = { type: "duration", seconds: Math.ceil(duration) };
  return { task, language, duration, text, segments, words, usage, truncated, tracks, dropped };
}
