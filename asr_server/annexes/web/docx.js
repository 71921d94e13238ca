// A transcript as a Word document: Office Open XML with no more than paragraphs.

import { paragraphsOf, piecesOf } from "./answer.js";
import { zipOf } from "./zip.js";

const FORMATS = "http://schemas.openxmlformats.org";
const MIME = "application/vnd.openxmlformats";
export const DOCX = `${MIME}-officedocument.wordprocessingml.document`;
const HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n';

const TYPES =
  `${HEAD}<Types xmlns="${FORMATS}/package/2006/content-types">` +
  `<Default Extension="rels" ContentType="${MIME}-package.relationships+xml"/>` +
  `<Override PartName="/word/document.xml" ContentType="${DOCX}.main+xml"/></Types>`;
const RELATIONS =
  `${HEAD}<Relationships xmlns="${FORMATS}/package/2006/relationships"><Relationship Id="document" ` +
  `Type="${FORMATS}/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"/></Relationships>`;

const escaped = (text) =>
  text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, "").replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const RIGHT_TO_LEFT = /^\P{L}*[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

const run = (text, style = "") => `<w:r>${style}<w:t xml:space="preserve">${escaped(text)}</w:t></w:r>`;

/** Its bytes: a paragraph for each turn of a speaker, and for some sentences of a long one. */
export function documentOf(answer) {
  const pieces = piecesOf(answer);
  const all = paragraphsOf(answer, pieces);
  const paragraphs = all.map(({ first, speaker, isTurn }, i) => {
    const text = pieces.slice(first, all[i + 1]?.first).map(({ gap, text, tail }) => gap + text + tail).join("").trim();
    const [bidi, rtl] = RIGHT_TO_LEFT.test(text) ? ["<w:bidi/>", "<w:rPr><w:rtl/></w:rPr>"] : ["", ""];
    const label = isTurn ? run(`${speaker}: `, "<w:rPr><w:b/></w:rPr>") : "";
    return `<w:p><w:pPr>${bidi}<w:spacing w:after="160"/></w:pPr>${label}${run(text, rtl)}</w:p>`;
  });
  const body = paragraphs.join("") || "<w:p/>";
  const text = `${HEAD}<w:document xmlns:w="${FORMATS}/wordprocessingml/2006/main"><w:body>${body}</w:body></w:document>`;
  return zipOf([["[Content_Types].xml", TYPES], ["_rels/.rels", RELATIONS], ["word/document.xml", text]]);
}
