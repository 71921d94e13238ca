// Speaks into `/v1/realtime`: sends the microphone's samples and gives the text while one speaks. It has one end,
// whatever happens: what it took is given back, and what was said until then is there.

import { clientSecret, headers, request } from "./api.js";
import { Owner } from "./owner.js";
import { wavOf } from "./wav.js";

const SESSIONS = "v1/realtime?intent=transcription";
const BROKEN = "The connection broke.";
const SILENT = "The browser gave no sound of the microphone.";
const UNPLUGGED = "The microphone went away.";
const LATE = "The server did not answer to the end.";
const RATE = 24000;
const END_MS = 1000; // in which the last block comes, unless the browser has stopped the audio
const FIRST_MS = 5000; // in which the first block comes
const LAST_WORDS_MS = 60000; // in which the next event comes behind the last block

const FAILURES = {
  NotAllowedError: "The microphone was not allowed. Allow it for this page in the browser's settings.",
  NotFoundError: "No microphone was found.",
  NotReadableError: "The microphone is in use by another program.",
};

export class Microphone {
  /** `options` = {language, prompt}; `on.text(turns)`, `on.level(samples)`, `on.stopping()`, `on.end(turns, partial)`. */
  constructor(options, on) {
    this.options = options;
    this.on = on;
    this.owner = new Owner();
    this.sound = new Owner(); // what hears; the socket goes on until its text is there
    this.owner.keep(() => this.sound.close());
    this.numUpdates = 0; // asked for and not answered
    this.turns = new Map(); // by item id: {start, end, text, final}
    this.blocks = [];
    this.numSamples = 0;
  }

