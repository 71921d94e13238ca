// Samples as a file that any player opens.

import { record } from "./zip.js";

export const RATE = 24000; // of what one speaks

/** Of blobs and blocks of 16-bit PCM, mono. */
export function wavOf(parts, name) {
  const numBytes = parts.reduce((sum, part) => sum + (part.size ?? part.byteLength), 0);
  return new File([header(numBytes), ...parts], name, { type: "audio/wav" });
}

function header(numBytes) {
  const [riff, wave, fmt, data] = [0x46464952, 0x45564157, 0x20746d66, 0x61746164]; // as letters
  const format = [[4, 16], [2, 1], [2, 1], [4, RATE], [4, RATE * 2], [2, 2], [2, 16]]; // PCM, mono
  return record([4, riff], [4, 36 + numBytes], [4, wave], [4, fmt], ...format, [4, data], [4, numBytes]);
}
