// A transcript as files, made here from what the server answered.

const pad = (value, digits = 2) => String(value).padStart(digits, "0");

function stamp(seconds, point) {
  const ms = Math.round(seconds * 1000);
  const [hours, minutes, rest] = [Math.floor(ms / 3600000), Math.floor(ms / 60000) % 60, ms % 60000];
  return `${pad(hours)}:${pad(minutes)}:${pad(Math.floor(rest / 1000))}${point}${pad(rest % 1000, 3)}`;
}

const line = (text) => text.trim().replace(/\s+/g, " ").replaceAll("-->", "->");
const escaped = (text) => line(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const cue = (segment, point, text) =>
  `${stamp(segment.start, point)} --> ${stamp(segment.end, point)}\n${text}\n\n`;

export const FORMATS = {
  txt: { type: "text/plain", render: (answer) => `${answer.text}\n` },
  srt: {
    type: "application/x-subrip",
    render: ({ segments }) => segments.map((s, i) => `${i + 1}\n${cue(s, ",", line(s.text))}`).join(""),
  },
  vtt: {
    type: "text/vtt",
    render: ({ segments }) => `WEBVTT\n\n${segments.map((s) => cue(s, ".", escaped(s.text))).join("")}`,
  },
  json: { type: "application/json", render: (answer) => JSON.stringify(answer, null, 2) },
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
