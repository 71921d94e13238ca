// One recording: its progress, then its text with player and downloads. Folded, it is a heading and a line.

import { plainText, rename, speakersOf } from "./answer.js";
import { transcribe } from "./api.js";
import { h, show } from "./dom.js";
import { download, FORMATS } from "./downloads.js";
import { describe, entryOf, factsOf, has, previewOf } from "./entry.js";
import { menu } from "./menu.js";
import { Player } from "./player.js";
import { Speakers } from "./speakers.js";
import { Transcript } from "./transcript.js";
import { Work } from "./work.js";

const inMebibytes = (bytes) => `${Number((bytes / 2 ** 20).toFixed(1))} MiB`;
const tooLarge = (bytes, most) =>
  `This file has ${inMebibytes(bytes)}, and the server takes ${inMebibytes(most)} at most. As mp3, m4a or opus it is smaller.`;

class Refusal extends Error {
  status = 400;
}

export class Card {
  /**
   * Of a `file`, or of an `entry` of the history. `on.done(card)` when there is a text, `on.change(card)` when one
   * was corrected, `on.remove(card)`, `on.retry(card)`, `on.load(card)` for an answer that the history has.
   */
  constructor({ name, file = null, entry = null }, on) {
    [this.name, this.file, this.entry, this.on] = [name, file, entry, on];
    this.answer = null;
    this.isFolded = false;
    this.abort = new AbortController();
    this.#build();
    this.ready = this.player?.ready;
    if (entry) this.#settle();
  }

  #build() {
    this.toggle = h("button", { type: "button", className: "fold", disabled: true, "aria-expanded": "true" }, this.name);
    this.toggle.onclick = () => (this.isFolded ? this.unfold() : this.fold());
    this.facts = h("p", { className: "facts" }, h("span", {}, "waiting"));
    this.menu = menu("Download", this.name, Object.entries(FORMATS).map(([format, { label }]) => [label, `.${format}`, () => this.#download(format)]));
    this.menu.hidden = true;
    this.remove = h("button", { type: "button", className: "icon small quiet", "aria-label": `Delete ${this.name}`, title: "Delete" }, "✕");
    this.remove.onclick = () => this.on.remove(this);
    const title = h("div", { className: "card-title" }, h("h2", {}, this.toggle), this.facts);
    const head = h("div", { className: "card-head" }, title, this.menu, this.remove);
    this.preview = h("p", { className: "preview", hidden: true });
    this.work = new Work(this.name, { onDoing: (...facts) => this.#setFacts(...facts), onRetry: () => this.on.retry(this) });
    this.body = h("div", { className: "card-body" }, ...this.#bodyParts());
    this.element = h("li", { className: "card is-working" }, head, this.preview, ...this.work.elements, this.body);
  }

  #bodyParts() {
    const text = h("div", { className: "transcript" });
    this.speakers = new Speakers((from, to) => this.#rename(from, to));
    this.transcript = new Transcript(text, {
      seek: (time) => this.player?.seek(time),
      change: () => this.#onCorrection(),
      rename: (label, name) => this.speakers.edit(label, name),
    });
    this.player = this.file?.size ? new Player(this.file, this.name, (time) => this.transcript.light(time)) : null;
    const edit = h("button", { type: "button", className: "small", "aria-pressed": "false" }, "Correct words");
    edit.onclick = () => edit.setAttribute("aria-pressed", text.classList.toggle("is-editing"));
    const copy = h("button", { type: "button", className: "small" }, "Copy text");
    copy.onclick = async () => {
      await navigator.clipboard.writeText(plainText(this.answer));
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy text"), 1500);
    };
    this.actions = h("div", { className: "row actions", hidden: true }, copy, edit);
    return [this.player?.element, this.speakers.element, text, this.actions];
  }

  // -- Being transcribed --

  async run(options, maxUploadBytes) {
    this.transcript.clear();
    this.element.classList.add("is-working");
    this.work.begin();
    try {
      if (!this.file.size) throw new Refusal("This file is empty.");
      if (this.file.size > maxUploadBytes) throw new Refusal(tooLarge(this.file.size, maxUploadBytes));
      const answer = await transcribe(this.file, options, this.#listeners(), this.abort.signal);
      this.finish({ ...answer, task: options.task }, this.work.seconds);
      return true;
    } catch (error) {
      this.#fail(error);
      return false;
    }
  }

  #listeners() {
    return {
      upload: (share) => this.work.upload(share),
      delta: (text) => this.transcript.append(text),
      wait: (seconds) => this.work.say(`the server is busy; asking again in ${seconds} s`),
    };
  }

  #fail(error) {
    this.element.classList.remove("is-working");
    this.#setFacts("not transcribed");
    if (this.player) this.player.element.hidden = !this.player.picture; // nothing to hear either
    this.work.fail(error);
  }

  /** `took`: seconds from start to end, if that says anything. */
  finish(answer, took = null) {
    this.answer = answer;
    this.entry = entryOf(this.name, answer, took);
    this.#settle();
    this.on.done(this);
  }

  /** There is a text: folded until it is unfolded. */
  #settle() {
    this.element.classList.remove("is-working");
    this.work.end();
    this.#setFacts(...factsOf(this.entry));
    this.menu.hidden = this.actions.hidden = this.toggle.disabled = false;
    this.fold();
  }

  #setFacts(...facts) {
    this.facts.replaceChildren(...facts.map((fact) => h("span", {}, fact)));
  }

  // -- Folded and unfolded --

  fold() {
    this.#setFolded(true);
    this.player?.audio.pause();
    this.transcript.clear();
    if (this.entry.id) this.#release();
    this.#showPreview("");
  }

  async unfold() {
    if (!(await this.load())) return;
    this.#setFolded(false);
    this.#showAnswer();
  }

  #showAnswer() {
    this.transcript.finish(this.answer);
    this.speakers.show(this.answer);
    this.player?.show(this.answer);
    this.transcript.find(this.query);
  }

  #setFolded(isFolded) {
    this.isFolded = isFolded;
    this.body.hidden = isFolded;
    this.preview.hidden = !isFolded;
    this.toggle.setAttribute("aria-expanded", !isFolded);
  }

  /** The answer; null, and said so, where it is not kept any more. */
  async load() {
    this.answer ??= await this.on.load(this);
    if (!this.answer) show(this.work.error, "This browser does not have the text any more: it was deleted in another tab.");
    return this.answer;
  }

  /** The history has it: an hour of words takes megabytes. */
  #release() {
    this.answer = null;
    if (this.player) this.player.answer = null;
  }

  async #download(format) {
    if (await this.load()) download(this.answer, format, this.name);
    if (this.isFolded && this.entry.id) this.#release();
  }

  #onCorrection() {
    describe(this.entry, this.answer);
    this.#setFacts(...factsOf(this.entry));
    this.on.change(this);
  }

  #rename(from, to) {
    const isTaken = speakersOf(this.answer).some(({ name }) => name === to);
    if (isTaken && !confirm(`Are ${from} and ${to} the same person? Their lines cannot be told apart again.`)) return;
    rename(this.answer, from, to);
    this.#showAnswer();
    this.#onCorrection();
  }

  // -- Being searched --

  /** Whether it has `query`, in lower case; shows where. */
  find(query) {
    this.query = query;
    if (!this.entry) return this.name.toLowerCase().includes(query);
    if (this.isFolded) this.#showPreview(query);
    else this.transcript.find(query);
    return has(this.entry, query);
  }

  #showPreview(query) {
    this.preview.replaceChildren(...previewOf(this.entry, query));
  }

  close() {
    this.abort.abort();
    this.player?.close();
  }
}
