// The subtitles of a text as they are exported: how fast each is to be read, with times that can be moved.

import { count, h, newId } from "./dom.js";
import { stamp } from "./downloads.js";
import { subtitleLayout } from "./options.js";
import { cuesOf, LETTERS_PER_S, speedOf } from "./subtitles.js";

const isFast = (cue) => speedOf(cue) > LETTERS_PER_S;

export class Cues {
  shown = []; // of each row what it shows, as a text
  name = newId(); // of the radio buttons

  constructor(card) {
    const { subtitling: button, subtitles: element } = card;
    Object.assign(this, { card, element, list: element.querySelector("ol"), status: element.querySelector("[role=status]") });
    [this.side, this.by] = element.querySelectorAll("select, input");
    button.onclick = () => {
      element.hidden = !element.hidden;
      button.setAttribute("aria-expanded", !element.hidden);
      card.drawText();
    };
    for (const move of element.querySelectorAll("[data-step]")) move.onclick = () => this.#move(Number(move.dataset.step));
    this.list.onchange = () => card.player?.seek(this.#chosen().start);
  }

  /** Rows that show the same stay as they are. */
  show(answer) {
    if (this.element.hidden) return;
    this.cues = cuesOf(answer, subtitleLayout());
    const english = answer.translation ? cuesOf(answer.translation, subtitleLayout()) : [];
    const byCue = Map.groupBy(english, ({ start }) => Math.max(0, this.cues.findLastIndex((cue) => cue.start <= start)));
    const rows = this.cues.map((cue, i) => [cue, ...(byCue.get(i) ?? [])]);
    const shown = rows.map((tracks) => JSON.stringify(tracks));
    for (const row of [...this.list.children].slice(rows.length)) row.remove();
    rows.forEach((tracks, i) => shown[i] === this.shown[i] || this.#showRow(i, tracks));
    this.shown = shown;
    const numFast = this.cues.filter(isFast).length;
    this.status.textContent = `${numFast} of ${count(rows.length, "subtitle")} faster than ${LETTERS_PER_S} letters a second`;
  }

  #showRow(index, [cue, ...english]) {
    const before = this.list.children[index];
    const radio = before?.querySelector("input") ?? h("input", { type: "radio", name: this.name }); // it may be chosen, and have the focus
    const times = h("span", { className: "muted" }, `${stamp(cue.start, ".")} – ${stamp(cue.end, ".")}`);
    const content = [radio, times, linesOf(cue), ...english.map((each) => h("span", { lang: "en" }, linesOf(each)))];
    if (before) before.firstElementChild.replaceChildren(...content);
    else this.list.append(h("li", {}, h("label", {}, ...content)));
  }

  /** The first, unless one was chosen. */
  #chosen() {
    return this.cues[Math.max(0, [...this.list.children].findIndex((row) => row.querySelector(":checked")))];
  }

  #move(step) {
    const side = this.side.value;
    if (!this.cues.length || !this.by.value) return;
    this.card.recording.edit([{ side, at: this.#chosen()[`${side}At`] ?? null, by: step * this.by.value }]);
  }
}

/** Its lines, and how fast they are. */
function linesOf(cue) {
  const speed = h("span", { className: isFast(cue) ? "speed is-fast" : "speed" }, `${Math.round(speedOf(cue))} letters/s`);
  return h("span", { className: "lines", dir: "auto" }, cue.lines.join("\n"), speed);
}
