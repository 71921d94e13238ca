// What is seen while one speaks: a bar with the level of the voice and the time, and the text so far.

import { $, clock, h, Owner, show } from "./dom.js";
import { Follow } from "./follow.js";
import { LISTENING, Microphone } from "./microphone.js";
import { chosenOptions, offerSources } from "./options.js";
import { pausePlaying } from "./player.js";
import { Tape } from "./sounds.js";

const [LEAST_REM, MOST_REM] = [1, 6];

export class Live {
  size = 1.5; // of the text, in rem
  microphone = null;
  tape = null;

  constructor(cards, serving) {
    Object.assign(this, { cards, serving });
    this.follow = new Follow($("live-text"), "Back to the last words", new Owner(), { block: "end" });
    $("live-text").after(this.follow.back);
    $("smaller").onclick = () => this.#resize(0.8);
    $("larger").onclick = () => this.#resize(1.25);
    $("full").onclick = () => (document.fullscreenElement ? document.exitFullscreen() : $("live").requestFullscreen());
    $("full").hidden = !document.fullscreenEnabled;
    $("record").onclick = () => this.isOn || this.#start();
    $("stop").onclick = () => this.microphone?.stop();
    $("pause").onclick = () => this.#pause(!this.microphone.isPaused);
  }

  get isOn() {
    return this.microphone !== null;
  }

  async #start() {
    pausePlaying(); // it would be heard too
    const microphone = new Microphone(chosenOptions(), this);
    this.microphone = microphone;
    this.#setRecording(true);
    try {
      await microphone.start();
      offerSources();
    } catch (error) {
      this.serving.lockOn(error);
      microphone.end(error.message);
    }
  }

  #pause(isPaused) {
    this.microphone.pause(isPaused);
    $("pause").setAttribute("aria-pressed", isPaused);
    this.showStatus(isPaused ? "Paused: nothing is heard." : LISTENING);
  }

  take(block) {
    if (!this.tape) {
      const onFull = () => this.microphone?.breakOff("The browser has no space for more sound.");
      this.tape = new Tape(this.cards.store, this.cards.nextName(), onFull);
      this.tape.keep(answerOf([], 0));
    }
    this.tape.write(block);
    this.#showLevel(block);
  }

  showAway(error) {
    this.serving.lockOn(error);
    this.showStatus(`Recording. Text comes later: ${error.message}`);
  }

  showStatus(text) {
    if ($("live-status").textContent !== text) $("live-status").textContent = text;
  }

  #resize(factor) {
    this.size = Math.min(MOST_REM, Math.max(LEAST_REM, this.size * factor));
    $("live-text").style.fontSize = `${this.size}rem`;
  }

  #setRecording(isOn) {
    if (isOn) this.awake = navigator.wakeLock?.request("screen").catch(() => null); // the screen stays on
    else this.awake?.then((lock) => lock?.release());
    const isAtButton = [$("record"), $("stop")].includes(document.activeElement);
    $("live").hidden = $("speaking").hidden = !isOn;
    $("transcribe-view").classList.toggle("is-live", isOn); // with :has each frame would look at each word
    if (isAtButton) $(isOn ? "stop" : "record").focus();
    $("pause").setAttribute("aria-pressed", false);
    this.follow.rest();
    this.follow.isOn = true;
    this.showStatus(`${LISTENING}${laterOf(chosenOptions())}`);
    for (const id of ["live-text", "live-said", "live-time"]) $(id).replaceChildren();
    $("live-level").value = 0;
  }

  /** Each turn in an element of its own, with what may change at its end; one that is final is read out, once. */
  showText(turns) {
    const shown = $("live-text").children;
    turns.forEach((turn, i) => {
      const text = (turn.failed || writtenOf(turn)) + (turn.tail ? "" : " ");
      if (!shown[i]) $("live-text").append(h("span", { dir: "auto" }, "", h("i")));
      const [said, tail] = shown[i].childNodes;
      if (said.data !== text) said.data = text;
      if (tail.textContent !== turn.tail) tail.textContent = turn.tail;
      if (turn.final && !turn.isRead) $("live-said").append(h("p", { dir: "auto" }, text));
      if (turn.final && !turn.isRead) this.tape?.keep(answerOf(turns, this.microphone.duration));
      turn.isRead ||= turn.final;
    });
    if (shown.length) this.follow.show($("live-text").lastElementChild);
  }

  #showLevel(block) {
    const loudness = Math.sqrt(block.reduce((sum, value) => sum + (value / 32768) ** 2, 0) / block.length);
    $("live-level").value = Math.sqrt(loudness * 3); // as one hears it
    $("live-time").textContent = clock(this.microphone?.duration);
  }

  async end(turns, partial) {
    const { microphone, tape } = this;
    const { duration, missed } = microphone;
    if (tape) this.showStatus("Keeping the sound …");
    const file = await tape?.close();
    this.microphone = this.tape = null;
    this.#setRecording(false);
    if (!tape) return show($("message"), partial);
    const [recording] = this.cards.add([[file, tape.name, tape.id]]);
    const { task, speakers } = chosenOptions();
    const kept = recording.finish(answerOf(turns, duration), { partial });
    if (missed || task === "translate" || speakers) this.cards.enqueue([recording]); // none of it is done while one speaks
    if (tape.reason) show($("message"), `The sound of ${tape.name} could not be kept in this browser: ${tape.reason}. Download it.`);
    await kept;
    tape.release();
  }
}

/** Neither is all done while one speaks. */
function laterOf({ task, speakers }) {
  if (task === "translate") return " The translation comes when you stop.";
  return speakers ? " Who speaks is made sure when you stop." : "";
}

/** On a line for each speaker, where the session tells them apart. */
const writtenOf = ({ text, parts }) => (parts.length ? parts.map((part) => `\n${part.speaker}: ${part.text.trim()}`).join("") : text);

function answerOf(turns, duration) {
  const said = turns.filter((turn) => turn.text);
  const parts = said.flatMap((turn) => (turn.parts.length ? turn.parts : [turn]));
  const segments = parts.map(({ start, end, text, speaker }, id) => {
    const until = Math.max(start, Math.min(end ?? duration, duration));
    return { id, start, end: until, text, ...(speaker && { speaker }) };
  });
  const words = said.flatMap((turn) => turn.words);
  return { text: segments.map(({ text }) => text.trim()).join(" "), duration, segments, ...(words.length && { words }) };
}
