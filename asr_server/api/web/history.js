// The transcripts kept in this browser (IndexedDB): what a list shows of each, and the whole answers apart from it.

const MOST = 200; // transcripts that are kept when the page is opened
const MOST_CHARACTERS = 20e6; // of their texts together: some 300 hours of speech

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const finished = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });

export class History {
  /** Throws where the browser keeps nothing, as in some private windows. */
  static async open() {
    const request = indexedDB.open("asr-server", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("entries", { keyPath: "id", autoIncrement: true });
      request.result.createObjectStore("answers");
    };
    return new History(await settled(request));
  }

  constructor(database) {
    this.database = database;
  }

  #begin(mode = "readonly") {
    const transaction = this.database.transaction(["entries", "answers"], mode);
    return { transaction, entries: transaction.objectStore("entries"), answers: transaction.objectStore("answers") };
  }

  /** Those kept, newest first; what is over the bounds is deleted, oldest first. */
  async entries() {
    const all = (await settled(this.#begin().entries.getAll())).reverse();
    let numCharacters = 0;
    const kept = all.filter(({ text }, i) => {
      numCharacters += text.length;
      return i === 0 || (i < MOST && numCharacters <= MOST_CHARACTERS);
    });
    for (const { id } of all.filter((entry) => !kept.includes(entry))) await this.remove(id);
    return kept;
  }

  answer(id) {
    return settled(this.#begin().answers.get(id));
  }

  /** Keeps both; gives a new entry its `id`. */
  async save(entry, answer) {
    const { transaction, entries, answers } = this.#begin("readwrite");
    const done = finished(transaction);
    const id = await settled(entries.put(entry));
    answers.put(answer, id);
    await done;
    entry.id = id;
  }

  remove(id) {
    const { transaction, entries, answers } = this.#begin("readwrite");
    entries.delete(id);
    answers.delete(id);
    return finished(transaction);
  }

  clear() {
    const { transaction, entries, answers } = this.#begin("readwrite");
    entries.clear();
    answers.clear();
    return finished(transaction);
  }
}
