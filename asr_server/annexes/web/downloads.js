// A transcript as files, made here from what the server answered.

import { plainText, verboseJson } from "./answer.js";
import { documentOf, DOCX } from "./docx.js";

const pad = (value, digits = 2) => String(value).padStart(digits, "0");

function stamp(seconds, point) {
  const ms = Math.round(seconds * 1000);
  const [hours, minutes, rest] = [Math.floor(ms / 3600000), Math.floor(ms / 60000) % 60, ms % 60000];
  return `${pad(hours)}:${pad(minutes)}:${pad(Math.floor(rest / 1000))}${point}${pad(rest % 1000, 3)}`;
}

const line = (text) => text.trim().replace(/\s+/g, " ").replaceAll("-->", "->");
const escaped = (text) => line(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const spoken = (segments) => segments.filter(({ text }) => text.trim()); // all its words may have been deleted

const labelled = ({ speaker, text }) => line(speaker ? `${speaker}: ${text.trim()}` : text);
const voiced = ({ speaker, text }) => (speaker ? `<v ${escaped(speaker)}>${escaped(text)}</v>` : escaped(text));

/** A cell that begins as a formula does would be one in a table. */
const cell = (text) => `"${text.replace(/^[=+@-]/, "'$&").replaceAll('"', '""')}"`;
const row = ({ start, end, speaker, text }) => [start.toFixed(3), end.toFixed(3), cell(speaker || ""), cell(line(text))].join(",");

const cue = (segment, point, text) =>
  `${stamp(segment.start, point)} --> ${stamp(segment.end, point)}\n${text}\n\n`;

export const FORMATS = {
  txt: { label: "Text", type: "text/plain", render: (answer) => `${plainText(answer)}\n` },
  srt: {
    label: "Subtitles",
    type: "application/x-subrip",
    render: ({ segments }) => spoken(segments).map((s, i) => `${i + 1}\n${cue(s, ",", labelled(s))}`).join(""),
  },
  vtt: {
    label: "Web subtitles",
    type: "text/vtt",
    render: ({ segments }) => `WEBVTT\n\n${spoken(segments).map((s) => cue(s, ".", voiced(s))).join("")}`,
  },
  csv: { // its first letter says UTF-8 to Excel
    label: "Table",
    type: "text/csv",
    render: ({ segments }) => ["\ufeffstart,end,speaker,text", ...spoken(segments).map(row)].join("\r\n") + "\r\n",
  },
  docx: { label: "Document", type: DOCX, render: documentOf },
  json: {
    label: "All details",
    type: "application/json",
    render: (answer) => `${JSON.stringify(verboseJson(answer), null, 2)}\n`,
  },
};

const stemOf = (name) => name.replace(/\.[^.]+$/, "");

export function download(answer, format, name) {
  const { type, render } = FORMATS[format];
  save(new Blob([render(answer)], { type }), `${stemOf(name)}.${format}`);
}

/** In each format: [name, text or bytes]. */
export const filesOf = (answer, name) =>
  Object.entries(FORMATS).map(([format, { render }]) => [`${stemOf(name)}.${format}`, render(answer)]);

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
