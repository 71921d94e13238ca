// The transcripts kept in this browser (IndexedDB): what a list shows of each, and the whole answers apart from it.
// All tabs share them: each change is made to what is stored, and the other tabs are told of it.

import { Emitter } from "./dom.js";
import { Sounds } from "./sounds.js";

export const CLOSED = "its store was closed; reload the page"; // by a newer page, or with the browser's data
const MOST = 500; // transcripts that are kept when the page is opened
const MOST_CHARACTERS = 20e6; // of their texts together: some 300 hours of speech
const NAME = "asr-server";
const TABLES = ["entries", "answers"];

/** What a request gives, or nothing once a transaction is through. */
const settled = (pending) =>
  new Promise((resolve, reject) => {
    pending.onsuccess = pending.oncomplete = () => resolve(pending.result);
    pending.onerror = pending.onabort = ({ target }) => reject(target.error);
  });

const isWhole = (entry) => typeof entry?.text === "string" && typeof entry.name === "string";

/** Always there: `opened` settles when it is open, or absent, as in some private windows. */
export class Store extends Emitter {
  state = "opening";
  sounds = new Sounds();

  constructor() {
    super();
    this.opened = this.#open();
    this.channel = new BroadcastChannel(NAME);
    this.channel.onmessage = ({ data }) => this.emit(data.what, data);
  }

  /** Without a version: a newer page's store is read as far as it is understood. */
  async #open() {
    try {
      const request = indexedDB.open(NAME);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("entries", { keyPath: "id", autoIncrement: true });
        request.result.createObjectStore("answers");
      };
      this.database = await settled(request);
      if (!TABLES.every((table) => this.database.objectStoreNames.contains(table))) throw new Error("no tables");
      this.database.onversionchange = () => this.#lose(); // a newer page waits for this one
      this.database.onclose = () => this.#lose();
      this.#become("open");
    } catch {
      this.#lose();
    }
  }

  #lose() {
    this.database?.close();
    this.#become("absent");
  }

  #become(state) {
    this.state = state;
    this.emit("state");
  }

  /** What `use(entries, answers)` gives; null where the store is absent. */
  async #run(mode, use) {
    await this.opened;
    if (this.state !== "open") return null;
    const transaction = this.database.transaction(TABLES, mode);
    const done = settled(transaction);
    done.catch(() => {}); // `use` may throw before
    const found = await use(...TABLES.map((table) => transaction.objectStore(table)));
    await done;
    return found;
  }

  /** Those kept, newest first; what is over the bounds is deleted, oldest first; what is not understood is left. */
  async entries() {
    const stored = await this.#run("readonly", (entries) => settled(entries.getAll()));
    const all = (stored ?? []).filter(isWhole);
    for (const entry of all) entry.order ??= entry.createdAt || 0;
    all.sort((a, b) => b.order - a.order || (b.id > a.id ? 1 : -1));
    let numCharacters = 0;
    const kept = all.filter(({ text }, i) => {
      numCharacters += text.length;
      return i === 0 || (i < MOST && numCharacters <= MOST_CHARACTERS);
    });
    await this.#delete(all.filter((entry) => !kept.includes(entry)).map(({ id }) => id));
    return kept;
  }

  async entry(id) {
    const entry = await this.#run("readonly", (entries) => settled(entries.get(id)));
    return isWhole(entry) ? { order: entry.createdAt || 0, ...entry } : null;
  }

  answer(id) {
    return this.#run("readonly", (_, answers) => settled(answers.get(id)));
  }

  /** Keeps both; false where the store is absent. */
  async put(entry, answer) {
    const isKept = await this.#run("readwrite", (entries, answers) => {
      entries.put(entry);
      answers.put(answer, entry.id);
      return true;
    });
    if (isKept) this.channel.postMessage({ what: "changed", id: entry.id });
    return Boolean(isKept);
  }

  /** Replaces an entry by `change(entry)` of what is stored by now, and its answer by `answer`; null where another tab has deleted it. */
  async change(id, change, answer = null) {
    const changed = await this.#run("readwrite", async (entries, answers) => {
      const stored = await settled(entries.get(id));
      const changed = stored && change(stored);
      if (changed) entries.put(changed);
      if (changed && answer) answers.put(answer, id);
      return changed;
    });
    if (changed) this.channel.postMessage({ what: "changed", id });
    return changed || null;
  }

  async remove(ids) {
    await this.#delete(ids);
    this.channel.postMessage({ what: "removed", ids });
  }

  async #delete(ids) {
    if (ids.length) await this.#run("readwrite", (...tables) => ids.forEach((id) => tables.forEach((table) => table.delete(id))));
  }
}
