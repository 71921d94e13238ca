// The server, live: `/metrics` once a second while this view is seen.

import { readiness, request } from "./api.js";
import { $, count, h } from "./dom.js";

const EVERY_MS = 1000;
const LOOK_MS = 5000; // of a server that does not answer
const HISTORY = 60;
const RATE_OVER = 10; // looks

let timer = null;
const audio = []; // [seconds transcribed, when], the last few
const history = {};

export function startWatching() {
  if (timer === null) tick();
}

export function stopWatching() {
  clearTimeout(timer);
  timer = null;
  audio.length = 0;
}

async function tick() {
  const mine = (timer = setTimeout(() => {}, 0)); // it is watched
  if (!document.hidden) await look();
  if (timer === mine) timer = setTimeout(tick, EVERY_MS); // one look after the other, also of a server that hangs
}

async function look() {
  try {
    const metrics = await request("metrics", { signal: AbortSignal.timeout(LOOK_MS) });
    showMetrics(parse(await metrics.text()));
    const { isReady, reason } = await readiness();
    showHealth(isReady, reason || "Ready: an engine takes work.");
  } catch (error) {
    showHealth(false, error.message);
  }
}

function showHealth(isGood, text) {
  $("health").className = `health ${isGood ? "is-good" : "is-bad"}`;
  if ($("health").textContent !== text) $("health").textContent = text;
}

/** Prometheus's text format: name to a list of [labels, value]. */
export function parse(text) {
  const found = new Map();
  for (const [, name, labels, value] of text.matchAll(/^(\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    const pairs = Object.fromEntries([...(labels || "").matchAll(/(\w+)="([^"]*)"/g)].map(([, k, v]) => [k, v]));
    found.set(name, [...(found.get(name) || []), [pairs, Number(value)]]);
  }
  return found;
}

function showMetrics(metrics) {
  const sum = (name) => (metrics.get(name) || []).reduce((total, [, value]) => total + value, 0);
  audio.push([sum("asr_audio_transcribed_seconds_total"), performance.now() / 1000]);
  if (audio.length > RATE_OVER) audio.shift();
  const [[first, since], [last, now]] = [audio[0], audio[audio.length - 1]];
  const rate = now > since ? Math.max(0, last - first) / (now - since) : 0;
  plot("throughput", rate, rate < 10 ? rate.toFixed(1) : Math.round(rate));
  const numReadAgain = sum("asr_chunks_read_again_total");
  $("tries").textContent = `${count(sum("asr_fallbacks_total"), "fallback")}, ${count(numReadAgain, "chunk")} read again`;
  plot("requests", sum("asr_requests_in_flight"));
  plot("chunks", sum("asr_chunks"));
  plot("sessions", sum("asr_realtime_sessions"));
  $("rejected").textContent = `${sum("asr_requests_rejected_total")} turned away so far`;
  const numWaiting = Math.max(0, sum("asr_chunks") - sum("asr_slots_in_use"));
  const threads = `${sum("asr_preprocess_busy")} of ${count(sum("asr_preprocess_workers"), "decoding thread")} busy`;
  $("preprocess").textContent = `${numWaiting} waiting for a slot; ${threads}`;
  $("turns").textContent = `${count(sum("asr_realtime_turns_total"), "turn")} so far`;
  showReplicas(metrics);
}

function plot(name, value, text = value) {
  const values = (history[name] = [...(history[name] || []), value].slice(-HISTORY));
  $(name).textContent = text;
  const most = Math.max(...values, 1);
  const points = values.map((v, i) => `${(120 * i) / Math.max(1, values.length - 1)} ${38 - (34 * v) / most}`);
  const [area, line] = $(`${name}-spark`).children;
  line.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M0 40L${points.join("L")}L120 40Z`);
}

function showReplicas(metrics) {
  const isSame = (one, other) => one.model === other.model && one.replica === other.replica;
  const of = (name, replica) => (metrics.get(name) || []).find(([labels]) => isSame(labels, replica))?.[1] || 0;
  const replicas = (metrics.get("asr_replica_ready") || []).map(([labels]) => labels);
  const hasSeveralModels = new Set(replicas.map((labels) => labels.model)).size > 1;
  const rows = replicas.map((replica) => {
    const name = hasSeveralModels ? `${replica.model} ${replica.replica}` : replica.replica;
    const [slots, used] = [of("asr_slots", replica), of("asr_slots_in_use", replica)];
    const isLoaded = (metrics.get("asr_model_loaded") || []).some(([labels, value]) => labels.model === replica.model && value);
    const state = of("asr_replica_ready", replica) ? `${used} of ${slots} slots in use` : isLoaded ? "starting" : "not loaded";
    const cells = Array.from({ length: Math.min(slots, 256) }, (_, i) => h("i", { className: i < used ? "is-used" : "" }));
    return h("li", {}, h("strong", {}, name), h("span", { className: "muted" }, ` ${state}`), h("div", { className: "slots", "aria-hidden": "true" }, ...cells));
  });
  $("replicas").replaceChildren(...rows);
}
