// A recording to be heard: its picture, which is also where to go to, and a button.

import { clock, h } from "./dom.js";
import { analyse, draw, loudnessOfWords } from "./waveform.js";

const PLAY = "M8 5v14l11-7z";
const PAUSE = "M7 5h4v14H7zM13 5h4v14h-4z";
const MEANING = "Bands are speech, gaps are silence; at dashed lines the server cut the recording into chunks. Stripes are speakers.";

function pathIcon(path) {
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  icon.setAttribute("viewBox", "0 0 24 24");
  icon.setAttribute("aria-hidden", "true");
  icon.innerHTML = `<path d="${path}"/>`;
  return icon;
}

export class Player {
  /** `onTime(seconds)` is called while it plays and when one goes elsewhere; -1 at rest at the start. */
  constructor(file, name, onTime) {
    this.name = name;
    this.onTime = onTime;
    this.answer = null;
    this.audio = h("audio", { preload: "metadata", src: URL.createObjectURL(file) });
    this.play = h("button", { type: "button", className: "icon play", "aria-label": `Play ${name}` }, pathIcon(PLAY));
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.wave = h("div", { className: "wave", role: "slider", tabindex: "0", "aria-label": `Position in ${name}`, title: MEANING }, this.canvas);
    this.clock = h("span", { className: "clock" });
    this.element = h("div", { className: "player", hidden: true }, this.play, this.wave, this.clock, this.audio);
    this.play.onclick = () => (this.audio.paused ? this.audio.play() : this.audio.pause());
    this.wave.onpointerdown = (event) => this.seek((event.offsetX / this.wave.clientWidth) * this.duration);
    this.wave.onkeydown = (event) => this.#onKey(event);
    this.audio.onplay = this.audio.onpause = this.audio.onended = () => this.#onPlayState();
    this.audio.ontimeupdate = this.audio.onseeked = () => this.#onTime();
    new ResizeObserver(() => this.#draw()).observe(this.wave);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    this.ready = this.#analyse(file);
  }

  get duration() {
    const known = Number.isFinite(this.audio.duration) ? this.audio.duration : 0;
    return this.picture?.duration || known || this.answer?.duration || 0;
  }

  async #analyse(file) {
    await new Promise((resolve) => {
      this.audio.onloadedmetadata = resolve;
      this.audio.onerror = () => resolve((this.play.disabled = true));
    });
    this.picture = await analyse(file, this.audio.duration);
    this.element.hidden = !this.picture && !this.answer;
    this.#onTime();
  }

  /** What was heard, so that it can be seen in the picture. */
  show(answer) {
    this.answer = answer;
    this.element.hidden = false;
    this.#onTime();
  }

  close() {
    this.audio.pause();
    URL.revokeObjectURL(this.audio.src);
  }

  seek(time) {
    this.audio.currentTime = Math.min(Math.max(0, time), this.duration);
    this.#onTime();
  }

  #onKey(event) {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };
    const ends = { Home: 0, End: this.duration };
    if (event.key in steps) this.seek(this.audio.currentTime + steps[event.key]);
    else if (event.key in ends) this.seek(ends[event.key]);
    else if (event.key === " ") this.play.click();
    else return;
    event.preventDefault();
  }

  #onPlayState() {
    const isPaused = this.audio.paused;
    this.play.replaceChildren(pathIcon(isPaused ? PLAY : PAUSE));
    this.play.setAttribute("aria-label", `${isPaused ? "Play" : "Pause"} ${this.name}`);
    if (!isPaused) this.#follow();
  }

  #follow() {
    this.#onTime();
    if (!this.audio.paused) requestAnimationFrame(() => this.#follow());
  }

  #onTime() {
    const time = this.audio.currentTime;
    this.clock.textContent = `${clock(time)} / ${clock(this.duration)}`;
    this.wave.setAttribute("aria-valuemin", "0");
    this.wave.setAttribute("aria-valuemax", this.duration.toFixed(1));
    this.wave.setAttribute("aria-valuenow", time.toFixed(1));
    this.wave.setAttribute("aria-valuetext", `${clock(time)} of ${clock(this.duration)}`);
    this.onTime(this.audio.paused && time === 0 ? -1 : time);
    this.#draw();
  }

  #draw() {
    if (this.element.hidden || !this.wave.clientWidth) return;
    const { duration, answer } = this;
    if (!this.picture && answer && duration) this.words ??= loudnessOfWords(answer, duration);
    const peaks = this.picture?.peaks || this.words;
    draw(this.canvas, { peaks, duration, segments: answer?.segments || [], position: this.audio.currentTime });
  }
}
