// Draws one recording: its progress, then its text with player and downloads. Folded, it is a heading and a line.

import { speakersOf } from "./answer.js";
import { Cues } from "./cues.js";
import { $, clock, count, editInPlace, h, label, Owner, partsOf, show } from "./dom.js";
import { copy, download, save } from "./downloads.js";
import { detailsOf, factsOf, has, previewOf } from "./entry.js";
import { Replace } from "./find.js";
import { canTranslate, codeOf } from "./options.js";
import { Player } from "./player.js";
import { CLOSED } from "./store.js";
import { Transcript } from "./transcript.js";

export class Card {
  constructor(recording, cards) {
    Object.assign(this, partsOf("card-template", recording.name), { recording, cards });
    this.owner = new Owner();
    this.isFolded = false;
    this.query = "";
    this.#connect();
    this.#connectText();
    this.owner.listen(recording, "work", () => (this.frame ??= requestAnimationFrame(() => this.#drawWork())));
    this.owner.listen(recording, "state", () => this.#draw());
    this.owner.listen(recording, "kept", () => this.isFolded && recording.release());
    for (const type of ["text", "kept", "unkept"]) this.owner.listen(recording, type, () => this.drawText());
    this.owner.listen($("writing"), "change", () => this.isFolded || this.drawText()); // subtitles over a video
    this.#givePlayer();
    this.#draw();
  }

  #connect() {
    const { recording } = this;
    this.element.dataset.id = recording.id;
    this.toggle.onclick = () => (this.isFolded ? this.unfold() : this.fold());
    this.star.onclick = () => recording.mark({ isStarred: !recording.entry.isStarred });
    this.pen.onclick = () => this.#editName();
    this.menu.popoverTargetElement = this.choices;
    this.choices.onclick = ({ target }) => this.#onChoice(target.closest("button"));
    this.choices.firstElementChild.hidden = !recording.isSpoken;
    this.remove.onclick = ({ detail }) => detail < 2 && this.cards.remove(recording); // of a double click the second half meets the next card
    this.retry.onclick = () => this.cards.again(recording);
    this.anew.onclick = () => this.cards.anew(recording);
    this.copying.onclick = () => this.#copy();
    for (const type of ["wheel", "pointerdown"]) this.owner.listen(this.body, type, () => (this.isLookedAt = true)); // its text stays open
  }

  #connectText() {
    this.speakers = new Speakers(this);
    this.transcript = new Transcript(this);
    this.replace = new Replace(this);
    this.cues = new Cues(this);
    this.translating.onclick = () => this.#translate();
    this.doubts.onclick = () => this.transcript.reachDoubtful();
    this.actions.append(this.transcript.follow.back);
  }

  async #copy() {
    this.copying.textContent = (await copy(this.recording.text.answer)) ? "Copied" : "Not copied";
    setTimeout(() => (this.copying.textContent = "Copy text"), 1500);
  }

  /** As soon as there is a recording: this browser may keep it. */
  #givePlayer() {
    const { file } = this.recording;
    this.anew.hidden = !file;
    if (this.player || !file) return; // its size would be asked of the disk
    this.player = new Player(this.recording, this.owner, (...time) => this.transcript.light(...time));
    this.body.prepend(this.player.audio);
    this.bar.prepend(this.player.element);
  }

