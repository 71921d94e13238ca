// Speaks into `/v1/realtime`: sends the microphone's samples and gives the text while one speaks.

import { apiKey, request, headers } from "./api.js";

const SESSIONS = "v1/realtime?intent=transcription";
const BROKEN = "The connection broke.";
const RATE = 24000;
const END_MS = 1000; // in which the last block comes, unless the browser has stopped the audio

const FAILURES = {
  NotAllowedError: "The microphone was not allowed. Allow it for this page in the browser's settings.",
  NotFoundError: "No microphone was found.",
  NotReadableError: "The microphone is in use by another program.",
};

export class Microphone {
  /** `options` = {language, prompt}; `on.text(turns)`, `on.level(samples)`, `on.end(turns, error)`. */
  constructor(options, on) {
    this.options = options;
    this.on = on;
    this.numUpdates = 0; // asked for and not answered
    this.turns = new Map(); // by item id: {start, end, text, final}
    this.blocks = [];
  }

  async start() {
    if (!navigator.mediaDevices) throw new Error("Browsers give the microphone to pages by https or localhost only.");
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    } catch (error) {
      throw new Error(FAILURES[error.name] || error.message);
    }
    if (!this.isStopping) await this.#connect();
    if (!this.isStopping) await this.#listen();
    else this.#release();
  }

  #connect() {
    const url = new URL(SESSIONS, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.hash = "";
    const key = apiKey();
    this.socket = new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
    return new Promise((resolve, reject) => {
      this.socket.onclose = () => reasonOfRefusal().then(reject, reject).finally(() => this.#release());
      this.socket.onmessage = ({ data }) => {
        const event = JSON.parse(data);
        if (event.type === "session.created") {
          this.socket.onclose = ({ reason }) => this.#end(reason || BROKEN);
          this.#sendOptions();
          resolve();
        }
        this.#onEvent(event);
      };
    });
  }

  #sendOptions() {
    const { language, prompt } = this.options;
    const transcription = { ...(language && { language }), ...(prompt && { prompt }) };
    if (language || prompt) this.#update({ audio: { input: { transcription } } });
  }

  #update(session = {}) {
    this.numUpdates++;
    this.socket.send(JSON.stringify({ type: "session.update", session: { type: "transcription", ...session } }));
  }

  async #listen() {
    this.context = new AudioContext({ sampleRate: RATE });
    let source;
    try {
      source = this.context.createMediaStreamSource(this.stream);
    } catch { // a browser that does not resample: the worklet does
      this.context = new AudioContext();
      source = this.context.createMediaStreamSource(this.stream);
    }
    await this.context.audioWorklet.addModule(new URL("pcm-worklet.js", import.meta.url));
    const writer = new AudioWorkletNode(this.context, "pcm-writer", { numberOfOutputs: 0 });
    writer.port.onmessage = ({ data }) => (data.length ? this.#send(data) : this.#commit());
    source.connect(writer);
    this.writer = writer;
  }

  #send(block) {
    if (this.hasCommitted) return;
    this.blocks.push(block);
    this.on.level(block);
    if (this.socket.readyState !== WebSocket.OPEN) return;
    const audio = btoa(String.fromCharCode(...new Uint8Array(block.buffer)));
    this.socket.send(JSON.stringify({ type: "input_audio_buffer.append", audio }));
  }

  #onEvent({ type, item_id: id, ...event }) {
    const turn = this.turns.get(id);
    if (type === "input_audio_buffer.speech_started") {
      this.turns.set(id, { start: event.audio_start_ms / 1000, end: null, text: "", final: false });
    } else if (type === "input_audio_buffer.speech_stopped") turn.end = event.audio_end_ms / 1000;
    else if (type === "input_audio_buffer.committed" && !turn) {
      this.turns.set(id, { start: this.duration, end: null, text: "", final: false });
    } else if (type.endsWith("transcription.delta")) turn.text += event.delta;
    else if (type.endsWith("transcription.completed")) Object.assign(turn, { text: event.transcript, final: true });
    else if (type.endsWith("transcription.failed")) Object.assign(turn, { failed: event.error.message, final: true });
    else if (type === "session.updated") this.isHeard = --this.numUpdates === 0 && this.hasCommitted;
    else return;
    this.on.text([...this.turns.values()]);
    if (this.isHeard && [...this.turns.values()].every((t) => t.final)) this.#end();
  }

  get duration() {
    return this.blocks.reduce((sum, block) => sum + block.length, 0) / RATE;
  }

  /** What was said is committed; ends when its text is there. */
  stop() {
    if (this.isStopping) return;
    this.isStopping = true;
    this.writer?.port.postMessage("end");
    setTimeout(() => this.#commit(), this.writer ? END_MS : 0);
  }

  /** Behind the last block. The server may not have heard all of it yet: its answer to an update says that it has. */
  #commit() {
    if (this.hasCommitted) return;
    this.hasCommitted = true;
    this.#release();
    if (this.socket?.readyState !== WebSocket.OPEN) return this.#end();
    this.socket.send(JSON.stringify({ type: "input_audio_buffer.commit" }));
    this.#update();
  }

  #release() {
    for (const track of this.stream?.getTracks() || []) track.stop();
    this.context?.close();
    this.context = null;
  }

  #end(error) {
    if (this.hasEnded) return;
    this.hasEnded = true;
    this.#release();
    this.socket?.close(1000);
    this.on.end([...this.turns.values()], error);
  }

  /** What was said, as a file. */
  recording(name) {
    return new File([wavHeader(this.blocks.reduce((sum, b) => sum + b.byteLength, 0)), ...this.blocks], name, {
      type: "audio/wav",
    });
  }
}

/** Pages never see the reply to a handshake: the server says the same to a GET. */
async function reasonOfRefusal() {
  await request(SESSIONS, { headers: headers() });
  return new Error(BROKEN);
}

function wavHeader(numBytes) {
  const view = new DataView(new ArrayBuffer(44));
  const text = (at, letters) => [...letters].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + numBytes, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // mono
  view.setUint32(24, RATE, true);
  view.setUint32(28, RATE * 2, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, numBytes, true);
  return view.buffer;
}
