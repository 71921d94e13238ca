// What the list shows of a transcript, and what the history keeps beside its answer.

import { speakersOf } from "./answer.js";
import { clock, count, h, lower } from "./dom.js";

const PREVIEW = 160; // characters
const NAMED = 4; // speakers; of more, and of mere letters, there is the number

const DATE = new Intl.DateTimeFormat("en", { dateStyle: "medium" });

/** `took`: seconds from start to end, if that says anything. */
export function entryOf(name, answer, took) {
  const { duration, language, task, truncated, dropped, tracks } = answer;
  return describe({ name, createdAt: Date.now(), duration, language, task, took, truncated, dropped, tracks }, answer);
}

/** Takes over what may be corrected in the answer. */
export function describe(entry, answer) {
  return Object.assign(entry, { text: answer.text, speakers: speakersOf(answer).map(({ name }) => name) });
}

const listed = (texts, most) =>
  texts.length > most ? `${texts.slice(0, most).join(", ")} and ${texts.length - most} more` : texts.join(", ");

/** In words: how long it took, and how fast that was. */
export function detailsOf({ duration, took }) {
  const times = took && duration / took;
  const speed = took && `${times < 10 ? Number(times.toPrecision(times < 1 ? 1 : 2)) : Math.round(times)} × real time`;
  const pace = took && (took < 60 ? `in ${took.toFixed(1)} s` : `in ${clock(took)}`);
  return [pace, speed].filter(Boolean);
}

/** In words: how long it is, when it came, of what language and people, and what is missing. */
export function factsOf({ duration, createdAt, language, task, truncated, dropped = [], tracks = [], speakers = [], partial }) {
  const spoken = language && language !== "unknown" ? language.charAt(0).toUpperCase() + language.slice(1) : "";
  const kind = task === "translate" ? "translated into English" : spoken;
  const isNamed = speakers.length <= NAMED && speakers.some((name) => name.length > 1);
  const people = isNamed ? new Intl.ListFormat("en").format(speakers) : speakers.length && count(speakers.length, "speaker");
  const read = tracks.map(({ number, language }) => `audio track ${number}${language ? ` (${language})` : ""}`).join(", ");
  const loss = truncated && "the file is damaged or cut short: this is what could be read";
  const left = dropped.map(({ text, start }) => `“${text.trim()}” at ${clock(start)}`);
  const silence = left.length && `left out, since nobody seems to speak there: ${listed(left, NAMED)}`;
  const lack = partial && `incomplete: ${partial}`;
  const date = Number.isFinite(createdAt) && DATE.format(createdAt);
  return [clock(duration), date, kind, people, read, loss, silence, lack].filter(Boolean);
}

/** Whether `query`, in lower case, is in its name, its text or the names of its speakers. */
export const has = ({ name, text, speakers = [] }, query) =>
  [name, text, ...speakers].some((each) => lower(each).includes(query));

/** The text from its beginning, or around the place of `query`, which is marked. */
export function previewOf({ text }, query) {
  const at = query ? lower(text).indexOf(query) : -1;
  if (at < 0) return [text.slice(0, PREVIEW) || "Nothing was said."];
  const from = Math.max(0, at - PREVIEW / 4);
  const end = at + query.length;
  return [from ? "… " : "", text.slice(from, at), h("mark", {}, text.slice(at, end)), text.slice(end, end + PREVIEW)];
}
