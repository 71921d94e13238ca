// One session of `/v1/realtime`: samples in, turns of text out. It ends once, by itself or behind what was committed.

import { clientSecret, request } from "./api.js";
import { Owner } from "./dom.js";
import { RATE } from "./sounds.js";

const SESSIONS = "v1/realtime?intent=transcription";
const BROKEN = "The connection broke.";
export const LATE = "The server did not answer to the end.";
const UPDATE = "update"; // of the events that are answered, or refused
const LAST_WORDS_MS = 60000; // in which the next event comes behind the last block
const PADDING_S = 0.3; // the server's: a turn begins so long before its first word
const SILENCE_S = 0.5; // and ends so long behind its last one
const INTERIM = "item.input_audio_transcription.interim"; // each reading, also of what may still change
const DIARIZED = "gpt-4o-transcribe-diarize"; // says who speaks, where the server has models for it

export class Session {
  turns = new Map(); // by item id: see newTurn
  isOpen = false;
  start = 0; // of its sound, in seconds of the recording
  until = 0; // it has been sent
  #owner = new Owner();
  #numUpdates = 0; // sent and not answered

  /** `options` = {model, language, prompt, speakers}; `on.text()` for other text, `on.end(reason)`, without a reason behind all text. */
  constructor(options, on) {
    [this.options, this.on] = [options, on];
  }

  /** Resolves when the session takes samples, or is closed; throws what the server refuses it with. */
  async open() {
    const url = new URL(SESSIONS, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.hash = "";
    const secret = await clientSecret();
    if (this.#owner.isClosed) return;
    this.socket = new WebSocket(url, ["realtime", ...(secret ? [`openai-insecure-api-key.${secret}`] : [])]);
    this.#owner.keep(() => this.socket.close(1000));
    await new Promise((resolve, reject) => {
      this.#owner.listen(this.socket, "message", ({ data }) => {
        const event = JSON.parse(data);
        if (event.type === "session.created") {
          this.isOpen = true;
          this.#sendOptions();
          resolve();
        }
        this.#onEvent(event);
      });
      this.#owner.listen(this.socket, "close", ({ reason }) => {
        if (this.isOpen) this.end(reason || BROKEN);
        else request(SESSIONS).then(() => reject(new Error(BROKEN)), reject); // pages never see the reply to a handshake
      });
      this.#owner.keep(resolve); // stopped meanwhile
    });
  }

  #sendOptions() {
    const { language, prompt, model, speakers } = this.options;
    const keywords = prompt && prompt.replace(/[<>]/g, " ").split(",");
    const transcription = { ...(model && { model }), ...(language && { language }), ...(keywords && { keywords }) };
    this.#update({ include: [INTERIM], audio: { input: { transcription } } });
    if (speakers && !model) this.#update({ audio: { input: { transcription: { model: DIARIZED } } } }); // it may be refused
  }

  #update(session = {}) {
    this.#numUpdates++;
    this.socket.send(JSON.stringify({ type: "session.update", event_id: UPDATE, session: { type: "transcription", ...session } }));
  }

  /** Samples that begin at `time`, in seconds of the recording. */
  send(block, time) {
    if (!this.until) this.start = time;
    this.until = time + block.length / RATE;
    if (this.socket.readyState !== WebSocket.OPEN) return;
    const audio = btoa(String.fromCharCode(...new Uint8Array(block.buffer)));
    this.socket.send(JSON.stringify({ type: "input_audio_buffer.append", audio }));
  }

  #onEvent({ type, item_id: id, ...event }) {
    const turn = this.turns.get(id);
    if (this.hasCommitted) this.#expect();
    const [, kind] = type.split("input_audio_transcription.");
    if (type === "input_audio_buffer.speech_started") this.turns.set(id, newTurn(this.start + event.audio_start_ms / 1000 + PADDING_S));
    else if (type === "input_audio_buffer.speech_stopped") turn.end = this.start + event.audio_end_ms / 1000 - SILENCE_S;
    else if (type === "input_audio_buffer.committed" && !turn) this.turns.set(id, newTurn(this.until));
    else if (kind === "delta") Object.assign(turn, { text: turn.text + event.delta, tail: behind(turn.tail, event.delta) });
    else if (kind === "interim") this.#onReading(turn, event);
    else if (kind === "segment") turn.parts.push(this.#timed(event));
    else if (kind === "completed") Object.assign(turn, { text: event.transcript, tail: "", final: true });
    else if (kind === "failed") Object.assign(turn, { failed: event.error.message, tail: "", final: true });
    else if (type === "session.updated" || event.error?.event_id === UPDATE) this.isHeard = --this.#numUpdates === 0 && this.hasCommitted;
    else return;
    this.on.text();
    if (this.isHeard && [...this.turns.values()].every((t) => t.final)) this.end();
  }

  /** Words have times only once they cannot change any more. */
  #onReading(turn, { tail, words, is_final: isFinal }) {
    turn.tail = tail;
    if (isFinal) turn.words.push(...words.map((word) => this.#timed(word)));
  }

  #timed({ start, end, ...rest }) {
    return { ...rest, start: start + this.start, end: end + this.start };
  }

  /** Behind the last block. The server may not have heard all of it yet: its answer to an update says that it has. */
  commit() {
    this.hasCommitted = true;
    if (!this.until || this.socket?.readyState !== WebSocket.OPEN) return this.end();
    this.socket.send(JSON.stringify({ type: "input_audio_buffer.commit" }));
    this.#update();
    this.#expect();
  }

  #expect() {
    clearTimeout(this.patience);
    this.patience = setTimeout(() => this.end(LATE), LAST_WORDS_MS);
  }

  /** What was recognised until then stays. */
  end(reason) {
    if (this.#owner.isClosed) return;
    this.isOpen = false;
    this.#owner.abort();
    clearTimeout(this.patience);
    for (const turn of this.turns.values()) Object.assign(turn, { tail: "", final: true });
    this.on.end(reason);
  }
}

/** In seconds of the recording. `tail` may still change; `words` and `parts`, of a speaker each, have times of their own. */
const newTurn = (start) => ({ start, end: null, text: "", tail: "", words: [], parts: [], final: false });

const behind = (tail, delta) => (tail.startsWith(delta) ? tail.slice(delta.length) : "");
