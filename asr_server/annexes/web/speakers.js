// The people of a transcript, each with a colour, a name that can be changed, and how long they speak.

import { speakersOf } from "./answer.js";
import { clock, h } from "./dom.js";
import { editInPlace } from "./field.js";

export class Speakers {
  /** `onRename(from, to)` when one gets another name. */
  constructor(onRename) {
    this.onRename = onRename;
    this.element = h("ul", { className: "speakers", hidden: true, "aria-label": "Who speaks" });
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
    const rename = h("span", { className: "visually-hidden" }, "Rename ");
    const button = h("button", { type: "button", title: "Rename" }, rename, h("span", {}, name), h("span", { className: "time" }, clock(seconds)));
    const item = h("li", { "data-name": name, style: `--speaker: var(--${color})` }, button);
    button.onclick = () => this.edit(item, name);
    return item;
  }

  /** A field in the place of a name, here or in the text. */
  edit(element, name) {
    editInPlace(element, name, `Name of speaker ${name}`, (to, isByKey) => {
      if (to && to !== name) this.onRename(name, to);
      if (isByKey) this.#focus(to || name);
    });
  }

  #focus(name) {
    this.element.querySelector(`[data-name="${CSS.escape(name)}"] button`)?.focus({ preventScroll: true }); // one may be reading further down
  }
}