  async #translate() {
    const { recording, translating: button } = this;
    const onText = (_, until) => (button.textContent = `Translating, ${Math.round((100 * until) / recording.entry.duration)} %`);
    onText("", 0);
    button.disabled = true;
    const answer = this.cards.scheduler.translate(recording.file, onText, this.owner.signal);
    await answer.then((english) => recording.addTranslation(english), ({ message }) => show(this.error, message));
    button.textContent = "Translate into English";
    button.disabled = false;
  }

  #editName() {
    editInPlace(this.title, this.recording.name, `Name of ${this.recording.name}`, (name, key) => {
      if (name && name !== this.recording.name) this.recording.mark({ name });
      if (key) this.pen.focus();
    });
  }

  // -- Drawn from its recording --

  #draw() {
    const { recording } = this;
    this.element.classList.toggle("is-working", recording.isAtWork);
    const isRead = Boolean(recording.entry) && !recording.isAtWork;
    for (const part of [this.menu, this.actions, this.star, this.pen]) part.hidden = !isRead;
    this.toggle.disabled = !isRead;
    this.toggle.textContent = this.recording.name;
    this.#drawWork();
    this.#setFolded(isRead && (!recording.text || !(this.isLookedAt || this.cards.mayOpen(this))));
    if (this.isFolded) this.transcript.clear();
    this.drawText();
    if (recording.state === "failed" && this.player) this.player.element.hidden = !this.player.length; // nothing to hear either
  }

  /** What is done with it, for how long, and what went wrong. */
  #drawWork() {
    this.frame = cancelAnimationFrame(this.frame); // none is due any more
    const { isAtWork, state, error, heard, isRetriable } = this.recording;
    if (isAtWork) this.drawDoing();
    else if (state === "failed") this.#setFacts("not transcribed");
    this.progress.hidden = !isAtWork;
    if (this.error.textContent !== plain(error?.message)) show(this.error, error?.message); // else it is read out again
    this.retry.hidden = !isRetriable;
    if (isAtWork || state === "failed") this.transcript.hear(heard);
  }

  drawDoing() {
    const { note, since, seconds, state, share } = this.recording;
    const rest = this.recording.rest(this.player?.length); // of a length that may be known only by now
    if (state === "listening" && !rest) this.progress.removeAttribute("value"); // no one knows how far it is
    else this.progress.value = rest?.share ?? (state === "uploading" ? share : 0);
    const facts = [rest ? `listening, ${Math.ceil(rest.share * 100)} %` : note];
    if (since !== null && since !== undefined) facts.push(clock(seconds));
    if (rest?.seconds != null) facts.push(`about ${clock(Math.ceil(rest.seconds))} left`);
    this.#setFacts(...facts);
  }

  #setFacts(...facts) {
    this.facts.replaceChildren(...facts.map((fact) => h("span", {}, fact)));
  }

  drawText() {
    const { recording } = this;
    if (!recording.entry || recording.isAtWork) return;
    this.#drawHead(recording.entry);
    if (this.isFolded) return this.#showPreview();
    if (!recording.text) return;
    const { answer } = recording.text;
    this.transcript.show(recording.text);
    this.speakers.show(answer);
    this.player?.show(answer);
    this.cues.show(answer);
    this.translating.hidden = !recording.file || !canTranslate() || this.body.lang === "en";
    const numDoubtful = recording.text.pieces.filter(({ isDoubtful }) => isDoubtful).length;
    this.doubts.hidden = !numDoubtful;
    this.doubts.textContent = count(numDoubtful, "doubtful word");
    this.mark();
  }

  #drawHead(entry) {
    if (this.toggle.textContent !== entry.name) label(this.element, entry.name);
    this.toggle.textContent = entry.name;
    this.star.textContent = entry.isStarred ? "★" : "☆";
    this.star.setAttribute("aria-pressed", Boolean(entry.isStarred));
    this.#setFacts(...factsOf(entry), ...(this.recording.isUnkept ? ["not kept in this browser: download it"] : []));
    const details = detailsOf(entry).map((detail) => h("span", {}, detail));
    this.details = h("details", { open: this.details?.open }, h("summary", {}, "Details"), ...details); // behind a word
    this.facts.append(this.details);
    this.element.classList.toggle("is-unkept", this.recording.isUnkept);
    for (const choice of this.choices.querySelectorAll("[data-format^=en]")) choice.hidden = !entry.isTranslated;
    const lang = entry.task === "translate" ? "en" : codeOf(entry.language);
    if (this.body.lang !== lang) this.body.lang = this.preview.lang = lang; // it would cost the style of each word
  }

  /** What is found in the text; return how often. */
  mark() {
    this.transcript.find(this.replace.query || this.query, this.replace.isWhole);
    return this.transcript.places.length;
  }

  // -- Folded and unfolded --

  get isInUse() {
    return this.body.contains(document.activeElement) || this.player?.isPlaying;
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
    this.drawText();
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
    if (!text) show(this.error, `The text cannot be read from this browser: ${why}.`);
    return text;
  }

  /** Of the formats of a text, or the sound of what one spoke, which nobody else has. */
  async #onChoice(button) {
    if (!button) return;
    this.choices.hidePopover();
    const text = await this.#load();
    const { format } = button.dataset;
    if (format !== "wav") text && download(text.answer, format, this.recording.name);
    else if (this.recording.file) save(this.recording.file, `${this.recording.name}.wav`);
    else show(this.error, "This browser has not kept the sound.");
    if (this.isFolded) this.recording.release();
  }

  // -- Being searched --

  /** Whether it has `query`, in lower case; shows where. */
  find(query) {
    const { entry } = this.recording;
    const isOther = query !== this.query;
    this.query = query;
    if (isOther && this.isFolded) this.#showPreview();
    else if (isOther) this.mark();
    return !query || has(entry || { name: this.recording.name, text: "" }, query);
  }

  #showPreview() {
    this.preview.replaceChildren(...previewOf(this.recording.entry, this.query));
  }

  close() {
    this.owner.abort();
    this.element.remove();
  }
}

/** The people of a transcript, each with a colour, a name that can be changed, and how long they speak. */
class Speakers {
  constructor(card) {
    Object.assign(this, { element: card.people, recording: card.recording });
  }

  show(answer) {
    const people = speakersOf(answer);
    const shown = JSON.stringify(people);
    if (shown === this.shown || this.element.querySelector("input")) return; // a name is being written
    this.shown = shown;
    this.element.replaceChildren(...people.map((person) => this.#item(person)));
    this.element.hidden = !people.length;
  }

  #item({ name, seconds, color }) {
    const { element, button, person, time } = partsOf("speaker-template");
    [person.textContent, time.textContent] = [name, clock(seconds)];
    element.style = `--speaker: var(--${color})`;
    element.dataset.name = name;
    button.onclick = () => this.edit(element, name);
    return element;
  }

  /** A field in the place of a name, here or in the text. */
  edit(element, name) {
    editInPlace(element, name, `Name of speaker ${name}`, (to, isByKey) => {
      if (to && to !== name) this.#rename(name, to);
      if (!isByKey) return;
      const button = this.element.querySelector(`[data-name="${CSS.escape(to || name)}"] button`);
      button?.focus({ preventScroll: true }); // one may be reading further down
    });
  }

  #rename(from, to) {
    const isTaken = speakersOf(this.recording.text.answer).some(({ name }) => name === to);
    if (isTaken && !confirm(`Are ${from} and ${to} the same person?`)) return;
    this.recording.edit([{ from, to }]);
  }
}

const plain = (text = "") => text.replaceAll("`", "");
