// The recordings themselves in this browser's private files (OPFS): those that one wants to keep, and what one speaks.

import { attempt, newId } from "./dom.js";
import { entryOf } from "./entry.js";
import { record } from "./zip.js";

const FOLDER = "recordings";
export const SPOKEN = "spoken"; // each deleted with its transcript alone: there is no other copy of it
const MOST_BYTES = 2 ** 30; // together; the oldest go first
const SWITCH = "asr-server-keeps-recordings";

export const RATE = 24000; // of what one speaks

/** A file that any player opens, of blobs and blocks of 16-bit PCM, mono. */
export function wavOf(parts, name) {
  const numBytes = parts.reduce((sum, part) => sum + (part.size ?? part.byteLength), 0);
  const [riff, wave, fmt, data] = [0x46464952, 0x45564157, 0x20746d66, 0x61746164]; // as letters
  const format = [[4, 16], [2, 1], [2, 1], [4, RATE], [4, RATE * 2], [2, 2], [2, 16]]; // PCM, mono
  const header = record([4, riff], [4, 36 + numBytes], [4, wave], [4, fmt], ...format, [4, data], [4, numBytes]);
  return new File([header, ...parts], name, { type: "audio/wav" });
}

export const folderOf = async (name) => (await navigator.storage.getDirectory()).getDirectoryHandle(name, { create: true });

const fileOf = async (folder, id) => (await (await folderOf(folder)).getFileHandle(id)).getFile();

export class Sounds {
  constructor(most = MOST_BYTES) {
    this.most = most;
    this.isPossible = Boolean(navigator.storage?.getDirectory); // by https or localhost
  }

  /** In all tabs: any of them may have switched it. */
  get isOn() {
    return attempt(() => localStorage.getItem(SWITCH)) === "on";
  }

  async switchTo(isOn) {
    localStorage.setItem(SWITCH, isOn ? "on" : "off");
    if (!isOn) await this.#sweep(FOLDER, new Set());
  }

  async keep(id, file) {
    if (!this.isOn || file.size > this.most) return;
    const folder = await folderOf(FOLDER);
    await this.#makeRoom(folder, id, file.size);
    const writer = await (await folder.getFileHandle(id, { create: true })).createWritable();
    await writer.write(file);
    await writer.close();
    if (!this.isOn) await folder.removeEntry(id).catch(() => {}); // switched off meanwhile
  }

  async #makeRoom(folder, id, size) {
    const files = await Array.fromAsync(folder.values(), (handle) => handle.getFile());
    const others = files.filter(({ name }) => name !== id).sort((a, b) => b.lastModified - a.lastModified);
    let total = size;
    for (const file of others) {
      total += file.size;
      if (total > this.most) await folder.removeEntry(file.name);
    }
  }

  /** The samples of what one spoke, or null. */
  spoken(id) {
    return fileOf(SPOKEN, id).catch(() => null);
  }

  /** Null where it is not kept. */
  async file(id, name) {
    const spoken = await this.spoken(id);
    if (spoken) return wavOf([spoken], `${name}.wav`);
    return fileOf(FOLDER, id).then((file) => new File([file], name), () => null);
  }

  /** Deletes those of no transcript in `ids`; one that is being written stays. */
  async sweep(ids) {
    if (!this.isPossible) return;
    await this.#sweep(FOLDER, this.isOn ? ids : new Set());
    await this.#sweep(SPOKEN, ids);
  }

  async #sweep(name, ids) {
    const folder = await folderOf(name);
    for await (const id of folder.keys()) if (!ids.has(id)) await folder.removeEntry(id).catch(() => {});
  }
}

// -- What one speaks, kept while one speaks: its sound in a file, its text in the store --

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
    const own = { id: this.id, order: this.order, edits: [], isSpoken: true };
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
