// The list of recordings: those of this visit and those that the store has, with a search over them.

import { Card } from "./card.js";
import { $, count, inSlices, lower, show } from "./dom.js";
import { filesOf, save } from "./downloads.js";
import { chosenOptions, keepChoices } from "./options.js";
import { Recording } from "./recording.js";
import { takeUp } from "./sounds.js";
import { Store } from "./store.js";
import { withOwnNames, zipOf } from "./zip.js";

const KEPT = "Texts, corrections and the sound of what you speak are kept in this browser and nowhere else, the newest 500 of them.";
const NOT_KEPT = "This browser keeps nothing for this page: transcripts are gone when it is closed.";
const MAX_REMOVED = 20; // that can be put back

/** Of recordings, by what is chosen; those of a kind stand from the newest on. */
const ORDERS = {
  newest: (a, b) => b.order - a.order,
  oldest: (a, b) => a.order - b.order,
  name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
  longest: (a, b) => (b.entry?.duration || 0) - (a.entry?.duration || 0),
  starred: (a, b) => Boolean(b.entry?.isStarred) - Boolean(a.entry?.isStarred),
};
const compare = (a, b) => ORDERS[$("sort").value](a, b) || ORDERS.newest(a, b);

export class Cards {
  constructor(scheduler) {
    this.scheduler = scheduler;
    this.store = new Store();
    this.cards = [];
    this.unshown = new Map(); // entries of the store by id, until each has its card
    this.top = 0; // orders below are given
    this.removed = []; // recordings, the last one last
    this.removing = new Set(); // ids that the store still has
    this.store.addEventListener("changed", ({ detail }) => this.#onStored(detail.id));
    this.store.addEventListener("removed", ({ detail }) => this.#onGone(detail.ids));
    this.store.addEventListener("state", () => this.#showKept());
    $("search").oninput = () => this.#search();
    $("sort").onchange = () => this.#sort();
    $("delete-all").onclick = () => this.#removeAll();
    $("download-all").onclick = () => this.#downloadAll();
    $("undo").onclick = ({ detail }) => detail < 2 && this.#undo(); // it may come under the second half of a double click
    $("keep-sounds").checked = this.store.sounds.isOn;
    $("keep-sounds").onchange = () => this.#switchSounds();
    addEventListener("storage", () => ($("keep-sounds").checked = this.store.sounds.isOn)); // in another tab
    this.restored = this.#restore();
  }

  async #restore() {
    try {
      const entries = await this.store.entries();
      for (const entry of entries) if (!entry.isSpeaking) this.unshown.set(entry.id, entry);
      this.store.sounds.sweep(new Set(entries.map(({ id }) => id))).catch(() => {}); // no files in this window
      for (const entry of entries) if (entry.isSpeaking) takeUp(entry.id, () => this.#takeUp(entry));
      await inSlices(this.unshown.values(), (entry) => this.#showStored(entry));
    } catch (error) {
      show($("message"), `The transcripts of this browser cannot be read: ${error?.message}.`);
    }
    this.#showKept();
    this.#search();
  }

  /** What somebody spoke when the page crashed: text and sound are there, and the sound is read again as a file. */
  async #takeUp(entry) {
    const recording = new Recording(this.store, { entry });
    const { answer } = await recording.load();
    this.#show(recording);
    const kept = recording.finish(answer, { partial: entry.partial });
    this.enqueue([recording]);
    await kept;
  }

  /** Jobs that this browser has no text of. */
  async takeUp(jobs) {
    await this.restored;
    for (const { id: job, task, created_at, metadata } of jobs) {
      const { recording: id, file: name } = metadata;
      if (this.#of(id)) continue;
      const recording = new Recording(this.store, { id, name, order: created_at * 1000 });
      this.#show(recording);
      this.scheduler.add([recording], { task }, job);
    }
    this.#search();
  }

  /** To be transcribed with what is chosen now. */
  enqueue(recordings) {
    this.scheduler.add(recordings, chosenOptions());
  }

  #showStored(entry) {
    this.unshown.delete(entry.id);
    if (!this.#of(entry.id)) this.#show(new Recording(this.store, { entry }));
  }

  async #switchSounds() {
    await this.store.sounds.switchTo($("keep-sounds").checked);
    for (const { recording } of this.#finished()) await this.#keepSound(recording);
  }

  async #keepSound({ id, file, isKept, isSpoken, name }) {
    try {
      if (file && isKept && !isSpoken) await this.store.sounds.keep(id, file);
    } catch (error) {
      show($("message"), `The recording ${name} could not be kept in this browser: ${error?.message}.`);
    }
  }

  #showKept() {
    $("keep-sounds-row").hidden = this.store.state !== "open" || !this.store.sounds.isPossible;
    const numUnkept = this.#unkept().length;
    if (this.store.state === "absent") $("kept").textContent = NOT_KEPT;
    else if (numUnkept) $("kept").textContent = `${count(numUnkept, "transcript")} could not be kept: download what you need, or delete others.`;
    else if (this.store.state === "open") $("kept").textContent = KEPT;
    $("kept").classList.toggle("error", numUnkept > 0);
    if (numUnkept) $("storage").open = true;
  }

  #unkept() {
    return this.cards.map(({ recording }) => recording).filter(({ isUnkept }) => isUnkept);
  }

  /** New ones go to the top in their order; what was open is folded, unless it is in use, or the new one was spoken. */
  add(files) {
    const areSpoken = files.every(([, , spokenId]) => spokenId);
    for (const card of this.#finished()) if (!areSpoken && !card.isFolded && !card.isInUse) card.fold();
    const top = Math.max(Date.now(), this.top, ...this.cards.map(({ recording }) => recording.order + 1));
    this.top = top + files.length + 1;
    const added = files.map(([file, name, spokenId], i) => new Recording(this.store, { name, file, spokenId, order: top + files.length - i }));
    inSlices(added, (recording) => this.#show(recording)).then(() => this.#search());
    $("search").value = ""; // it would hide them
    this.#search();
    return added;
  }

  #show(recording) {
    const card = new Card(recording, this);
    card.owner.listen(recording, "state", () => this.#search());
    card.owner.listen(recording, "kept", () => this.#showKept());
    card.owner.listen(recording, "kept", () => this.#keepSound(recording));
    card.owner.listen(recording, "unkept", () => this.#onUnkept(recording));
    card.owner.listen(recording, "gone", () => this.#onGone([recording.id]));
    const at = this.cards.findIndex((other) => compare(recording, other.recording) < 0);
    const before = at < 0 ? null : this.cards[at];
    this.cards.splice(at < 0 ? this.cards.length : at, 0, card);
    $("cards").insertBefore(card.element, before?.element || null);
    return card;
  }

  #sort() {
    keepChoices();
    this.cards.sort((a, b) => compare(a.recording, b.recording));
    $("cards").append(...this.cards.map(({ element }) => element));
  }

  /** A text that was corrected stays. */
  again(recording) {
    if (recording.entry?.edits?.length) this.anew(recording);
    else this.enqueue([recording]);
  }

  /** In another card. */
  anew({ file, name }) {
    this.enqueue(this.add([[file, name]]));
  }

  #of(id) {
    return this.cards.find(({ recording }) => recording.id === id);
  }

  nextName() {
    const numbers = this.cards.map(({ recording: { name } }) => Number(/^Recording (\d+)$/.exec(name)?.[1] || 0));
    return `Recording ${Math.max(0, ...numbers) + 1}`;
  }

  #finished() {
    return this.cards.filter(({ recording }) => recording.entry && !recording.isAtWork);
  }

  /** The first to finish is open, and what was spoken: the others are as they were before. */
  mayOpen(card) {
    return card.isInUse || card.recording.isSpoken || this.#finished().every((other) => other === card || other.isFolded);
  }

  #onUnkept({ name, reason }) {
    show($("message"), `The transcript of ${name} could not be kept in this browser: ${reason}.`);
    this.#showKept();
  }

  #search() {
    const query = lower($("search").value.trim());
    let numFound = 0;
    for (const card of this.cards) {
      const isFound = card.find(query);
      card.element.hidden = !isFound;
      numFound += isFound;
    }
    $("found").textContent = query ? `${numFound} of ${count(this.cards.length, "transcript")}` : "";
    $("history").hidden = !this.#finished().length;
    this.#setCompact(this.cards.length > 0);
  }

  /** The texts have the page: what is chosen for the next one is behind a word. */
  #setCompact(isCompact) {
    if ($("drop").classList.contains("is-compact") === isCompact) return;
    for (const id of ["drop", "transcribe-view"]) $(id).classList.toggle("is-compact", isCompact);
    $("choices").open = !isCompact;
  }

  get open() {
    return this.#finished().filter((card) => !card.isFolded && !card.element.hidden);
  }

  async #downloadAll() {
    const files = [];
    for (const { recording } of this.#finished().filter(({ element }) => !element.hidden)) {
      const text = await recording.load();
      if (text) files.push(...(await filesOf(text.answer, recording.name)));
      if (this.#of(recording.id)?.isFolded) recording.release();
    }
    save(await zipOf(withOwnNames(files)), "transcripts.zip");
  }

  /** Draws those that are on their way. Returns how far they are, in words; empty where there are none. */
  drawProgress() {
    const atWork = this.cards.filter(({ recording }) => recording.isAtWork);
    for (const card of atWork) card.drawDoing();
    const share = Math.max(0, ...atWork.map(({ progress }) => progress.position));
    return atWork.length && `${Math.round(share * 100)} %${atWork.length > 1 ? ` and ${atWork.length - 1} more` : ""}`;
  }

  /** Those that failed and may not fail again. */
  get retriable() {
    return this.cards.filter(({ recording }) => recording.isRetriable && !recording.entry).map(({ recording }) => recording);
  }

  /** Work of a user that would be lost with the page. */
  get isBusy() {
    return this.cards.some(({ recording, transcript }) => recording.numSaving || recording.isUnkept || transcript.isBeingEdited);
  }

  // -- Other tabs --

  async #onStored(id) {
    const entry = await this.store.entry(id);
    const card = this.#of(id);
    if (!entry || entry.isSpeaking || this.removing.has(id)) return;
    this.removed = this.removed.filter((recording) => recording.id !== id); // it was put back in another tab
    this.#showUndo();
    if (card?.recording.numSaving) return; // and takes what is stored behind that
    if (card && card.recording.entry?.createdAt === entry.createdAt) card.recording.take(entry);
    else {
      if (card) this.#take(card);
      this.#showStored(entry);
    }
    this.#search();
  }

