// The queue: two recordings at a time are sent, and two jobs followed. It holds while the server is away or locked.

import { ApiError, deleteJob, follow, transcribe } from "./api.js";
import { Emitter } from "./dom.js";
import { chosenOptions } from "./options.js";

const AT_ONCE = 2; // files; the others wait in the queue
const MAX_TRIES = 5; // of a server that answers but cannot take it; one that is full is asked without end
const FULL = 429;
const BUSY = new Set([FULL, 503]);
const AWAY = new Set([0, 502, 503, 504]); // perhaps: whether it is, /ready says
const UNKNOWN_MODEL = 404;
const REFUSED = { status: 400 };

/** Events: "change" when the queue has changed, "end" with a recording that is through. */
export class Scheduler extends Emitter {
  queue = [];
  running = new Set();

  constructor(serving) {
    super();
    this.serving = serving;
    serving.addEventListener("change", () => this.#next());
  }

  /** With what is chosen now, whatever is chosen when their turn comes; or to follow the `job` of one. */
  add(recordings, options, job = null) {
    for (const recording of recordings) {
      if (recording.job) deleteJob(recording.job); // of another try
      recording.wait(options, job);
    }
    this.queue.push(...recordings);
    this.#next();
  }

  forget(recordings) {
    for (const { abort, job } of recordings) {
      abort.abort();
      if (job) deleteJob(job);
    }
    this.queue = this.queue.filter((recording) => !recordings.includes(recording));
    this.emit("change");
  }

  /** Resolves to a file's answer in English. */
  async translate(file, onText, signal) {
    const options = { model: this.serving.find(chosenOptions().model).id, task: "translate" };
    const answer = transcribe(file, options, { upload() {}, hear: onText }, signal);
    answer.catch((error) => this.serving.lockOn(error));
    return answer;
  }

  get isHeld() {
    return this.serving.state === "away" || this.serving.state === "locked";
  }

  get size() {
    return this.queue.length + this.running.size;
  }

  /** Not yet with the server, which goes on with its jobs alone. */
  get isNeeded() {
    return [...this.queue, ...this.running].some(({ job }) => !job);
  }

  #next() {
    if (this.serving.state === "served") for (const isJob of [false, true]) this.#start(isJob);
    if (this.isHeld) for (const recording of this.queue) recording.say("waiting for the server");
    this.emit("change");
  }

  #start(isJob) {
    const chosen = ({ job }) => Boolean(job) === isJob;
    const num = AT_ONCE - [...this.running].filter(chosen).length;
    const started = this.queue.filter(chosen).slice(0, Math.max(0, num));
    this.queue = this.queue.filter((recording) => !started.includes(recording));
    for (const recording of started) this.#run(recording);
  }

  async #run(recording) {
    this.running.add(recording);
    recording.begin();
    const { signal } = recording.abort;
    try {
      await this.#transcribe(recording, signal);
    } catch (error) {
      if (signal.aborted) recording.fail({ message: "Cancelled.", status: 0 });
      else if (await this.#mustWait(error)) this.queue.unshift(recording);
      else recording.fail(error);
    }
    this.running.delete(recording);
    if (!recording.isAtWork && !signal.aborted) this.emit("end", recording);
    this.#next();
  }

  /** The server is not there for anybody: that is no fault of this recording. */
  async #mustWait(error) {
    return this.serving.lockOn(error) || (AWAY.has(error.status) && (await this.serving.isAway()));
  }

  async #transcribe(recording, signal) {
    for (let tries = 1; ; tries++) {
      try {
        const answer = await (recording.job ? follow(recording.job, recording, signal) : this.#send(recording, signal));
        if (answer.job) {
          recording.job = answer.job;
          recording.say("handed over: the server goes on without this page");
          this.queue.push(recording);
        } else recording.finish({ ...answer, task: recording.options.task }, { took: recording.seconds });
        return;
      } catch (error) {
        await this.#beforeNext(error, tries, recording, signal);
        recording.begin();
      }
    }
  }

  #send(recording, signal) {
    const { file, id, options } = recording;
    const model = this.serving.find(options.model);
    const most = model.max_upload_bytes;
    if (!file.size) throw new ApiError("This file is empty.", REFUSED);
    if (file.size > most) throw new ApiError(tooLarge(file.size, most), REFUSED);
    return transcribe(file, { ...options, model: model.id, recording: model.background && id }, recording, signal);
  }

  /** Throws what no other try would mend. */
  async #beforeNext(error, tries, recording, signal) {
    if (error.status === UNKNOWN_MODEL && tries === 1 && recording.file) {
      recording.job = null; // which may be gone
      await this.serving.refresh(); // it may have been started anew, with another one
      return;
    }
    const isHopeless = error.status !== FULL && tries >= MAX_TRIES;
    const [isBusy, mayBeAway] = [BUSY.has(error.status), AWAY.has(error.status)];
    const mayPass = isBusy || (recording.job && mayBeAway);
    if (!mayPass || isHopeless || (mayBeAway && (await this.serving.isAway()))) throw error;
    const seconds = error.retryAfter || 2;
    recording.say(`${isBusy ? "the server is busy" : "the connection broke"}; asking again in ${seconds} s`);
    await new Promise((resolve, reject) => {
      setTimeout(resolve, seconds * 1000);
      signal.addEventListener("abort", reject);
    });
  }
}

const inMebibytes = (bytes) => `${Number((bytes / 2 ** 20).toFixed(1))} MiB`;
const tooLarge = (bytes, most) =>
  `This file has ${inMebibytes(bytes)}, and the server takes ${inMebibytes(most)} at most. As mp3, m4a or opus it is smaller.`;
