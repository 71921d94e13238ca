// A row to find words of a transcript and to put others in their place.

import { h, lower } from "./dom.js";

export class Replace {
  /** `on.find()` marks `query`; `on.count()` says how often it is there; `on.replace(text, isOne)` returns how many. */
  constructor(on) {
    this.on = on;
    this.found = h("span", { className: "muted", role: "status" });
    this.field = h("input", { autocomplete: "off", dir: "auto" });
    this.by = h("input", { autocomplete: "off", dir: "auto" });
    this.whole = h("input", { type: "checkbox" });
    this.all = h("button", { className: "small all" }, "Replace all");
    this.one = h("button", { type: "button", className: "small", title: "The next one" }, "Replace");
    this.one.onclick = () => this.#replace(true);
    const label = (text, field) => h("label", {}, h("span", { className: "muted" }, text), field);
    this.parts = [label("Find", this.field), label("Replace by", this.by), label("Whole words", this.whole), this.one, this.all, this.found];
    this.element = h("form", { className: "row replace", hidden: true });
    this.button = h("button", { type: "button", className: "small", "aria-expanded": "false" }, "Find and replace");
    this.button.onclick = () => this.#show(this.element.hidden);
    this.field.oninput = this.whole.onchange = () => this.#find();
    this.element.onkeydown = ({ key }) => {
      if (key === "Escape") this.#show(false);
    };
    this.element.onsubmit = (event) => {
      event.preventDefault();
      this.#replace(false);
    };
  }

  /** In lower case; empty while it is closed. */
  get query() {
    return this.element.hidden ? "" : lower(this.field.value.trim());
  }

  #show(isOpen) {
    this.element.hidden = !isOpen;
    this.element.replaceChildren(...(isOpen ? this.parts : [])); // fields in a page cost time: see card.js
    this.button.setAttribute("aria-expanded", isOpen);
    this.#find();
    (isOpen ? this.field : this.button).focus();
  }

  #find() {
    this.on.find();
    const number = this.on.count();
    this.all.disabled = this.one.disabled = !number;
    this.found.textContent = this.query && `${number} found`;
  }

  #replace(isOne) {
    const number = this.on.replace(this.by.value.trim().replace(/\s+/g, " "), isOne);
    this.#find();
    this.found.textContent = `${number} replaced`;
    if (this.all.disabled) this.field.focus(); // the button has lost it
  }
}
