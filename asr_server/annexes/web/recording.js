// One recording and all that is known of it: how far it is, what was heard, what was corrected. Cards only draw it.
// Events: "work" while it is on its way, "state" for another state, "text" for another text, "kept", "unkept", "gone".

import { Emitter, newId } from "./dom.js";
import { applyEdits } from "./edits.js";
import { describe, entryOf } from "./entry.js";
import { CLOSED } from "./store.js";

const FUTILE = new Set([400, 413, 415]); // the same file would get the same answer
const LEAST_SHARE = 0.05; // of a recording, before which the pace is a guess
const AT_WORK = new Set(["waiting", "uploading", "listening"]);

export class Recording extends Emitter {
  state = "waiting"; // uploading, listening, failed, partial, done
  note = "waiting";
  share = 0; // of the upload
  heard = "";
  error = null;
  abort = new AbortController();
  amendedAt = 0; // when it was corrected last, in this tab
  #base = null; // the answer as the server sent it, while it is in memory
  #edited = null; // the answer and its words as corrected, by the corrections in it
  #redoable = [];
  numSaving = 0;

  /** Of a `file`, or of an `entry` of the store. The higher its `order`, the higher it stands in the list. */
  constructor(store, { name, file = null, entry = null, spokenId = null, id = spokenId || newId(), order = Date.now() }) {
    super();
    this.store = store;
    this.file = file;
    this.entry = entry;
    this.isKept = Boolean(entry);
    this.isSpoken = Boolean(spokenId || entry?.isSpoken);
    [this.id, this.order, this.givenName] = entry ? [entry.id, entry.order] : [id, order, name];
    this.job = entry?.job; // the server's, while it keeps it
    if (entry) this.state = entry.partial ? "partial" : "done";
  }

  get name() {
    return this.entry?.name ?? this.givenName;
  }

  get isAtWork() {
    return AT_WORK.has(this.state);
  }

  /** The same file may get another answer. */
  get isRetriable() {
    if (!this.file || this.isAtWork) return false;
    return this.state === "partial" || (Boolean(this.error) && !FUTILE.has(this.error.status));
  }

