// A transcript as files and as a copied text, made here from what the server answered.

import { plainText, verboseJson, writtenParagraphs } from "./answer.js";
import { h, pad } from "./dom.js";
import { subtitleLayout, writesTimes } from "./options.js";
import { cuesOf } from "./subtitles.js";
import { zipOf } from "./zip.js";

/** `00:01:02.345`. */
export function stamp(seconds, point) {
  const ms = Math.round(seconds * 1000);
  const [hours, minutes, rest] = [Math.floor(ms / 3600000), Math.floor(ms / 60000) % 60, ms % 60000];
  return `${pad(hours)}:${pad(minutes)}:${pad(Math.floor(rest / 1000))}${point}${pad(rest % 1000, 3)}`;
}

const line = (text) => text.trim().replace(/\s+/g, " ").replaceAll("-->", "->");
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const linesOf = ({ lines }) => lines.map(line).join("\n");
const labelled = (cue) => (cue.speaker ? `${line(cue.speaker)}: ` : "") + linesOf(cue);
const voiced = (cue) => (cue.speaker ? `<v ${escaped(line(cue.speaker))}>${escaped(linesOf(cue))}</v>` : escaped(linesOf(cue)));

/** A cell that begins as a formula does would be one in a table. */
const cell = (text) => `"${text.replace(/^[=+@-]/, "'$&").replaceAll('"', '""')}"`;
const row = ({ start, end, speaker, text }) => [start.toFixed(3), end.toFixed(3), cell(speaker || ""), cell(line(text))].join(",");

const cue = ({ start, end }, point, text) => `${stamp(start, point)} --> ${stamp(end, point)}\n${text}\n\n`;

const srt = (answer) => cuesOf(answer, subtitleLayout(), true).map((each, i) => `${i + 1}\n${cue(each, ",", labelled(each))}`).join("");
const vtt = (answer) => `WEBVTT\n\n${cuesOf(answer, subtitleLayout()).map((each) => cue(each, ".", voiced(each))).join("")}`;
export const captionsOf = (answer) => cuesOf(answer, subtitleLayout()).map((each) => new VTTCue(each.start, each.end, voiced(each)));
const spoken = ({ segments }) => segments.filter(({ text }) => text.trim()); // all its words may have been deleted

export const FORMATS = {
  txt: { type: "text/plain", render: (answer) => `${textOf(answer)}\n` },
  srt: { type: "application/x-subrip", render: srt },
  vtt: { type: "text/vtt", render: vtt },
  "en.srt": { type: "application/x-subrip", render: ({ translation }) => translation && srt(translation) },
  "en.vtt": { type: "text/vtt", render: ({ translation }) => translation && vtt(translation) },
  // Its first letter says UTF-8 to Excel
  csv: { type: "text/csv", render: (answer) => ["\ufeffstart,end,speaker,text", ...spoken(answer).map(row), ""].join("\r\n") },
  docx: { type: "", render: (answer) => documentOf(answer, writesTimes()) },
  json: { type: "application/json", render: (answer) => `${JSON.stringify(verboseJson(answer), null, 2)}\n` },
};

// -- As a Word document: Office Open XML with no more than paragraphs --

const SCHEMAS = "http://schemas.openxmlformats.org";
const MIME = "application/vnd.openxmlformats";
const DOCX = `${MIME}-officedocument.wordprocessingml.document`;
const HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n';

const TYPES =
  `${HEAD}<Types xmlns="${SCHEMAS}/package/2006/content-types">` +
  `<Default Extension="rels" ContentType="${MIME}-package.relationships+xml"/>` +
  `<Override PartName="/word/document.xml" ContentType="${DOCX}.main+xml"/></Types>`;
const RELATIONS =
  `${HEAD}<Relationships xmlns="${SCHEMAS}/package/2006/relationships"><Relationship Id="document" ` +
  `Type="${SCHEMAS}/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"/></Relationships>`;

const xmlOf = (text) => escaped(text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, ""));

const RIGHT_TO_LEFT = /^\P{L}*[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

const run = (text, style = "") => `<w:r>${style}<w:t xml:space="preserve">${xmlOf(text)}</w:t></w:r>`;

/** A paragraph for each turn of a speaker, and for some sentences of a long one. */
function documentOf(answer, withTimes = false) {
  const paragraphs = writtenParagraphs(answer).map(({ speaker, isTurn, at, text }) => {
    const [bidi, rtl] = RIGHT_TO_LEFT.test(text) ? ["<w:bidi/>", "<w:rPr><w:rtl/></w:rPr>"] : ["", ""];
    const start = (withTimes ? `[${at}] ` : "") + (isTurn ? `${speaker}: ` : "");
    const label = start && run(start, "<w:rPr><w:b/></w:rPr>");
    return `<w:p><w:pPr>${bidi}<w:spacing w:after="160"/></w:pPr>${label}${run(text, rtl)}</w:p>`;
  });
  const body = paragraphs.join("") || "<w:p/>";
  const text = `${HEAD}<w:document xmlns:w="${SCHEMAS}/wordprocessingml/2006/main"><w:body>${body}</w:body></w:document>`;
  return zipOf([["[Content_Types].xml", TYPES], ["_rels/.rels", RELATIONS], ["word/document.xml", text]], DOCX);
}

// -- Saved and copied --

const textOf = (answer) => plainText(answer, writesTimes());

const stemOf = (name) => name.replace(/\.[^.]+$/, "");

export async function download(answer, format, name) {
  const { type, render } = FORMATS[format];
  const content = await render(answer);
  save(new Blob([content], { type: content.type || type }), `${stemOf(name)}.${format}`);
}

/** In each format that it has: [name, text or blob]. */
export async function filesOf(answer, name) {
  const files = Object.entries(FORMATS).map(async ([format, { render }]) => [`${stemOf(name)}.${format}`, await render(answer)]);
  return (await Promise.all(files)).filter(([, content]) => content !== undefined);
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Whether it was copied. */
export async function copy(answer) {
  try {
    await navigator.clipboard.writeText(textOf(answer));
    return true;
  } catch {
    return copySelected(textOf(answer));
  }
}

/** Also where the page has no https, and so no clipboard of the browser's. */
function copySelected(text) {
  const focused = document.activeElement;
  const field = h("textarea", { className: "visually-hidden", value: text, readOnly: true });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}
