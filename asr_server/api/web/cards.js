// The list of recordings: those of this visit and those that the history has, with a search over them.

import { Card } from "./card.js";
import { $, count, show } from "./dom.js";
import { History } from "./history.js";

const KEPT = "Texts and corrections are kept in this browser and nowhere else, the newest 200 of them. Recordings are not kept.";
const NOT_KEPT = "This browser keeps nothing for this page: transcripts are gone when it is closed.";

export class Cards {
  /** `retry(card)`: one asks for it again; `forget(card)`: it need not be transcribed any more. */
  constructor({ retry, forget }) {
    this.cards = [];
    this.forget = forget;
    this.on = {
      retry,
      done: (card) => this.#onDone(card),
      change: (card) => this.#save(card),
      remove: (card) => this.#remove(card),
      load: (card) => this.history?.answer(card.entry.id),
    };
    $("search").oninput = () => this.#search();
    $("delete-all").onclick = () => this.#removeAll();
    $("undo").onclick = () => this.#undo();
  }

  /** Shows what the history has. */
  async restore() {
    try {
      this.history = await History.open();
      for (const entry of await this.history.entries()) {
        const card = new Card({ name: entry.name, entry }, this.on);
        this.cards.push(card);
        $("cards").append(card.element);
      }
    } catch {
      this.history = null;
    }
    $("kept").textContent = this.history ? KEPT : NOT_KEPT;
    this.#search();
  }

  /** New ones go to the top in their order; what was open is folded, unless it plays. */
  add(files) {
    this.#endUndo();
    for (const card of this.#finished()) if (!card.isFolded && card.player?.audio.paused !== false) card.fold();
    const added = files.map(([file, name]) => new Card({ name, file }, this.on));
    this.cards.unshift(...added);
    $("cards").prepend(...added.map((card) => card.element));
    this.#search();
    return added;
  }

  /** A name for what was spoken: `Recording 3`. */
  nextName() {
    const numbers = this.cards.map(({ name }) => Number(/^Recording (\d+)$/.exec(name)?.[1] || 0));
    return `Recording ${Math.max(0, ...numbers) + 1}`;
  }

  #finished() {
    return this.cards.filter((card) => card.entry);
  }

  async #onDone(card) {
    if (this.#finished().every((other) => other.isFolded)) await card.unfold();
    await this.#save(card);
    this.#search();
  }

  /** One after the other, so that the first gives the entry its id. */
  #save(card) {
    const { answer } = card; // the card may let go of it when it is folded
    card.saving = Promise.resolve(card.saving).then(() => this.#saveNow(card, answer));
    return card.saving;
  }

  async #saveNow(card, answer) {
    try {
      await this.history?.save(card.entry, answer);
    } catch (error) {
      show($("message"), `The transcript of ${card.name} could not be kept in this browser: ${error?.message || "it has no space left"}.`);
    }
  }

  #search() {
    const query = $("search").value.trim().toLowerCase();
    let numFound = 0;
    for (const card of this.cards) {
      const isFound = card.find(query);
      card.element.hidden = !isFound;
      numFound += isFound;
    }
    $("found").textContent = query ? `${numFound} of ${count(this.cards.length, "transcript")}` : "";
    $("history").hidden = !this.#finished().length;
    $("drop").classList.toggle("is-compact", this.cards.length > 0);
  }

  // -- Deletion --

  async #remove(card) {
    this.#endUndo();
    const answer = card.entry && (await card.load());
    const next = card.element.nextElementSibling;
    const heir = next || card.element.previousElementSibling;
    this.cards.splice(this.cards.indexOf(card), 1);
    card.player?.audio.pause();
    card.element.remove();
    this.forget(card);
    if (answer) {
      await this.history?.remove(card.entry.id);
      this.removed = { card, next };
      $("undo-text").textContent = `${card.name} is deleted.`;
      $("undo-row").hidden = false;
      $("undo").focus();
    } else {
      card.close();
      (heir?.querySelector("button:enabled") || $("files")).focus();
    }
    this.#search();
  }

  async #undo() {
    const { card, next } = this.removed;
    this.removed = null;
    this.#endUndo();
    const before = next?.isConnected ? next : null;
    $("cards").insertBefore(card.element, before);
    const at = this.cards.findIndex(({ element }) => element === before);
    this.cards.splice(at < 0 ? this.cards.length : at, 0, card);
    await this.#save(card);
    this.#search();
    card.toggle.focus();
  }

  #endUndo() {
    this.removed?.card.close();
    this.removed = null;
    $("undo-row").hidden = true;
  }

  async #removeAll() {
    const cards = this.#finished();
    if (!confirm(`Delete ${count(cards.length, "transcript")} from this browser? This cannot be undone.`)) return;
    this.#endUndo();
    await this.history?.clear();
    for (const card of cards) {
      card.close();
      card.element.remove();
    }
    this.cards = this.cards.filter((card) => !cards.includes(card));
    $("search").value = "";
    this.#search();
    $("files").focus();
  }
}
