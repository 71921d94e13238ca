// What is seen while one speaks: the level of the voice, the time and the text so far.

import { $, clock, color, context2d, h, show } from "./dom.js";
import { Microphone } from "./microphone.js";
import { chosenOptions } from "./options.js";

export class Live {
  /** `onEnd(file, answer, name)` with what was said, as a file and in the same shape as the answer to one. */
  constructor(nextName, onEnd) {
    this.nextName = nextName;
    this.onEnd = onEnd;
    this.microphone = null;
    this.levels = [];
    $("record").onclick = () => (this.microphone ? this.microphone.stop() : this.#start());
  }

  async #start() {
    show($("message"), "");
    this.microphone = new Microphone(chosenOptions(), {
      text: (turns) => this.#showText(turns),
      level: (block) => this.#showLevel(block),
      end: (turns, error) => this.#end(turns, error),
    });
    this.#setRecording(true);
    try {
      await this.microphone.start();
    } catch (error) {
      if (!this.microphone) return; // stopped meanwhile
      show($("message"), error.message);
      this.microphone.hasEnded = true;
      this.microphone = null;
      this.#setRecording(false);
    }
  }

  #setRecording(isOn) {
    $("record").classList.toggle("is-recording", isOn);
    $("record").setAttribute("aria-pressed", isOn);
    $("record-label").textContent = isOn ? "Stop" : "Speak";
    $("live").hidden = !isOn;
    $("live-text").replaceChildren();
    $("live-time").textContent = "";
    this.levels.length = 0;
  }

  #showText(turns) {
    const spans = turns.map((turn) => h("span", { className: turn.final ? "" : "pending" }, `${turn.failed || turn.text} `));
    $("live-text").replaceChildren(...spans);
  }

  #showLevel(block) {
    this.levels.push(Math.sqrt(block.reduce((sum, value) => sum + (value / 32768) ** 2, 0) / block.length));
    $("live-time").textContent = clock(this.microphone?.duration);
    const { context, width, height } = context2d($("live-level"));
    context.fillStyle = color("accent");
    this.levels.slice(-Math.floor(width / 5)).forEach((level, i) => {
      const bar = Math.max(2, Math.min(1, Math.sqrt(level * 3)) * height);
      context.fillRect(i * 5, (height - bar) / 2, 3, bar);
    });
  }

  #end(turns, error) {
    const spoken = this.microphone;
    this.microphone = null;
    this.#setRecording(false);
    if (error) show($("message"), error);
    if (!spoken.blocks.length) return;
    const name = this.nextName();
    this.onEnd(spoken.recording(`${name}.wav`), answerOf(turns, spoken.duration), name);
  }
}

function answerOf(turns, duration) {
  const said = turns.filter((turn) => turn.text);
  const segments = said.map(({ start, end, text }, id) => ({ id, start, end: Math.min(end ?? duration, duration), text }));
  return { text: said.map((turn) => turn.text.trim()).join(" "), duration, segments };
}
