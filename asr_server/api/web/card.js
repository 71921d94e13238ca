// One recording: its progress, then waveform, player, text and downloads.

import { transcribe } from "./api.js";
import { clock, h, show } from "./dom.js";
import { download, FORMATS } from "./downloads.js";
import { Transcript } from "./transcript.js";
import { analyse, draw } from "./waveform.js";

const PLAY = "M8 5v14l11-7z";
const PAUSE = "M7 5h4v14H7zM13 5h4v14h-4z";
const WAVE_MEANING = "Bands are speech, gaps are silence; at dashed lines the server cut the recording into chunks.";

function pathIcon(path) {
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  icon.setAttribute("viewBox", "0 0 24 24");
  icon.setAttribute("aria-hidden", "true");
  icon.innerHTML = `<path d="${path}"/>`;
  return icon;
}

const inMebibytes = (bytes) => `${Number((bytes / 2 ** 20).toFixed(1))} MiB`;

const tooLarge = (bytes, most) =>
  `This file has ${inMebibytes(bytes)}, and the server takes ${inMebibytes(most)} at most. As mp3, m4a or opus it is smaller.`;

export class Card {
  constructor(file, name, { onRemove, onRetry }) {
    this.file = file;
    this.name = name;
    this.segments = [];
    this.abort = new AbortController();
    this.#build(onRemove, onRetry);
    this.ready = this.#analyse();
  }

  #build(onRemove, onRetry) {
    this.facts = h("p", { className: "facts" }, h("span", {}, "waiting"));
    this.remove = h("button", { type: "button", className: "icon small", "aria-label": `Remove ${this.name}` }, "✕");
    this.progress = h("progress", { max: 1, value: 0, "aria-label": `Progress of ${this.name}` });
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    this.retry = h("button", { type: "button", className: "small retry", hidden: true }, "Try again");
    this.audio = h("audio", { preload: "metadata", src: URL.createObjectURL(this.file) });
    this.text = h("p", { className: "transcript" });
    this.transcript = new Transcript(this.text, (time) => this.#seek(time));
    this.downloads = h("div", { className: "row downloads", hidden: true });
    this.#buildPlayer();
    const head = h("div", { className: "card-head" }, h("div", {}, h("h2", {}, this.name), this.facts), this.remove);
    const parts = [head, this.progress, this.error, this.retry, this.player, this.text, this.downloads, this.audio];
    this.element = h("li", { className: "card is-working" }, ...parts);
    this.remove.onclick = () => {
      this.abort.abort();
      this.audio.pause();
      URL.revokeObjectURL(this.audio.src);
      onRemove(this);
    };
    this.retry.onclick = () => onRetry(this);
  }

  #buildPlayer() {
    this.play = h("button", { type: "button", className: "icon play", "aria-label": `Play ${this.name}` }, pathIcon(PLAY));
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.wave = h("div", { className: "wave", role: "slider", tabindex: "0", "aria-label": `Position in ${this.name}`, title: WAVE_MEANING }, this.canvas);
    this.clock = h("span", { className: "clock" });
    this.player = h("div", { className: "player", hidden: true }, this.play, this.wave, this.clock);
    this.play.onclick = () => (this.audio.paused ? this.audio.play() : this.audio.pause());
    this.wave.onpointerdown = (event) => this.#seek((event.offsetX / this.wave.clientWidth) * this.duration);
    this.wave.onkeydown = (event) => this.#onWaveKey(event);
    this.audio.onplay = this.audio.onpause = this.audio.onended = () => this.#onPlayState();
    this.audio.ontimeupdate = this.audio.onseeked = () => this.#onTime();
    this.audio.onloadedmetadata = () => this.#onTime();
    this.audio.onerror = () => (this.play.disabled = true);
    new ResizeObserver(() => this.#draw()).observe(this.wave);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  get duration() {
    const known = Number.isFinite(this.audio.duration) ? this.audio.duration : 0;
    return this.picture?.duration || known || this.answer?.duration || 0;
  }