  #onGone(ids) {
    for (const id of ids) this.unshown.delete(id);
    const cards = ids.map((id) => this.#of(id)).filter(Boolean);
    this.#take(...cards);
    for (const card of cards) {
      if (card.recording.text) this.#offerUndo(card.recording, "was deleted in another tab");
      else show($("message"), `${card.recording.name} was deleted in another tab.`);
    }
    this.#search();
  }

  // -- Deletion --

  #take(...cards) {
    this.cards = this.cards.filter((card) => !cards.includes(card));
    for (const card of cards) card.close();
    this.scheduler.forget(cards.map(({ recording }) => recording));
  }

  async remove(recording) {
    await recording.load();
    const card = this.#of(recording.id);
    if (!card) return;
    this.#take(card);
    this.#offerUndo(recording, "is deleted");
    $("undo").focus({ preventScroll: true }); // one may be far down the list
    this.#search();
    await this.#forget([recording.id]);
  }

  async #forget(ids) {
    for (const id of ids) this.removing.add(id);
    await this.store.remove(ids);
    for (const id of ids) this.removing.delete(id);
    await Promise.all(this.#unkept().map((recording) => recording.keep())); // there may be space now
  }

  #offerUndo(recording, how) {
    this.removed = [...this.removed, Object.assign(recording, { how })].slice(-MAX_REMOVED);
    this.#showUndo();
  }

  #showUndo() {
    const last = this.removed.at(-1);
    $("undo-row").hidden = !last;
    $("undo-text").textContent = last ? `${last.name} ${last.how}.` : "";
  }

  async #undo() {
    const recording = this.removed.pop();
    this.#showUndo();
    const card = this.#show(recording);
    recording.isKept = false; // by the store, and so it stays in memory until it is again
    const kept = recording.entry && recording.keep();
    if (recording.entry) card.fold();
    await kept;
    this.#search();
    (card.toggle.disabled ? card.remove : card.toggle).focus();
  }

  /** Those that are shown: neither what a search hides nor what only another tab has. */
  async #removeAll() {
    const cards = this.#finished().filter(({ element }) => !element.hidden);
    if (!confirm(`Delete ${count(cards.length, "transcript")} from this browser? This cannot be undone.`)) return;
    this.#take(...cards);
    $("search").value = "";
    this.#search();
    $("files").focus();
    await this.#forget(cards.map(({ recording }) => recording.id));
    await this.store.sounds.sweep(new Set((await this.store.entries()).map(({ id }) => id)));
  }
}
