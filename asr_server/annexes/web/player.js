// A recording to be heard: its picture, which is also where to go to, and a button.

import { clock, h } from "./dom.js";
import { FORMATS } from "./downloads.js";
import { analyse, draw, inTurn, loudnessOfWords } from "./waveform.js";

const PLAY = "M8 5v14l11-7z";
const PAUSE = "M7 5h4v14H7zM13 5h4v14h-4z";
const MEANING = "Bands are speech, gaps are silence; at dashed lines the server cut the recording into chunks. Stripes are speakers.";

const VIDEO = /^video\/|\.(mp4|m4v|mov|webm|mkv)$/i;
const MOST_MISSING_S = 0.5; // of a video whose sound begins late
const RATES = [0.75, 1, 1.25, 1.5, 1.75, 2];

let playing = null; // one at a time

function pathIcon(path) {
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  icon.setAttribute("viewBox", "0 0 24 24");
  icon.setAttribute("aria-hidden", "true");
  icon.innerHTML = `<path d="${path}"/>`;
  return icon;
}

export class Player {
  /** `onTime(seconds, isPlaying)` is called while it plays and when one goes elsewhere; -1 at rest at the start. */
  constructor(file, name, owner, onTime) {
    [this.file, this.name, this.owner, this.onTime] = [file, name, owner, onTime];
    this.answer = null;
    this.length = 0;
    this.isVideo = VIDEO.test(file.type || name);
    this.audio = this.isVideo ? h("video", { className: "screen", controls: true, hidden: true, "aria-label": name }) : h("audio");
    this.audio.preload = "metadata";
    this.play = h("button", { type: "button", className: "icon play", "aria-label": `Play ${name}` }, pathIcon(PLAY));
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.wave = h("div", { className: "wave", role: "slider", tabindex: "0", "aria-valuemin": "0", "aria-label": `Position in ${name}`, title: MEANING }, this.canvas);
    this.clock = h("span", { className: "clock" });
    this.rate = h("select", { className: "rate", "aria-label": `Speed of ${name}`, title: "Speed" }, ...RATES.map((rate) => h("option", { value: rate }, `${rate} ×`)));
    this.rate.value = "1";
    this.rate.onchange = () => (this.audio.defaultPlaybackRate = this.audio.playbackRate = Number(this.rate.value));
    this.element = h("div", { className: "player", hidden: true }, this.play, this.wave, this.clock, this.rate);
    this.play.onclick = () => this.toggle();
    this.wave.onpointerdown = (event) => this.seek((event.offsetX / this.wave.clientWidth) * this.duration);
    this.wave.onkeydown = (event) => this.#onKey(event);
    this.audio.onplay = this.audio.onpause = this.audio.onended = () => this.#onPlayState();
    this.audio.ontimeupdate = this.audio.onseeked = () => this.#onTime();
    this.#watch();
    this.ready = inTurn(() => this.#analyse());
  }

  #watch() {
    const size = new ResizeObserver(() => this.#draw());
    size.observe(this.wave);
    this.owner.keep(() => size.disconnect());
    this.owner.keep(() => this.rest());
    this.owner.keep(() => URL.revokeObjectURL(this.track?.src));
    this.owner.listen(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.#draw());
  }

  get duration() {
    return (this.isVideo && this.length) || this.picture?.duration || this.length || this.answer?.duration || 0;
  }

  async #analyse() {
    if (this.owner.isClosed) return;
    this.#load();
    await new Promise((resolve) => {
      this.audio.onloadedmetadata = resolve;
      this.audio.onerror = () => resolve((this.play.disabled = true));
      this.owner.keep(resolve);
    });
    if (this.owner.isClosed) return;
    this.length = Number.isFinite(this.audio.duration) ? this.audio.duration : 0;
    this.picture = await analyse(this.file, this.audio.duration);
    if (this.audio.paused && !(this.isVideo && this.answer)) this.rest();
    this.element.hidden = !this.picture && !this.answer;
    this.#onTime();
  }

  /** A browser has few players: only what is played has one. */
  #load() {
    if (this.url || this.owner.isClosed) return;
    this.url = URL.createObjectURL(this.file);
    const at = this.audio.currentTime;
    this.audio.src = this.url;
    this.audio.currentTime = at;
    this.audio.onloadeddata = () => (this.audio.hidden = !this.audio.videoWidth); // a video may have sound alone
  }

