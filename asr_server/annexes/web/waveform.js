// The picture of a recording: its loudness, with the segments as bands, the silence between them pale, and a line
// wherever the server cut the recording into chunks.

import { speakersOf } from "./answer.js";
import { color, context2d } from "./dom.js";

// A browser holds a file decoded in memory: a quarter of an hour of stereo at 48 kHz is 350 MB.
const MAX_DECODED_S = 900;
const MAX_DECODED_BYTES = 64 * 1024 * 1024;
const NUM_PEAKS = 1200;

let last = Promise.resolve();

/** One after the other: a hundred files are not in memory at once. */
export const inTurn = (work) => (last = last.then(work, work));

/** Peaks from 0 to 1 and the duration; null for what this browser cannot decode, or not in little memory. */
export async function analyse(file, duration) {
  if (file.size > MAX_DECODED_BYTES || duration > MAX_DECODED_S) return null;
  try {
    const context = new OfflineAudioContext(1, 1, 16000);
    const audio = await context.decodeAudioData(await file.arrayBuffer());
    return { duration: audio.duration, peaks: peaksOf(audio.getChannelData(0)) };
  } catch {
    return null;
  }
}

function peaksOf(samples) {
  const size = Math.max(1, Math.ceil(samples.length / NUM_PEAKS));
  const peaks = [];
  for (let first = 0; first < samples.length; first += size) {
    let peak = 0;
    for (let i = first; i < Math.min(first + size, samples.length); i++) peak = Math.max(peak, Math.abs(samples[i]));
    peaks.push(peak);
  }
  const loudest = Math.max(...peaks, 1e-4);
  return peaks.map((peak) => Math.sqrt(peak / loudest));
}

/** In the place of peaks for a long recording: how much of each stretch is words, from 0 to 1. */
export function loudnessOfWords({ words, segments }, duration) {
  const shares = new Array(NUM_PEAKS).fill(0);
  const perBar = duration / NUM_PEAKS;
  for (const { start, end } of words?.length ? words : segments || []) {
    for (let i = Math.floor(start / perBar); i < NUM_PEAKS && i * perBar < end; i++) {
      shares[i] += (Math.min(end, (i + 1) * perBar) - Math.max(start, i * perBar)) / perBar;
    }
  }
  return shares.map((share) => 0.08 + 0.72 * Math.min(1, share));
}

/** Seconds at which another chunk begins: a segment names the start of its own, in hundredths. */
export function chunkBorders(segments) {
  const starts = new Set(segments.map(({ seek }) => (seek || 0) / 100));
  return [...starts].filter((start) => start > 0).sort((a, b) => a - b);
}

const BAR = 3; // pixels, with its gap of 1
const BORDER_EVERY = 12; // pixels at least; more of them would hide the picture
const STRIPE = 4; // pixels, in a speaker's colour

export function draw(canvas, { peaks, duration, segments, position }) {
  const { context, width, height } = context2d(canvas);
  const x = (time) => (duration ? (time / duration) * width : 0);
  context.fillStyle = color("tint");
  for (const segment of segments) {
    context.beginPath();
    context.roundRect(x(segment.start) + 1, 0, Math.max(2, x(segment.end) - x(segment.start) - 2), height, 6);
    context.fill();
  }
  for (const speaker of speakersOf({ segments })) {
    context.fillStyle = color(speaker.color);
    for (const { start, end } of segments.filter((segment) => segment.speaker === speaker.name)) {
      context.fillRect(x(start), height - STRIPE, x(end) - x(start), STRIPE);
    }
  }
  context.fillStyle = color("muted");
  const borders = chunkBorders(segments);
  for (const border of borders.length * BORDER_EVERY < width ? borders : []) {
    for (let y = 0; y < height; y += 6) context.fillRect(Math.round(x(border)), y, 1, 3);
  }
  const [played, ahead] = [color("accent"), color("wave")];
  for (let at = 0; at + BAR <= width; at += BAR) {
    const peak = peaks ? peaks[Math.floor((at / width) * peaks.length)] : 0.08;
    const bar = Math.max(2, peak * height * 0.9);
    context.fillStyle = x(position) > at ? played : ahead;
    context.fillRect(at, (height - bar) / 2, BAR - 1, bar);
  }
}
