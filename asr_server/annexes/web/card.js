// Draws one recording: its progress, then its text with player and downloads. Folded, it is a heading and a line.

import { plainText, speakersOf } from "./answer.js";
import { copy } from "./clipboard.js";
import { count, h, onceAFrame, show } from "./dom.js";
import { download, FORMATS, save } from "./downloads.js";
import { detailsOf, factsOf, has, previewOf } from "./entry.js";
import { placesOf, replaced } from "./find.js";
import { menu } from "./menu.js";
import { codeOf } from "./options.js";
import { Owner } from "./owner.js";
import { Player } from "./player.js";
import { Replace } from "./replace.js";
import { Speakers } from "./speakers.js";
import { CLOSED } from "./store.js";
import { Transcript } from "./transcript.js";
import { Work } from "./work.js";

export class Card {
  /**
   * `on.remove(card, event)`, `on.again(card)`, `on.anew(card)` in another card; `on.mayOpen(card)`: whether it shows
   * its text when it comes.
   */
  constructor(recording, on) {
    [this.recording, this.on] = [recording, on];
    this.owner = new Owner();
    this.isFolded = false;
    this.query = "";
    this.#build();
    this.owner.listen(recording, "work", onceAFrame(() => this.owner.isClosed || this.#drawWork()));
    this.owner.listen(recording, "state", () => this.#draw());
    this.owner.listen(recording, "text", () => this.#drawText());
    this.owner.listen(recording, "kept", () => this.isFolded && recording.release());
    for (const type of ["kept", "unkept"]) this.owner.listen(recording, type, () => this.#drawText());
    this.#draw();
  }

  get name() {
    return this.recording.name;
  }

  #build() {
    const { name } = this;
    this.toggle = h("button", { type: "button", className: "fold", dir: "auto" }, name);
    this.toggle.onclick = () => (this.isFolded ? this.unfold() : this.fold());
    const texts = Object.entries(FORMATS).map(([format, { label }]) => [label, `.${format}`, () => this.#download(format)]);
    const sound = this.recording.isSpoken ? [["Sound", ".wav", () => this.#downloadSound()]] : [];
    this.menu = menu("Download", name, [...texts, ...sound]);
    this.remove = h("button", { type: "button", className: "icon small quiet", "aria-label": `Delete ${name}`, title: "Delete" }, "✕");
    this.remove.onclick = (event) => this.on.remove(this, event);
    this.work = new Work(this.recording, this.owner, () => this.on.again(this), () => this.player?.length);
    const title = h("div", { className: "card-title" }, h("h2", {}, this.toggle), this.work.facts);
    const head = h("div", { className: "card-head" }, title, this.menu, this.remove);
    this.preview = h("p", { className: "preview", dir: "auto", hidden: true });
    this.body = h("div", { className: "card-body" }, ...this.#bodyParts());
    this.element = h("li", { className: "card", "data-id": this.recording.id }, head, this.preview, ...this.work.elements, this.body);
    for (const type of ["wheel", "pointerdown"]) this.owner.listen(this.body, type, () => (this.isLookedAt = true)); // its text stays open
    this.#givePlayer();
  }

  #bodyParts() {
    const { recording } = this;
    const text = h("div", { className: "transcript", dir: "auto" });
    this.speakers = new Speakers((from, to) => this.#rename(from, to));
    this.bar = h("div", { className: "bar" });
    this.transcript = new Transcript(text, this.bar, this.owner, {
      seek: (time) => this.player?.seek(time),
      correct: (index, word) => recording.correct(index, word),
      rename: (label, name) => this.speakers.edit(label, name),
      give: (segments, name) => recording.give(segments, name),
      closed: () => this.#drawText(),
    });
    this.replace = new Replace({
      find: () => this.#mark(),
      count: () => this.#places().length,
      replace: (by, isOne) => this.#replace(by, isOne),
    });
    this.doubts = h("button", { type: "button", className: "small", title: "Go to the next one", hidden: true });
    this.doubts.onclick = () => this.transcript.reachDoubtful();
    const { back } = this.transcript.follow;
    this.actions = h("div", { className: "row actions" }, this.#copyButton(), this.#editButton(text), this.replace.button, this.doubts, this.#anewButton(), back);
    this.bar.append(this.actions, this.replace.element);
    return [this.bar, this.speakers.element, text, this.transcript.reached];
  }

  #copyButton() {
    const button = h("button", { type: "button", className: "small" }, "Copy text");
    button.onclick = async () => {
      button.textContent = (await copy(plainText(this.recording.text.answer))) ? "Copied" : "Not copied";
      setTimeout(() => (button.textContent = "Copy text"), 1500);
    };
    return button;
  }

  /** With what is chosen by now: another language, speakers, words to expect. */
  #anewButton() {
    this.anew = h("button", { type: "button", className: "small", title: "With what is chosen above now" }, "Transcribe again");
    this.anew.onclick = () => this.on.anew(this);
    return this.anew;
  }

  /** As soon as there is a recording: this browser may keep it. */
  #givePlayer() {
    const { file } = this.recording;
    this.anew.hidden = !file;
    if (this.player || !file) return; // its size would be asked of the disk
    this.player = new Player(file, this.name, this.owner, (...time) => this.transcript.light(...time));
    this.body.prepend(this.player.audio);
    this.bar.prepend(this.player.element);
  }

  #editButton(text) {
    const button = h("button", { type: "button", className: "small", "aria-pressed": "false" }, "Correct words");
    button.onclick = () => button.setAttribute("aria-pressed", text.classList.toggle("is-editing"));
    return button;
  }

  // -- Drawn from its recording --

  #draw() {
    const { recording } = this;
    this.element.classList.toggle("is-working", recording.isAtWork);
    const isRead = Boolean(recording.entry) && !recording.isAtWork;
    this.menu.hidden = this.actions.hidden = !isRead;
    this.toggle.disabled = !isRead;
    this.#drawWork();
    this.#setFolded(isRead && (!recording.text || !(this.isLookedAt || this.on.mayOpen(this))));
    if (this.isFolded) this.transcript.clear();
    this.#drawText();
    if (recording.state === "failed" && this.player) this.player.element.hidden = !this.player.picture; // nothing to hear either
  }

  #drawWork() {
    const { recording } = this;
    this.work.draw();
    if (recording.isAtWork || recording.state === "failed") this.transcript.hear(recording.heard);
  }

  #drawText() {
    const { recording } = this;
    if (!recording.entry || recording.isAtWork) return;
    this.work.setFacts(...factsOf(recording.entry), ...(recording.isUnkept ? ["not kept in this browser: download it"] : []));
    this.work.setDetails(...detailsOf(recording.entry));
    this.element.classList.toggle("is-unkept", recording.isUnkept);
    const { task, language } = recording.entry;
    this.body.lang = this.preview.lang = task === "translate" ? "en" : codeOf(language);
    if (this.isFolded) return this.#showPreview();
    if (!recording.text) return;
    const { answer } = recording.text;
    this.transcript.show(recording.text);
    this.speakers.show(answer);
    this.player?.show(answer);
    const numDoubtful = recording.text.pieces.filter(({ isDoubtful }) => isDoubtful).length;
    this.doubts.hidden = !numDoubtful;
    this.doubts.textContent = count(numDoubtful, "doubtful word");
    this.#mark();
  }

  #places() {
    return placesOf(this.transcript.pieces, this.replace.query, this.replace.whole.checked);
  }

  /** All places, or the one that was reached; then the next is. Return how many. */
  #replace(by, isOne) {
    const { cursor, pieces } = this.transcript;
    const all = this.#places();
    const places = isOne ? all.filter(({ first }) => first === cursor) : all;
    this.recording.replace(replaced(pieces, places, by));
    if (isOne) this.transcript.reach((all.find(({ first }) => first > cursor) || all[0]).first);
    return places.length;
  }

  #mark() {
    this.transcript.find(this.replace.query || this.query, Boolean(this.replace.query) && this.replace.whole.checked);
  }

