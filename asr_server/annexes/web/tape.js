// What one speaks, kept while one speaks: its sound in the browser's private files, its text in the store.

import { newId } from "./dom.js";
import { entryOf } from "./entry.js";
import { wavOf } from "./wav.js";

const CRASHED = "the page was closed while you spoke";
const MISSING = "a part of this page is missing";
const MOST_IN_MEMORY = 36000; // blocks of 100 ms: an hour
const lockOf = (id) => `asr-server-speaks-${id}`;

export class Tape {
  id = newId();
  order = Date.now();
  reason = ""; // why its sound is not in a file
  #rest = []; // blocks that the file could not take
  #asked = []; // the worker has not answered

  /** Calls `onFull()` when no more of the sound can be kept. */
  constructor(store, name, onFull) {
    Object.assign(this, { store, name, onFull });
    this.worker = new Worker(new URL("tape-worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => this.#asked.shift()(data);
    this.worker.onerror = () => this.#asked.splice(0).forEach((answer) => answer(MISSING));
    navigator.locks.request(lockOf(this.id), () => new Promise((resolve) => (this.release = resolve)));
    this.#ask(this.id);
  }

  #ask(data) {
    return new Promise((resolve) => {
      this.#asked.push(resolve);
      this.worker.postMessage(data);
    });
  }

  async write(block) {
    const reason = this.reason || (await this.#ask(block));
    if (!reason) return;
    this.reason = reason;
    this.#rest.push(block);
    if (this.#rest.length === MOST_IN_MEMORY) this.onFull();
  }

  /** The text so far, as the answer to a file: what a crash leaves. */
  async keep(answer) {
    const own = { id: this.id, order: this.order, edits: [], revision: 0, isSpoken: true };
    const entry = { ...entryOf(this.name, answer), ...own, isSpeaking: true, partial: CRASHED };
    await this.store.put(entry, answer).catch(() => {}); // one is told at the end
  }

  /** Return the sound as a file, also where the browser keeps none. */
  async close() {
    await this.#ask(null);
    this.worker.terminate();
    const start = await this.store.sounds.spoken(this.id);
    return wavOf([...(start ? [start] : []), ...this.#rest], `${this.name}.wav`);
  }
}

/** Calls `take()` unless a tab still speaks into the tape, or takes it up; holds the others off until it is done. */
export const takeUp = (id, take) => navigator.locks.request(lockOf(id), { ifAvailable: true }, (lock) => lock && take());