  async start() {
    if (!navigator.mediaDevices) throw new Error("Browsers give the microphone to pages by https or localhost only.");
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } }).catch((error) => {
      throw new Error(FAILURES[error.name] || error.message);
    });
    for (const track of stream.getTracks()) {
      this.sound.keep(() => track.stop());
      this.sound.listen(track, "ended", () => this.#breakOff(UNPLUGGED));
    }
    if (!this.sound.isClosed) await this.#connect();
    if (!this.sound.isClosed) await this.#listen(stream);
  }

  async #connect() {
    const url = new URL(SESSIONS, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.hash = "";
    const secret = await clientSecret();
    if (this.sound.isClosed) return;
    this.socket = new WebSocket(url, ["realtime", ...(secret ? [`openai-insecure-api-key.${secret}`] : [])]);
    this.owner.keep(() => this.socket.close(1000));
    await new Promise((resolve, reject) => {
      this.owner.listen(this.socket, "message", ({ data }) => {
        const event = JSON.parse(data);
        if (event.type === "session.created") {
          this.isOpen = true;
          this.#sendOptions();
          resolve();
        }
        this.#onEvent(event);
      });
      this.owner.listen(this.socket, "close", ({ reason }) => {
        if (this.isOpen) this.end(reason || BROKEN);
        else reasonOfRefusal().then(reject, reject);
      });
      this.owner.keep(resolve); // stopped meanwhile
    });
  }

  #sendOptions() {
    const { language, prompt } = this.options;
    const keywords = prompt && prompt.replace(/[<>]/g, " ").split(",");
    const transcription = { ...(language && { language }), ...(keywords && { keywords }) };
    if (language || prompt) this.#update({ audio: { input: { transcription } } });
  }

  #update(session = {}) {
    this.numUpdates++;
    this.socket.send(JSON.stringify({ type: "session.update", session: { type: "transcription", ...session } }));
  }

  async #listen(stream) {
    let context = new AudioContext({ sampleRate: RATE });
    let source;
    try {
      source = context.createMediaStreamSource(stream);
    } catch { // a browser that does not resample: the worklet does
      context.close();
      context = new AudioContext();
      source = context.createMediaStreamSource(stream);
    }
    this.sound.keep(() => context.close());
    await context.audioWorklet.addModule(new URL("pcm-worklet.js", import.meta.url)).catch(() => {
      throw new Error("A part of this page is missing: reload it.");
    });
    if (this.sound.isClosed) return;
    const writer = new AudioWorkletNode(context, "pcm-writer", { numberOfOutputs: 0 });
    writer.port.onmessage = ({ data }) => (data.length ? this.#send(data) : this.#commit());
    source.connect(writer);
    this.writer = writer;
    this.sound.listen(context, "statechange", () => context.state === "running" || this.#breakOff(SILENT));
    const first = setTimeout(() => this.blocks.length || this.#breakOff(SILENT), FIRST_MS);
    this.sound.keep(() => clearTimeout(first));
  }

  /** The sound has ended by itself: the text of what there is of it is waited for. */
  #breakOff(reason) {
    this.partial ??= reason;
    this.stop();
  }

  #send(block) {
    if (this.hasCommitted) return;
    this.blocks.push(block);
    this.numSamples += block.length;
    this.on.level(block);
    if (this.socket.readyState !== WebSocket.OPEN) return;
    const audio = btoa(String.fromCharCode(...new Uint8Array(block.buffer)));
    this.socket.send(JSON.stringify({ type: "input_audio_buffer.append", audio }));
  }

  #onEvent({ type, item_id: id, ...event }) {
    const turn = this.turns.get(id);
    if (this.hasCommitted) this.#expect();
    if (type === "input_audio_buffer.speech_started") {
      this.turns.set(id, { start: event.audio_start_ms / 1000, end: null, text: "", final: false });
    } else if (type === "input_audio_buffer.speech_stopped") turn.end = event.audio_end_ms / 1000;
    else if (type === "input_audio_buffer.committed" && !turn) {
      this.turns.set(id, { start: this.duration, end: null, text: "", final: false });
    } else if (type.endsWith("transcription.delta")) turn.text += event.delta;
    else if (type.endsWith("transcription.completed")) Object.assign(turn, { text: event.transcript, final: true });
    else if (type.endsWith("transcription.failed")) {
      Object.assign(turn, { failed: event.error.message, final: true });
      this.partial ??= event.error.message;
    } else if (type === "session.updated") this.isHeard = --this.numUpdates === 0 && this.hasCommitted;
    else return;
    this.on.text([...this.turns.values()]);
    if (this.isHeard && [...this.turns.values()].every((t) => t.final)) this.end();
  }

  get duration() {
    return this.numSamples / RATE;
  }

  /** What was said is committed; ends when its text is there, or when one stops again. */
  stop() {
    if (this.isStopping) return this.end(LATE);
    this.isStopping = true;
    this.on.stopping();
    this.writer?.port.postMessage("end");
    const last = setTimeout(() => this.#commit(), this.writer ? END_MS : 0);
    this.owner.keep(() => clearTimeout(last));
  }

  /** Behind the last block. The server may not have heard all of it yet: its answer to an update says that it has. */
  #commit() {
    if (this.hasCommitted) return;
    this.hasCommitted = true;
    this.sound.close();
    if (!this.blocks.length || this.socket?.readyState !== WebSocket.OPEN) return this.end();
    this.socket.send(JSON.stringify({ type: "input_audio_buffer.commit" }));
    this.#update();
    this.#expect();
  }

  #expect() {
    clearTimeout(this.patience);
    this.patience = setTimeout(() => this.end(LATE), LAST_WORDS_MS);
  }

  /** With a reason what was said until then is there in part. */
  end(reason) {
    if (this.hasEnded) return;
    this.hasEnded = true;
    this.owner.close();
    clearTimeout(this.patience);
    this.on.end([...this.turns.values()], this.partial || reason || "");
  }

  /** What was said, as a file. */
  recording(name) {
    return wavOf(this.blocks, RATE, name);
  }
}

/** Pages never see the reply to a handshake: the server says the same to a GET. */
async function reasonOfRefusal() {
  await request(SESSIONS, { headers: headers() });
  return new Error(BROKEN);
}