  #become(state) {
    this.state = state;
    this.emit("state");
  }

  // -- On its way to a text --

  wait(options, job = null) {
    [this.options, this.job] = [options, job];
    this.error = null;
    this.since = null;
    this.abort = new AbortController();
    this.say("waiting");
  }

  begin() {
    this.since ??= performance.now();
    this.heard = this.entry?.text || ""; // until there is another text
    this.heardFirst = null;
    this.heardUntil = 0;
    this.say("waiting");
  }

  get seconds() {
    return this.since === null ? 0 : (performance.now() - this.since) / 1000;
  }

  /** How much of `length` seconds is read, and the seconds that the rest takes; null where nobody knows. */
  rest(length) {
    if (this.state !== "listening" || !length || !this.heardUntil) return null;
    const share = Math.min(0.99, this.heardUntil / length);
    if (share < LEAST_SHARE) return { share, seconds: null };
    // From the second text on the wait for the first, which others may have caused, says nothing of the pace
    const [at, from] = this.heardUntil > this.heardFirst.until ? [this.heardFirst.at, this.heardFirst.until] : [this.listenedAt, 0];
    const pace = (this.heardUntil - from) / (performance.now() - at); // seconds a millisecond
    return { share, seconds: Math.max(0, length - this.heardUntil) / pace / 1000 };
  }

  say(note, state = "waiting") {
    const isOther = state !== this.state;
    [this.state, this.note] = [state, note];
    this.emit(isOther ? "state" : "work");
  }

  upload(share) {
    this.share = share;
    if (share < 1) return this.say(`uploading, ${Math.round(share * 100)} %`, "uploading");
    this.listenedAt = performance.now();
    this.say("listening …", "listening");
  }

  /** Text up to `until`, in seconds of the recording. */
  hear(delta, until) {
    this.heard = this.heardFirst ? this.heard + delta : delta;
    if (!this.heardUntil) this.heardFirst = { at: performance.now(), until };
    this.heardUntil = until;
    this.emit("work");
  }

  /** What it had before stays: a text that is whole in part, or corrected. */
  fail({ message, status }) {
    this.error = { message, status };
    this.#become(this.entry ? "partial" : "failed");
  }

  /** `took`: seconds from start to end, if that says anything; `partial`: why it is not all of the recording. */
  finish(answer, { took = null, partial = "" } = {}) {
    this.#base = answer;
    this.#redoable = [];
    const entry = { ...entryOf(this.name, answer, took), edits: [] };
    const { id, order, isSpoken, job } = this;
    this.entry = Object.assign(entry, { id, order, isSpoken, job, isStarred: this.entry?.isStarred }, partial && { partial });
    this.#edited = null;
    this.#become(partial ? "partial" : "done");
    return this.keep();
  }

  // -- Its text --

  /** The answer as corrected and its words; null while it is not in memory. */
  get text() {
    return this.#base && this.#corrected(this.entry.edits || []);
  }

  #corrected(edits) {
    const ids = edits.map(({ id }) => id).join();
    if (this.#edited?.ids !== ids) this.#edited = { ids, ...applyEdits(this.#base, edits) };
    return this.#edited;
  }

  /** The same, from the store where that is needed; null where it is not kept any more. */
  async load() {
    if (!this.file && this.isKept) this.file = await this.store.sounds.file(this.id, this.name);
    this.#base ??= this.entry && (await this.store.answer(this.id));
    return this.text;
  }

  /** The store has it: an hour of words takes megabytes. */
  release() {
    if (this.isKept && !this.numSaving) this.#base = this.#edited = null;
  }

  async keep() {
    await this.#save(async () => (this.isKept = await this.store.put(this.entry, this.#base)));
    this.emit("kept");
  }

  async #save(save) {
    this.numSaving++;
    try {
      await save();
    } catch (error) {
      this.isKept = false; // nor are earlier corrections, which the whole entry has
      this.reason = error?.message || "it has no space left";
      this.emit("unkept");
    }
    this.numSaving--;
  }

  /** The store has refused it. */
  get isUnkept() {
    return Boolean(this.reason) && !this.isKept;
  }

  // -- Corrections --

  /** Makes corrections that are undone together; see edits.js, which needs no ids yet. */
  edit(added) {
    this.#redoable = [];
    const group = newId();
    const own = added.map((edit) => ({ id: newId(), group, ...edit }));
    return this.#amend((edits) => [...edits, ...own]);
  }

  /** Takes the last corrections back that were made together; false where there are none. */
  undo() {
    const group = this.entry?.edits?.at(-1)?.group;
    if (!group || !this.#base) return false;
    this.#redoable.push(this.entry.edits.filter((edit) => edit.group === group));
    this.#amend((edits) => edits.filter((edit) => edit.group !== group));
    return true;
  }

  redo() {
    const again = this.#base && this.#redoable.pop();
    if (again) this.#amend((edits) => [...edits, ...again]);
    return Boolean(again);
  }

  async #amend(amend) {
    this.amendedAt = performance.now();
    return this.#change((entry) => {
      const edits = amend(entry.edits || []);
      return describe({ ...entry, edits }, this.#corrected(edits).answer);
    });
  }

  /** A second track beside the text, in English. */
  async addTranslation({ text, segments, duration }) {
    if (!(await this.load())) return;
    this.#base = { ...this.#base, translation: { text, segments, duration } };
    this.#edited = null;
    await this.#change((entry) => ({ ...entry, isTranslated: true }), this.#base);
  }

  /** Another name, or a star. */
  mark(fields) {
    return this.#change((entry) => ({ ...entry, ...fields }));
  }

  /** At once here; and to what is stored, which may have another tab's corrections too. */
  async #change(change, answer = null) {
    this.take(change(this.entry));
    if (!this.isKept) return this.keep();
    await this.#save(async () => {
      const stored = await this.store.change(this.id, change, answer);
      if (stored && this.numSaving === 1) this.take(stored);
      else if (!stored && this.store.state === "open") this.emit("gone");
      else if (!stored) throw new Error(CLOSED); // it stays in memory, but nowhere else
    });
  }

  /** The entry as it is now, here or in the store. */
  take(entry) {
    this.entry = entry;
    this.emit("text");
  }
}