  async #analyse() {
    this.picture = await analyse(this.file);
    this.player.hidden = !this.picture && !this.error.hidden;
    this.#onTime();
  }

  // -- Being transcribed --

  async run(model, language, maxUploadBytes) {
    this.maxUploadBytes = maxUploadBytes;
    this.#begin();
    try {
      if (this.file.size > maxUploadBytes) throw new Error(tooLarge(this.file.size, maxUploadBytes));
      const answer = await transcribe(this.file, model, language, this.#listeners(), this.abort.signal);
      this.finish(answer, (performance.now() - this.startedAt) / 1000);
      return true;
    } catch (error) {
      this.#fail(error);
      return false;
    }
  }

  #begin() {
    this.startedAt = performance.now();
    this.transcript.element.replaceChildren();
    show(this.error, "");
    this.retry.hidden = true;
    this.progress.hidden = false;
    this.element.classList.add("is-working");
  }

  #listeners() {
    return {
      upload: (share) => {
        if (share < 1) this.progress.value = share;
        else this.progress.removeAttribute("value"); // no one knows how far it is
        this.#setFacts(share < 1 ? `uploading, ${Math.round(share * 100)} %` : "listening …");
      },
      delta: (text) => this.transcript.append(text),
      wait: (seconds) => this.#setFacts(`the server is busy; asking again in ${seconds} s`),
    };
  }

  #fail(error) {
    this.#end("not transcribed");
    this.player.hidden = !this.picture; // nothing to hear either
    show(this.error, error.message);
    this.retry.hidden = this.file.size > this.maxUploadBytes; // nothing would be different
  }

  /** `took`: seconds from start to end, if that says anything. */
  finish(answer, took) {
    this.answer = answer;
    this.segments = answer.segments || [];
    const language = answer.language && answer.language !== "unknown" ? answer.language : "";
    const facts = [clock(answer.duration), language.charAt(0).toUpperCase() + language.slice(1)];
    if (took) facts.push(`${took.toFixed(1)} s`, `${Math.max(1, Math.round(answer.duration / took))} × real time`);
    this.#end(...facts.filter(Boolean));
    this.player.hidden = false;
    this.transcript.finish(answer);
    this.#offerDownloads();
    this.#onTime();
  }

  #end(...facts) {
    this.element.classList.remove("is-working");
    this.progress.hidden = true;
    this.#setFacts(...facts);
  }

  #setFacts(...facts) {
    this.facts.replaceChildren(...facts.map((fact) => h("span", {}, fact)));
  }

  #offerDownloads() {
    const buttons = Object.keys(FORMATS).map((format) => {
      const label = `Download ${this.name} as ${format}`;
      const button = h("button", { type: "button", className: "small", "aria-label": label }, format.toUpperCase());
      button.onclick = () => download(this.answer, format, this.name);
      return button;
    });
    const copy = h("button", { type: "button", className: "small" }, "Copy text");
    copy.onclick = async () => {
      await navigator.clipboard.writeText(this.answer.text);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy text"), 1500);
    };
    this.downloads.replaceChildren(...buttons, copy);
    this.downloads.hidden = false;
  }

  // -- Being played --

  #seek(time) {
    this.audio.currentTime = Math.min(Math.max(0, time), this.duration);
    this.#onTime();
  }

  #onWaveKey(event) {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };
    const ends = { Home: 0, End: this.duration };
    if (event.key in steps) this.#seek(this.audio.currentTime + steps[event.key]);
    else if (event.key in ends) this.#seek(ends[event.key]);
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
    this.transcript.light(this.audio.paused && time === 0 ? -1 : time);
    this.#draw();
  }

  #draw() {
    if (this.player.hidden || !this.wave.clientWidth) return;
    const { duration, segments } = this;
    draw(this.canvas, { peaks: this.picture?.peaks, duration, segments, position: this.audio.currentTime });
  }
}
