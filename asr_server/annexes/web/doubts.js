// The words that the model was unsure of.

import { REACH } from "./answer.js";

const LEAST = Math.log(0.5); // of each token of a word that is sure

/** Indexes of words with a token that was no likelier than not. `logprobs`: {logprob, bytes} of each token. */
export function doubtfulOf(pieces, logprobs) {
  const decoder = new TextDecoder();
  let text = "";
  const ends = logprobs.map(({ bytes }) => (text += decoder.decode(Uint8Array.from(bytes), { stream: true })).length);
  let [at, token] = [0, 0];
  return pieces.flatMap(({ text: word }, i) => {
    const from = text.indexOf(word, at);
    if (from < 0 || from - at > REACH) return [];
    at = from + word.length;
    while (ends[token] <= from) token++;
    let least = logprobs[token].logprob;
    for (let next = token + 1; ends[next - 1] < at; next++) least = Math.min(least, logprobs[next].logprob);
    return least < LEAST ? [i] : [];
  });
}
