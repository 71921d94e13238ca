// A recording to be heard: a picture of who speaks when, which is also where to go to, and a button.

import { colorsOf, runsOf } from "./answer.js";
import { clock, h, label, partsOf } from "./dom.js";
import { captionsOf } from "./downloads.js";

const VIDEO = /^video\/|\.(mp4|m4v|mov|webm|mkv)$/i;
const NUM_BANDS = 500; // of the picture: closer ones are one

let playing = null; // one at a time
let last = Promise.resolve();

export const pausePlaying = () => playing?.audio.pause();

/** One after the other: a hundred files are not opened at once. */
const inTurn = (work) => (last = last.then(work, work));

export class Player {
  /** `onTime(seconds, isPlaying)` is called while it plays and when one goes elsewhere; -1 at rest at the start. */
  constructor(recording, owner, onTime) {
    const { file, name } = recording;
    Object.assign(this, partsOf("player-template", name), { recording, file, owner, onTime });
    this.answer = null;
    this.length = 0;
    this.isVideo = VIDEO.test(file.type || name);
    this.audio = this.isVideo ? h("video", { className: "screen", controls: true, hidden: true, "aria-label": name }) : h("audio");
    this.audio.preload = "metadata";
    this.rate.onchange = () => (this.audio.defaultPlaybackRate = this.audio.playbackRate = Number(this.rate.value));
    this.play.onclick = () => this.toggle();
    this.place.oninput = () => this.seek(Number(this.place.value));
    this.audio.onplay = this.audio.onpause = this.audio.onended = () => this.#onPlayState();
    this.audio.ontimeupdate = this.audio.onseeked = () => this.#onTime();
    owner.keep(() => this.rest());
    inTurn(() => this.#open());
  }

  get duration() {
    return Math.max(this.length, this.answer?.duration ?? 0);
  }

  async #open() {
    if (this.owner.isClosed) return;
    this.#load();
    await new Promise((resolve) => {
      this.audio.onloadedmetadata = resolve;
      this.audio.onerror = () => resolve((this.play.disabled = true));
      this.owner.keep(resolve);
    });
    if (this.owner.isClosed) return;
    this.length = Number.isFinite(this.audio.duration) ? this.audio.duration : 0;
    if (this.audio.paused && !(this.isVideo && this.answer)) this.rest();
    this.element.hidden = !this.length && !this.answer;
    this.#onTime();
    this.#draw();
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
    this.audio.preload = "auto"; // Chrome may not play what it has begun to load for its length
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
    this.answer = answer;
    if (!answer) return;
    this.element.hidden = false;
    if (this.isVideo) this.#caption(answer);
    this.#onTime();
    this.#draw();
  }

  /** What was corrected, over the pictures. */
  #caption(answer) {
    this.#load();
    this.showCaptions ??= this.#newTrack("captions", "Transcript", "showing");
    this.showCaptions(answer);
    if (!answer.translation) return;
    this.showEnglish ??= this.#newTrack("subtitles", "English", "disabled");
    this.showEnglish(answer.translation);
  }

  /** Returns what shows an answer in it. It stays, and so does what one has chosen in the browser's menu. */
  #newTrack(kind, label, mode) {
    const track = Object.assign(this.audio.addTextTrack(kind, label), { mode });
    let shown = [];
    return (answer) => {
      for (const cue of shown) track.removeCue(cue);
      shown = captionsOf(answer);
      for (const cue of shown) track.addCue(cue);
    };
  }

  changeRate(step) {
    const { options, selectedIndex } = this.rate;
    this.rate.selectedIndex = Math.min(options.length - 1, Math.max(0, selectedIndex + step));
    this.rate.onchange();
  }

  seek(time) {
    this.#load();
    this.audio.currentTime = Math.min(Math.max(0, time), this.duration);
    this.#onTime();
  }

  #onPlayState() {
    const isPaused = this.audio.paused;
    this.play.dataset.label = isPaused ? "Play" : "Pause";
    label(this.element, this.recording.name);
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
    this.place.max = this.duration;
    this.place.value = time;
    this.place.ariaValueText = `${clock(time)} of ${clock(this.duration)}`;
    this.wave.style.setProperty("--at", time / this.duration || 0);
    this.onTime(this.audio.paused && time === 0 ? -1 : time, !this.audio.paused);
  }

  /** Bands are speech, in the colour of who speaks. */
  #draw() {
    const { duration, answer } = this;
    if (!answer || !duration) return;
    const colors = colorsOf(answer);
    const isApart = (word, before) => word.speaker !== before.speaker || word.start - before.end >= duration / NUM_BANDS;
    const bands = runsOf(answer.words?.length ? answer.words : answer.segments, isApart);
    const percent = (time) => `${((time / duration) * 100).toFixed(3)}%`;
    const stop = (band) => {
      const [start, end, color] = [percent(band[0].start), percent(band.at(-1).end), colors.get(band[0].speaker) ?? "wave"];
      return `transparent ${start}, var(--${color}) ${start} ${end}, transparent ${end}`;
    };
    this.bands.style.background = bands.length ? `linear-gradient(to right, ${bands.map(stop).join(", ")})` : "none";
  }
}
