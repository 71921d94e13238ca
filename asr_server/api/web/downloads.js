// A transcript as files, made here from what the server answered.

import { plainText, verboseJson } from "./answer.js";

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
  json: {
    label: "All details",
    type: "application/json",
    render: (answer) => `${JSON.stringify(verboseJson(answer), null, 2)}\n`,
  },
};

export function download(answer, format, fileName) {
  const { type, render } = FORMATS[format];
  const url = URL.createObjectURL(new Blob([render(answer)], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${fileName.replace(/\.[^.]+$/, "")}.${format}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
