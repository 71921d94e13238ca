// Samples as a file that any player opens.

/** Of blocks of 16-bit PCM, mono. */
export function wavOf(blocks, rate, name) {
  const numBytes = blocks.reduce((sum, block) => sum + block.byteLength, 0);
  return new File([header(numBytes, rate), ...blocks], name, { type: "audio/wav" });
}

function header(numBytes, rate) {
  const view = new DataView(new ArrayBuffer(44));
  const text = (at, letters) => [...letters].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + numBytes, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // mono
  view.setUint32(24, rate, true);
  view.setUint32(28, rate * 2, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, numBytes, true);
  return view.buffer;
}
