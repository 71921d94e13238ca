// The server at work: `v1/activity` once a second while this view is seen, which begins 15 minutes ago.

import { headers, readiness, request } from "./api.js";
import { $, clock, color, context2d, count, h } from "./dom.js";

const EVERY_MS = 1000;
const LOOK_MS = 5000; // of a server that does not answer
const WINDOW_S = 900;
const AXIS = 30; // pixels for its numbers
const GB = 1e9;

let timer = null;
let onRefused = null;

/** Calls `refused(error)` when the server refuses to be looked at. */
export function startWatching(refused) {
  onRefused = refused;
  if (timer === null) tick();
}

export function stopWatching() {
  clearTimeout(timer);
  timer = null;
}

async function tick() {
  const mine = (timer = setTimeout(() => {}, 0)); // it is watched
  if (!document.hidden) await look();
  if (timer === mine) timer = setTimeout(tick, EVERY_MS); // one look after the other, also of a server that hangs
}

async function look() {
  try {
    const reply = await request("v1/activity", { headers: headers(), signal: AbortSignal.timeout(LOOK_MS) });
    showActivity(await reply.json());
    const { isReady, reason } = await readiness();
    showHealth(isReady, reason || "Ready: an engine takes work.");
  } catch (error) {
    onRefused(error);
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
  $("uptime").textContent = clock(server.uptime_s);
  $("about").textContent = `version ${server.version}; replicas restarted: ${listed(server.restarts) || "none"}`;
  $("memory").textContent = [memory(server.resident_bytes), memory(server.decoding_bytes) && `${memory(server.decoding_bytes)} for FFmpeg`].filter(Boolean).join(", ");
  $("replicas").replaceChildren(...server.replicas.map((replica) => rowOf(replica, server.models)));
  $("last").replaceChildren(...server.last.map(lineOf));
}

/** A line over the last 15 minutes, between zero and the most that it reached. */
function plot(name, values, secondsAgo) {
  const { context, width, height } = context2d($(`${name}-chart`));
  const most = Math.max(...values, 1);
  const [top, bottom] = [10, height - 16];
  Object.assign(context, { fillStyle: color("muted"), strokeStyle: color("muted"), font: "11px sans-serif" });
  context.fillText(short(most), 0, top + 4);
  context.fillText("0", 0, bottom + 4);
  context.fillText("15 min", AXIS, height - 2);
  context.strokeRect(AXIS - 4, top, 0, bottom - top);
  Object.assign(context, { strokeStyle: color("accent"), lineWidth: 2, lineJoin: "round" });
  context.beginPath();
  values.forEach((value, i) => context.lineTo(AXIS + (width - AXIS) * (1 - secondsAgo[i] / WINDOW_S), bottom - ((bottom - top) * value) / most));
  context.stroke();
}

function rowOf({ model, name, ready, slots, slots_in_use: used, resident_bytes }, models) {
  const { state, device, dtype } = models.find((one) => one.name === model);
  const work = ready ? `${used} of ${slots} slots in use` : state === "unloaded" ? "not loaded" : "starting";
  const about = [model, ready && device, ready && dtype, memory(resident_bytes), work].filter(Boolean).join(", ");
  const cells = Array.from({ length: Math.min(slots, 256) }, (_, i) => h("i", { className: i < used ? "is-used" : "" }));
  return h("li", {}, h("strong", {}, name), h("span", { className: "muted" }, ` ${about}`), h("div", { className: "slots", "aria-hidden": "true" }, ...cells));
}

function lineOf({ id, status, seconds, audio_s, seconds_ago }) {
  const parts = id.match(/.{1,8}/g).flatMap((part) => [part, h("wbr")]); // a name of 128 letters fits a phone
  return h("li", {}, `${clock(seconds_ago)} ago: ${status}, ${short(audio_s)} s of audio in ${short(seconds)} s `, h("span", { className: "muted" }, ...parts));
}
