// The server at work: `v1/activity` once a second while this view is seen, which begins 15 minutes ago.

import { request, whyUnready } from "./api.js";
import { $, clock, count, h } from "./dom.js";

const EVERY_MS = 1000;
const LOOK_MS = 5000; // of a server that does not answer
const WINDOW_S = 900;
const GB = 1e9;

let isWatched = false;

/** Until another view is seen. */
export async function watch(serving) {
  if (isWatched) return;
  isWatched = true;
  while (!$("server-view").hidden) { // one look after the other, also of a server that hangs
    if (!document.hidden) await look(serving);
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
  isWatched = false;
}

async function look(serving) {
  try {
    const reply = await request("v1/activity", { signal: AbortSignal.timeout(LOOK_MS) });
    showActivity(await reply.json());
    const reason = await whyUnready();
    showHealth(!reason, reason || "Ready: an engine takes work.");
  } catch (error) {
    serving.lockOn(error);
    showHealth(false, error.message);
  }
}

function showHealth(isGood, text) {
  $("health").className = `health ${isGood ? "is-good" : "is-bad"}`;
  if ($("health").textContent !== text) $("health").textContent = text;
}

const short = (value) => (value < 10 ? String(Math.round(10 * value) / 10) : String(Math.round(value)));
const memory = (bytes) => (bytes ? `${(bytes / GB).toFixed(2)} GB` : "");
const shares = (of) => (of ? `${short(of.p50)} s, ${short(of.p95)} s, ${short(of.p99)} s` : "none yet");
const listed = (counts) => Object.entries(counts).map(([name, number]) => `${number} × ${name}`).join(", ");

function showActivity({ timeline, ...server }) {
  for (const name of ["speed", "requests", "slots_in_use", "sessions"]) {
    $(name).textContent = short(timeline[name].at(-1) || 0);
    plot(name, timeline[name], timeline.seconds_ago);
  }
  $("statuses").textContent = listed(server.statuses) || "none in the last 15 minutes";
  $("slots").textContent = `of ${timeline.slots.at(-1) || 0} in use`;
  $("waiting").textContent = `${count(timeline.chunks_waiting.at(-1) || 0, "chunk")} waiting; wait: ${shares(server.queue)}`;
  $("latency").textContent = server.latency ? short(server.latency.p50) : "–";
  $("latencies").textContent = `half, 95 %, 99 % within ${shares(server.latency)}`;
  $("first-text").textContent = `first text: ${shares(server.first_text)}`;
  $("jobs-tile").hidden = !server.jobs;
  $("jobs").textContent = server.jobs?.queued;
  $("oldest-job").textContent = server.jobs?.queued ? `the oldest for ${clock(server.jobs.oldest_queued_s)}` : "";
  $("uptime").textContent = clock(server.uptime_s);
  $("about").textContent = `version ${server.version}; replicas restarted: ${listed(server.restarts) || "none"}`;
  $("memory").textContent = [memory(server.resident_bytes), memory(server.decoding_bytes) && `${memory(server.decoding_bytes)} for FFmpeg`].filter(Boolean).join(", ");
  $("replicas").replaceChildren(...server.replicas.map((replica) => rowOf(replica, server.models)));
  $("last").replaceChildren(...server.last.map(lineOf));
}

/** A line over the last 15 minutes, between zero and the most that it reached. */
function plot(name, values, secondsAgo) {
  const [line, text] = $(`${name}-chart`).children;
  const most = Math.max(...values, 1);
  const points = values.map((value, i) => `${100 * (1 - secondsAgo[i] / WINDOW_S)},${100 * (1 - value / most)}`);
  line.firstChild.setAttribute("points", points.join(" "));
  text.textContent = `15 min, at most ${short(most)}`;
}

function rowOf({ model, name, ready, slots, slots_in_use: used, resident_bytes }, models) {
  const { state, device, dtype } = models.find((one) => one.name === model);
  const work = ready ? `${used} of ${slots} slots in use` : state === "unloaded" ? "not loaded" : "starting";
  const about = [model, ready && device, ready && dtype, memory(resident_bytes), work].filter(Boolean).join(", ");
  const cells = Array.from({ length: Math.min(slots, 256) }, (_, i) => h("i", { className: i < used ? "is-used" : "" }));
  return h("li", {}, h("strong", {}, name), h("span", { className: "muted" }, ` ${about}`), h("div", { className: "slots", "aria-hidden": "true" }, ...cells));
}

function lineOf({ id, status, seconds, audio_s, seconds_ago }) {
  return h("li", {}, `${clock(seconds_ago)} ago: ${status}, ${short(audio_s)} s of audio in ${short(seconds)} s `, h("span", { className: "muted id" }, id));
}