  // -- Folded and unfolded --

  /** Nothing that plays, has the focus or is written in. */
  get isInUse() {
    const isFocused = this.body.contains(document.activeElement);
    return isFocused || this.player?.isPlaying || this.transcript.isBeingEdited;
  }

  fold() {
    this.isLookedAt = false;
    this.#setFolded(true);
    this.player?.rest();
    this.player?.show(null);
    this.transcript.clear();
    this.recording.release();
    this.#showPreview();
  }

  async unfold() {
    if (!(await this.#load())) return;
    this.#givePlayer();
    this.#setFolded(false);
    this.#drawWork(); // with its sound it can be tried again
    this.#drawText();
  }

  #setFolded(isFolded) {
    this.isFolded = isFolded;
    // Chrome's form filling looks at all fields of a page, hidden ones too: 0.5 s for 500 transcripts.
    if (isFolded) this.body.remove();
    else if (!this.body.parentNode) this.element.append(this.body); // what plays in it would stop
    this.preview.hidden = !isFolded;
    this.toggle.setAttribute("aria-expanded", !isFolded);
  }

  async #load() {
    const text = await this.recording.load();
    const why = this.recording.store.state === "open" ? "it was deleted in another tab" : CLOSED;
    if (!text) show(this.work.error, `The text cannot be read from this browser: ${why}.`);
    return text;
  }

  async #download(format) {
    const text = await this.#load();
    if (text) download(text.answer, format, this.name);
    if (this.isFolded) this.recording.release();
  }

  /** Of what one spoke: nobody else has it. */
  async #downloadSound() {
    await this.#load();
    if (this.recording.file) save(this.recording.file, `${this.name}.wav`);
    else show(this.work.error, "This browser has not kept the sound.");
  }

  #rename(from, to) {
    const isTaken = speakersOf(this.recording.text.answer).some(({ name }) => name === to);
    if (isTaken && !confirm(`Are ${from} and ${to} the same person?`)) return;
    this.recording.rename(from, to);
  }

  // -- Being searched --

  /** Whether it has `query`, in lower case; shows where. */
  find(query) {
    const { entry } = this.recording;
    const isOther = query !== this.query;
    this.query = query;
    if (isOther && this.isFolded) this.#showPreview();
    else if (isOther) this.#mark();
    return !query || has(entry || { name: this.name, text: "" }, query);
  }

  #showPreview() {
    this.preview.replaceChildren(...previewOf(this.recording.entry, this.query));
  }

  close() {
    this.owner.close();
    this.element.remove();
  }
}
