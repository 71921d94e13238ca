// What is seen while one speaks: the level of the voice, the time and the text so far.

import { $, clock, color, context2d, h, show } from "./dom.js";
import { Microphone } from "./microphone.js";
import { chosenOptions } from "./options.js";

export class Live {
  /** `onEnd(file, answer, name, partial)` with what was said, as a file and in the same shape as the answer to one. */
  constructor(nextName, onEnd) {
    this.nextName = nextName;
    this.onEnd = onEnd;
    this.microphone = null;
    this.levels = [];
    $("record").onclick = () => (this.microphone ? this.microphone.stop() : this.#start());
  }

  get isOn() {
    return this.microphone !== null;
  }

  async #start() {
    show($("message"), "");
    const microphone = new Microphone(chosenOptions(), {
      text: (turns) => this.#showText(turns),
      level: (block) => this.#showLevel(block),
      stopping: () => ($("live-status").textContent = "Waiting for the last words …"),
      end: (turns, partial) => this.#end(turns, partial),
    });
    this.microphone = microphone;
    this.#setRecording(true);
    try {
      await microphone.start();
    } catch (error) {
      microphone.end(error.message);
    }
  }

  #setRecording(isOn) {
    $("record").classList.toggle("is-recording", isOn);
    $("record").setAttribute("aria-pressed", isOn);
    $("record-label").textContent = isOn ? "Stop" : "Speak";
    $("live").hidden = !isOn;
    $("live-status").textContent = `Listening …${laterOf(chosenOptions())}`;
    for (const id of ["live-text", "live-said", "live-time"]) $(id).replaceChildren();
    this.levels.length = 0;
  }

  /** Each turn in an element of its own; one that is final is read out, once. */
  #showText(turns) {
    const shown = $("live-text").children;
    turns.forEach((turn, i) => {
      const text = `${turn.failed || turn.text} `;
      if (!shown[i]) $("live-text").append(h("span", { dir: "auto" }));
      if (shown[i].textContent !== text) shown[i].textContent = text;
      shown[i].className = turn.final ? "" : "pending";
      if (turn.final && !turn.isRead) $("live-said").append(h("p", { dir: "auto" }, text));
      turn.isRead ||= turn.final;
    });
  }

  #showLevel(block) {
    this.levels.push(Math.sqrt(block.reduce((sum, value) => sum + (value / 32768) ** 2, 0) / block.length));
    $("live-time").textContent = clock(this.microphone?.duration);
    const { context, width, height } = context2d($("live-level"));
    this.levels.splice(0, this.levels.length - Math.floor(width / 5));
    context.fillStyle = color("accent");
    this.levels.forEach((level, i) => {
      const bar = Math.max(2, Math.min(1, Math.sqrt(level * 3)) * height);
      context.fillRect(i * 5, (height - bar) / 2, 3, bar);
    });
  }

  #end(turns, partial) {
    const spoken = this.microphone;
    this.microphone = null;
    this.#setRecording(false);
    show($("message"), partial);
    if (!spoken.blocks.length) return;
    const name = this.nextName();
    this.onEnd(spoken.recording(`${name}.wav`), answerOf(turns, spoken.duration), name, partial);
  }
}

/** Neither is done while one speaks. */
function laterOf({ task, speakers }) {
  if (task === "translate") return " The translation comes when you stop.";
  return speakers ? " Who speaks is added when you stop." : "";
}

function answerOf(turns, duration) {
  const said = turns.filter((turn) => turn.text);
  const segments = said.map(({ start, end, text }, id) => ({ id, start, end: Math.min(end ?? duration, duration), text }));
  return { text: said.map((turn) => turn.text.trim()).join(" "), duration, segments };
}
