// Another text for some words: those that stay keep their times, the others share the time between them by their letters.

import { shared } from "./answer.js";
import { WIDE } from "./subtitles.js";

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
  const parts = [];
  for (const { text, glue, start, end } of tokens) {
    const last = parts.at(-1);
    if (last && !glue) Object.assign(last, { text: last.text + text, end });
    else parts.push({ text, start, end });
  }
  return parts;
}
