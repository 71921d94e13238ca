// One recording: its progress, then its text with player and downloads. Folded, it is a heading and a line.

import { transcribe } from "./api.js";
import { clock, h, show } from "./dom.js";
import { download, FORMATS } from "./downloads.js";
import { menu } from "./menu.js";
import { Player } from "./player.js";
import { Transcript } from "./transcript.js";

const PREVIEW = 160; // characters
const FUTILE = new Set([400, 413, 415]); // the same file would get the same answer

const inMebibytes = (bytes) => `${Number((bytes / 2 ** 20).toFixed(1))} MiB`;
const tooLarge = (bytes, most) =>
  `This file has ${inMebibytes(bytes)}, and the server takes ${inMebibytes(most)} at most. As mp3, m4a or opus it is smaller.`;

const dateOf = (time) => new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

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
    this.progress = h("progress", { max: 1, value: 0, "aria-label": `Progress of ${this.name}` });
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    this.retry = h("button", { type: "button", className: "small retry", hidden: true }, "Try again");
    this.retry.onclick = () => this.on.retry(this);
    this.body = h("div", { className: "card-body" }, ...this.#bodyParts());
    this.element = h("li", { className: "card is-working" }, head, this.preview, this.progress, this.error, this.retry, this.body);
  }

  #bodyParts() {
    const text = h("div", { className: "transcript" });
    this.transcript = new Transcript(text, { seek: (time) => this.player?.seek(time), change: () => this.#onCorrection() });
    this.player = this.file?.size ? new Player(this.file, this.name, (time) => this.transcript.light(time)) : null;
    const edit = h("button", { type: "button", className: "small", "aria-pressed": "false" }, "Correct words");
    edit.onclick = () => edit.setAttribute("aria-pressed", text.classList.toggle("is-editing"));
    const copy = h("button", { type: "button", className: "small" }, "Copy text");
    copy.onclick = async () => {
      await navigator.clipboard.writeText(this.answer.text);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy text"), 1500);
    };
    this.actions = h("div", { className: "row actions", hidden: true }, copy, edit);
    return [this.player?.element, text, this.actions];
  }

  // -- Being transcribed --

  async run(options, maxUploadBytes) {
    this.#begin();
    try {
      if (!this.file.size) throw new Refusal("This file is empty.");
      if (this.file.size > maxUploadBytes) throw new Refusal(tooLarge(this.file.size, maxUploadBytes));
      const answer = await transcribe(this.file, options, this.#listeners(), this.abort.signal);
      const took = (performance.now() - this.startedAt) / 1000;
      this.finish({ ...answer, task: options.task }, took);
      return true;
    } catch (error) {
      this.#fail(error);
      return false;
    } finally {
      clearInterval(this.timer);
    }
  }

  #begin() {
    this.startedAt = performance.now();
    this.transcript.clear();
    show(this.error, "");
    this.retry.hidden = true;
    this.progress.hidden = false;
    this.element.classList.add("is-working");
    this.doing = "waiting";
    this.timer = setInterval(() => this.#showDoing(), 1000);
  }

  #showDoing(doing = this.doing) {
    this.doing = doing;
    this.#setFacts(doing, clock((performance.now() - this.startedAt) / 1000));
  }

  #listeners() {
    return {
      upload: (share) => {
        if (share < 1) this.progress.value = share;
        else this.progress.removeAttribute("value"); // no one knows how far it is
        this.#showDoing(share < 1 ? `uploading, ${Math.round(share * 100)} %` : "listening …");
      },
      delta: (text) => this.transcript.append(text),
      wait: (seconds) => this.#showDoing(`the server is busy; asking again in ${seconds} s`),
    };
  }

  #fail(error) {
    this.#end();
    this.#setFacts("not transcribed");
    if (this.player) this.player.element.hidden = !this.player.picture; // nothing to hear either
    show(this.error, error.message);
    this.retry.hidden = FUTILE.has(error.status);
  }

  /** `took`: seconds from start to end, if that says anything. */
  finish(answer, took = null) {
    const { duration, language, text, task } = answer;
    this.answer = answer;
    this.entry = { name: this.name, createdAt: Date.now(), duration, language, task, took, text };
    this.#settle();
    this.on.done(this);
  }

  #end() {
    this.element.classList.remove("is-working");
    this.progress.hidden = true;
  }

  /** There is a text: folded until it is unfolded. */
  #settle() {
    const { duration, language, took, task, createdAt } = this.entry;
    const spoken = language && language !== "unknown" ? language.charAt(0).toUpperCase() + language.slice(1) : "";
    const speed = took && `${Math.max(1, Math.round(duration / took))} × real time`;
    const pace = took && (took < 60 ? `in ${took.toFixed(1)} s` : `in ${clock(took)}`);
    const kind = task === "translate" ? "translated into English" : spoken;
    this.#end();
    this.#setFacts(...[clock(duration), kind, pace, speed, dateOf(createdAt)].filter(Boolean));
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
    this.showPreview("");
  }

  async unfold() {
    if (!(await this.load())) return;
    this.#setFolded(false);
    this.transcript.finish(this.answer);
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
    if (!this.answer) show(this.error, "This browser does not have the text any more: it was deleted in another tab.");
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
    this.entry.text = this.answer.text;
    this.on.change(this);
  }

  // -- Being searched --

  /** Whether it has `query`, in lower case; shows where. */
  find(query) {
    this.query = query;
    if (!this.entry) return !query || this.name.toLowerCase().includes(query);
    const at = this.entry.text.toLowerCase().indexOf(query);
    if (this.isFolded) this.showPreview(query, at);
    else this.transcript.find(query);
    return at >= 0 || this.name.toLowerCase().includes(query);
  }

  showPreview(query, at = 0) {
    const text = this.entry.text;
    const from = Math.max(0, at - PREVIEW / 4);
    const isHit = query && at >= 0;
    const [before, hit] = isHit ? [text.slice(from, at), text.slice(at, at + query.length)] : ["", ""];
    const rest = text.slice(isHit ? at + query.length : 0).slice(0, PREVIEW);
    const mark = isHit ? h("mark", {}, hit) : null;
    this.preview.replaceChildren(...[from && isHit ? "… " : "", before, mark, rest || (isHit ? "" : "Nothing was said.")].filter(Boolean));
  }

  close() {
    this.abort.abort();
    this.player?.close();
  }
}
