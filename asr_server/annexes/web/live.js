// What is seen while one speaks: the level of the voice, the time and the text so far.

import { $, clock, color, context2d, h, show } from "./dom.js";
import { Follow } from "./follow.js";
import { Microphone } from "./microphone.js";
import { chosenOptions } from "./options.js";
import { Owner } from "./owner.js";
import { Tape } from "./tape.js";

const [LEAST_REM, MOST_REM] = [1, 6];
const LISTENING = "Listening …";

export class Live {
  levels = [];
  size = 1.5; // of the text, in rem
  microphone = null;
  tape = null;

  /**
   * `on.end(tape, file, answer, {partial, isMissing})` with what was said, as a file and in the same shape as the answer to one;
   * `on.refused(error)` where the server takes no session.
   */
  constructor(store, nextName, on) {
    Object.assign(this, { store, nextName, on });
    this.follow = new Follow($("live-text"), "Back to the last words", new Owner(), { block: "end" });
    $("live-text").after(this.follow.back);
    $("smaller").onclick = () => this.#resize(0.8);
    $("larger").onclick = () => this.#resize(1.25);
    $("full").onclick = () => (document.fullscreenElement ? document.exitFullscreen() : $("live").requestFullscreen());
    $("full").hidden = !document.fullscreenEnabled;
    $("record").onclick = () => (this.microphone ? this.microphone.stop() : this.#start());
  }

  get isOn() {
    return this.microphone !== null;
  }

  async #start() {
    show($("message"), "");
    const microphone = new Microphone(chosenOptions(), {
      block: (block) => this.#take(block),
      text: (turns) => this.#showText(turns),
      away: (error) => this.#onAway(error),
      back: () => this.#showStatus(LISTENING),
      stopping: () => this.#showStatus("Waiting for the last words …"),
      end: (turns, partial) => this.#end(turns, partial),
    });
    this.microphone = microphone;
    this.#setRecording(true);
    try {
      await microphone.start();
    } catch (error) {
      this.on.refused(error);
      microphone.end(error.message);
    }
  }

  #take(block) {
    this.tape ??= this.#newTape();
    this.tape.write(block);
    this.#showLevel(block);
  }

  #newTape() {
    const tape = new Tape(this.store, this.nextName(), () => this.microphone?.breakOff("The browser has no space for more sound."));
    tape.keep(answerOf([], 0));
    return tape;
  }

  #onAway(error) {
    this.on.refused(error);
    this.#showStatus(`Recording. Text comes later: ${error.message}`);
  }

  #showStatus(text) {
    if ($("live-status").textContent !== text) $("live-status").textContent = text;
  }

  /** For those who read it from far away. */
  #resize(factor) {
    this.size = Math.min(MOST_REM, Math.max(LEAST_REM, this.size * factor));
    $("live-text").style.fontSize = `${this.size}rem`;
  }

  #setRecording(isOn) {
    if (isOn) this.awake = navigator.wakeLock?.request("screen").catch(() => null); // the screen stays on
    else this.awake?.then((lock) => lock?.release());
    $("record").classList.toggle("is-recording", isOn);
    $("record").setAttribute("aria-pressed", isOn);
    $("record-label").textContent = isOn ? "Stop" : "Speak";
    $("live").hidden = $("speaking").hidden = !isOn;
    this.follow.rest();
    this.follow.isOn = true;
    this.#showStatus(`${LISTENING}${laterOf(chosenOptions())}`);
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
      if (turn.final && !turn.isRead) this.tape?.keep(answerOf(turns, this.microphone.duration));
      turn.isRead ||= turn.final;
    });
    if (shown.length) this.follow.show($("live-text").lastElementChild);
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

  async #end(turns, partial) {
    const { microphone, tape } = this;
    const { duration, missed } = microphone;
    if (tape) this.#showStatus("Keeping the sound …");
    const file = await tape?.close();
    this.microphone = this.tape = null;
    this.#setRecording(false);
    if (tape) this.on.end(tape, file, answerOf(turns, duration), { partial, isMissing: Boolean(missed) });
    else show($("message"), partial);
  }
}

/** Neither is done while one speaks. */
function laterOf({ task, speakers }) {
  if (task === "translate") return " The translation comes when you stop.";
  return speakers ? " Who speaks is added when you stop." : "";
}

function answerOf(turns, duration) {
  const said = turns.filter((turn) => turn.text);
  const segments = said.map(({ start, end, text }, id) => ({ id, start, end: Math.max(start, Math.min(end ?? duration, duration)), text }));
  return { text: said.map((turn) => turn.text.trim()).join(" "), duration, segments };
}