  /** Gives the browser's player back; the place in the recording stays. */
  rest() {
    if (!this.url) return;
    const at = this.audio.currentTime;
    this.audio.pause();
    if (playing === this) playing = null;
    this.audio.onerror = null;
    URL.revokeObjectURL(this.url);
    this.url = null;
    this.audio.hidden = true;
    this.audio.removeAttribute("src");
    this.audio.load();
    this.audio.currentTime = at;
  }

  toggle() {
    if (!this.audio.paused) return this.audio.pause();
    this.#load();
    this.audio.play().catch(() => {}); // closed or folded meanwhile
  }

  get isPlaying() {
    return !this.audio.paused;
  }

  /** What was heard, so that it can be seen in the picture. */
  show(answer) {
    if (answer) this.element.hidden = false;
    this.answer = answer;
    if (!answer) return;
    if (this.isVideo) this.#caption(answer);
    this.#onTime();
  }

  /** What was corrected, over the pictures. */
  #caption(answer) {
    this.#load();
    URL.revokeObjectURL(this.track?.src);
    const mode = this.track?.track.mode ?? "showing"; // one may have switched them off
    this.track?.remove();
    const src = URL.createObjectURL(new Blob([FORMATS.vtt.render(answer)], { type: "text/vtt" }));
    this.track = h("track", { kind: "captions", label: "Transcript", src });
    this.audio.append(this.track);
    this.track.track.mode = mode;
  }

  seek(time) {
    this.#load();
    this.audio.currentTime = Math.min(Math.max(0, time), this.duration);
    this.#onTime();
  }

  #onKey(event) {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };
    const ends = { Home: 0, End: this.duration };
    if (event.key in steps) this.seek(this.audio.currentTime + steps[event.key]);
    else if (event.key in ends) this.seek(ends[event.key]);
    else if (event.key === " ") this.toggle();
    else return;
    event.preventDefault();
  }

  #onPlayState() {
    const isPaused = this.audio.paused;
    this.play.replaceChildren(pathIcon(isPaused ? PLAY : PAUSE));
    this.play.setAttribute("aria-label", `${isPaused ? "Play" : "Pause"} ${this.name}`);
    if (isPaused) return;
    if (playing !== this) playing?.audio.pause();
    playing = this;
    this.#follow();
  }

  #follow() {
    this.#onTime();
    if (!this.audio.paused) requestAnimationFrame(() => this.#follow());
  }

  #onTime() {
    const time = this.audio.currentTime;
    this.clock.textContent = `${clock(time)} / ${clock(this.duration)}`;
    this.wave.setAttribute("aria-valuemax", this.duration.toFixed(1));
    this.wave.setAttribute("aria-valuenow", time.toFixed(1));
    this.wave.setAttribute("aria-valuetext", `${clock(time)} of ${clock(this.duration)}`);
    this.onTime(this.audio.paused && time === 0 ? -1 : time, !this.audio.paused);
    this.#draw();
  }

  #draw() {
    if (this.element.hidden || !this.wave.clientWidth) return;
    const { duration, answer } = this;
    const isWhole = this.picture && Math.abs(this.picture.duration - duration) < MOST_MISSING_S;
    if (!isWhole && answer && duration) this.words ??= loudnessOfWords(answer, duration);
    const peaks = isWhole ? this.picture.peaks : this.words;
    draw(this.canvas, { peaks, duration, segments: answer?.segments || [], position: this.audio.currentTime });
  }
}
