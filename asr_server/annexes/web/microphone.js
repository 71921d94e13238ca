// The microphone: its samples, and the text of the sessions that hear them, one behind the other. It has one end,
// whatever happens; a session that ends before is followed by another one.

import { Owner } from "./dom.js";
import { SCREEN } from "./options.js";
import { LATE, Session } from "./session.js";
import { RATE } from "./sounds.js";

export const LISTENING = "Listening …";
const SILENT = "The browser gave no sound of the microphone.";
const UNPLUGGED = "The microphone went away.";
const MUTE = "What you share has no sound: choose a tab, and share its sound too.";
const JOINED = "Words may be missing where the connection broke.";
const END_MS = 1000; // in which the last block comes, unless the browser has stopped the audio
const FIRST_MS = 5000; // in which the first block comes
const RETRY_MS = 1000;
const BLOCK = RATE / 10; // samples
const PAUSE_BLOCKS = 8; // of silence, which end a turn
const MOST_UNSENT = 100; // blocks of 100 ms, which the next session hears first

const FAILURES = {
  NotAllowedError: "The microphone was not allowed. Allow it for this page in the browser's settings.",
  NotFoundError: "No microphone was found.",
  NotReadableError: "The microphone is in use by another program.",
};

export class Microphone {
  sound = new Owner(); // what hears; the last session goes on until its text is there
  sessions = [];
  unsent = []; // blocks since the last session ended
  numSamples = 0;
  missed = ""; // why the sessions' text is not that of the whole sound

  /** `options` = {source, language, prompt, speakers}; what comes of it is told to `live`. */
  constructor(options, live) {
    [this.options, this.live] = [options, live];
  }

  async start() {
    if (!navigator.mediaDevices) throw new Error("Browsers give the microphone to pages by https or localhost only.");
    const stream = await streamOf(this.options.source).catch((error) => {
      throw new Error(FAILURES[error.name] || error.message);
    });
    for (const track of stream.getTracks()) {
      this.sound.keep(() => track.stop());
      this.sound.listen(track, "ended", () => this.breakOff(UNPLUGGED));
    }
    if (!stream.getAudioTracks().length) throw new Error(MUTE);
    if (!this.sound.isClosed) await this.#connect();
    if (!this.sound.isClosed) await this.#listen(stream);
  }

  async #connect() {
    const session = new Session(this.options, {
      text: () => this.live.showText(this.turns),
      end: (reason) => this.#onSessionEnd(reason),
    });
    this.sessions.push(session);
    await session.open();
    if (session.isOpen) for (const [block, time] of this.unsent.splice(0)) session.send(block, time);
  }

  #onSessionEnd(reason) {
    if (reason) this.missed = JOINED;
    if (this.sound.isClosed) this.end(reason);
    else if (!this.isStopping) this.#reconnect(new Error(reason));
  }

  /** As long as one speaks: the server may have been started anew, or be away for a while. */
  async #reconnect(error) {
    while (!this.isStopping) {
      this.live.showAway(error);
      try {
        await this.#connect();
        if (this.session.isOpen) this.live.showStatus(LISTENING);
        return;
      } catch (refusal) {
        this.sessions.pop();
        error = refusal;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }

  async #listen(stream) {
    const context = new AudioContext({ sampleRate: RATE });
    this.sound.keep(() => context.close());
    await context.audioWorklet.addModule(new URL("pcm-worklet.js", import.meta.url)).catch(() => {
      throw new Error("A part of this page is missing: reload it.");
    });
    if (this.sound.isClosed) return;
    this.writer = new AudioWorkletNode(context, "pcm-writer", { numberOfOutputs: 0 });
    this.writer.port.onmessage = ({ data }) => (data.length ? this.#hear(data) : this.#commit());
    context.createMediaStreamSource(stream).connect(this.writer);
    this.sound.listen(context, "statechange", () => context.state === "running" || this.breakOff(SILENT));
    const first = setTimeout(() => this.numSamples || this.breakOff(SILENT), FIRST_MS);
    this.sound.keep(() => clearTimeout(first));
  }

  /** The sound has ended by itself: the text of what there is of it is waited for. */
  breakOff(reason) {
    this.partial ??= reason;
    if (!this.isStopping) this.stop();
  }

  pause(isPaused) {
    for (let i = 0; isPaused && i < PAUSE_BLOCKS; i++) this.#hear(new Int16Array(BLOCK));
    this.isPaused = isPaused;
  }

  #hear(block) {
    if (this.sound.isClosed || this.isPaused) return;
    const time = this.duration;
    this.numSamples += block.length;
    this.live.take(block);
    if (this.session.isOpen) return this.session.send(block, time);
    this.unsent.push([block, time]);
    if (this.unsent.length > MOST_UNSENT) this.unsent.shift();
  }

  get duration() {
    return this.numSamples / RATE;
  }

  get session() {
    return this.sessions.at(-1);
  }

  get turns() {
    return this.sessions.flatMap(({ turns }) => [...turns.values()]);
  }

  /** What was said is committed; ends when its text is there, or when one stops again. */
  stop() {
    if (this.isStopping) return this.end(LATE);
    this.isStopping = true;
    this.live.showStatus("Waiting for the last words …");
    this.writer?.port.postMessage("end");
    this.last = setTimeout(() => this.#commit(), this.writer ? END_MS : 0);
  }

  #commit() {
    clearTimeout(this.last);
    if (this.sound.isClosed) return;
    this.sound.abort();
    if (this.session?.isOpen) this.session.commit();
    else this.end();
  }

  /** With a reason what was said until then is there in part. */
  end(reason) {
    if (this.hasEnded) return;
    this.hasEnded = this.isStopping = true;
    this.sound.abort();
    this.session?.end();
    const failed = this.turns.find((turn) => turn.failed)?.failed;
    this.live.end(this.turns, this.partial || failed || this.missed || reason);
  }
}

function streamOf(source) {
  if (source === SCREEN) return navigator.mediaDevices.getDisplayMedia({ video: true, audio: true });
  return navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, ...(source && { deviceId: source }) } });
}
