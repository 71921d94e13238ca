// Samples as a file that any player opens.

import { record } from "./zip.js";

/** Of blocks of 16-bit PCM, mono. */
export function wavOf(blocks, rate, name) {
  const numBytes = blocks.reduce((sum, block) => sum + block.byteLength, 0);
  return new File([header(numBytes, rate), ...blocks], name, { type: "audio/wav" });
}

function header(numBytes, rate) {
  const [riff, wave, fmt, data] = [0x46464952, 0x45564157, 0x20746d66, 0x61746164]; // as letters
  const format = [[4, 16], [2, 1], [2, 1], [4, rate], [4, rate * 2], [2, 2], [2, 16]]; // PCM, mono
  return record([4, riff], [4, 36 + numBytes], [4, wave], [4, fmt], ...format, [4, data], [4, numBytes]);
}
