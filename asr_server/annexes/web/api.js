// The server's API. Paths are relative, so that the page works behind any prefix.

import { attempt, inSlices, newId } from "./dom.js";

const KEY = "asr-server-key";
const BROWSER = "asr-server-browser";
const FAILED = 500; // of a job: to look again is of no use
const BROKEN = "The connection broke. Is the server still running?";
const CHANGED = "The file was changed or moved after it was chosen. Choose it again.";
const READY_MS = 10000;
const TOKENS_PER_S = 50; // of audio

let key = attempt(() => sessionStorage.getItem(KEY)) || "";

/** For this visit of the tab, or where it keeps nothing until a reload. */
export function keepApiKey(taken) {
  key = taken;
  attempt(() => sessionStorage.setItem(KEY, taken));
}

export class ApiError extends Error {
  constructor(message, { status = 0, retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

function errorOf(body, status, retryAfter = 0) {
  const message = attempt(() => JSON.parse(body).error.message) ?? `The server answered with status ${status}.`;
  return new ApiError(message, { status, retryAfter });
}

const headers = (own = key) => (own ? { Authorization: `Bearer ${own}` } : {});

/** The models served; throws ApiError with status 401 when a key, or another one, is needed. */
export async function models(own = key) {
  const reply = await request("v1/models", { headers: headers(own) });
  return (await reply.json()).data;
}

/** A key for one live session: the server's own key may have letters that a WebSocket's protocols cannot have. */
export async function clientSecret() {
  if (!key) return "";
  const reply = await request("v1/realtime/client_secrets", {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify({ session: { type: "transcription" } }),
  });
  return (await reply.json()).value;
}

/** Why no engine takes work; empty where one does. */
export const whyUnready = () => request("ready", { signal: AbortSignal.timeout(READY_MS) }).then(() => "", ({ message }) => message);

export async function request(path, options = {}) {
  const reply = await fetch(path, { cache: "no-store", headers: headers(), ...options }).catch(() => {
    throw new ApiError("The server cannot be reached. Is it still running?");
  });
  if (!reply.ok) throw errorOf(await reply.text(), reply.status);
  return reply;
}

// -- Jobs: files that the server goes on with when this page is closed --

/** By which this browser knows its own jobs, where nobody needs a key. */
function browserId() {
  const id = attempt(() => localStorage.getItem(BROWSER)) || newId();
  attempt(() => localStorage.setItem(BROWSER, id));
  return id;
}

/** Those of pages with this key, or without one of this browser; the newest first. */
export async function jobs() {
  const reply = await request("v1/audio/transcriptions?limit=100");
  const { data } = await reply.json();
  return data.filter(({ metadata }) => metadata.recording && (key || metadata.browser === browserId()));
}

export const deleteJob = (id) => request(`v1/audio/transcriptions/${id}`, { method: "DELETE" }).catch(() => {});

/** As `transcribe` does with a file that is sent; a job's events begin with its first text. */
export function follow(id, on, signal) {
  on.upload(1);
  const call = new XMLHttpRequest();
  call.open("GET", `v1/audio/transcriptions/${id}/events`);
  return answerOf(call, null, null, on, signal);
}

/**
 * Transcribes one file, as `options` = {model, language, task, speakers, prompt} say. Calls `on.upload(share)` and
 * `on.hear(text, seconds)`, up to which it is read, on the way; resolves to the last event, with segments, times and, where `speakers` is "auto" or a
 * number, speakers. With `options.recording`, an id, it hands the file over and resolves to {job}.
 */
export function transcribe(file, options, on, signal) {
  const form = new FormData();
  form.append("file", file, file.name || "audio");
  form.append("model", options.model);
  form.append("stream", "true");
  form.append("stream_include_segments", "true");
  form.append("stream_continuous_usage_stats", "true"); // says how far it is
  if (options.prompt) form.append("hotwords", options.prompt);
  const isTranslation = options.task === "translate"; // into English; the words of it have no times
  if (!isTranslation) for (const times of ["segment", "word"]) form.append("timestamp_granularities[]", times);
  if (!isTranslation && options.language) form.append("language", options.language);
  if (options.speakers === "auto") form.append("diarize", "true");
  else if (options.speakers) form.append("num_speakers", options.speakers);
  if (options.recording) {
    form.append("background", "true");
    form.append("metadata", JSON.stringify({ recording: options.recording, file: file.name.slice(0, 500), browser: browserId() }));
  }
  const call = new XMLHttpRequest(); // fetch tells nothing of an upload's progress
  call.open("POST", `v1/audio/${isTranslation ? "translations" : "transcriptions"}`);
  return answerOf(call, form, file, on, signal);
}

function answerOf(call, form, file, on, signal) {
  return new Promise((resolve, reject) => {
    const eventsOf = eventReader();
    let done = null;
    let reading = Promise.resolve(); // a piece of the answer after the other
    const take = (event) => {
      if (event.error) reject(new ApiError(event.error.message, { status: form ? 0 : FAILED }));
      else if (event.type === "transcript.text.delta") on.hear(event.delta, (event.usage?.input_tokens || 0) / TOKENS_PER_S);
      else if (event.type === "transcript.text.done") done = event;
    };
    const read = () => (reading = reading.then(() => inSlices(eventsOf(call.responseText), take)));
    for (const [name, value] of Object.entries(headers())) call.setRequestHeader(name, value);
    call.upload.onprogress = (event) => event.lengthComputable && on.upload(event.loaded / event.total);
    call.upload.onload = () => on.upload(1);
    call.onreadystatechange = () => {
      const path = call.readyState === call.HEADERS_RECEIVED && call.getResponseHeader("location");
      if (!path) return;
      resolve({ job: path.split("/").pop() });
      call.abort();
    };
    call.onprogress = () => call.status === 200 && read();
    call.onload = () => {
      if (call.status !== 200) {
        return reject(errorOf(call.responseText, call.status, Number(call.getResponseHeader("retry-after")) || 0));
      }
      const end = () => (done ? resolve(done) : reject(new ApiError("The answer ended early: the server may have stopped.")));
      read().then(end, reject);
    };
    call.onerror = () => (file || new Blob()).slice(0, 1).arrayBuffer().then(() => reject(new ApiError(BROKEN)), () => reject(new ApiError(CHANGED, { status: 400 })));
    call.onabort = () => reject(new ApiError("Cancelled."));
    if (signal.aborted) return reject(new ApiError("Cancelled."));
    signal.addEventListener("abort", () => call.abort());
    call.send(form);
  });
}

/** Reads the events of a text that grows; a job's have ids, and comments between them. */
function eventReader() {
  let position = 0;
  return function* (text) {
    for (let end; (end = text.indexOf("\n\n", position)) >= 0; ) {
      const data = text.slice(position, end).replace(/^(id: \d+\n|event: progress\n)?data: /, "");
      position = end + 2;
      if (data !== "[DONE]" && data[0] !== ":") yield JSON.parse(data);
    }
  };
}
