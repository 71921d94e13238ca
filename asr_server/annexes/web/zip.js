// Several files in one, without compression: a transcript is small.

const TABLE = Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value >>> 0;
});

function checksum(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = TABLE[(value ^ byte) & 255] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}

const UTF_8 = 0x0800;
const JANUARY_1ST_1980 = 0x21;

/** Fields of two and of four bytes, as [size, value] each. */
export function record(...fields) {
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [size]) => sum + size, 0)));
  let at = 0;
  for (const [size, value] of fields) {
    if (size === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += size;
  }
  return new Uint8Array(view.buffer);
}

/** Its bytes. `files`: [name, text or bytes] each. */
export function zipOf(files) {
  const encoder = new TextEncoder();
  const [parts, directory] = [[], []];
  let [at, directorySize] = [0, 0];
  for (const [name, content] of files) {
    const letters = encoder.encode(name);
    const bytes = typeof content === "string" ? encoder.encode(content) : content;
    const sizes = [[4, checksum(bytes)], [4, bytes.length], [4, bytes.length], [2, letters.length], [2, 0]];
    const common = [[2, 20], [2, UTF_8], [2, 0], [2, 0], [2, JANUARY_1ST_1980], ...sizes];
    parts.push(record([4, 0x04034b50], ...common), letters, bytes);
    directory.push(record([4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, at]), letters);
    at += 30 + letters.length + bytes.length;
    directorySize += 46 + letters.length;
  }
  const counts = [[2, directory.length / 2], [2, directory.length / 2]];
  const end = record([4, 0x06054b50], [2, 0], [2, 0], ...counts, [4, directorySize], [4, at], [2, 0]);
  const archive = new Uint8Array(at + directorySize + end.length);
  let size = 0;
  for (const part of [...parts, ...directory, end]) archive.set(part, (size += part.length) - part.length);
  return archive;
}

/** Two of one name get numbers. */
export function withOwnNames(files) {
  const taken = new Set();
  return files.map(([name, content]) => {
    const [, stem, suffix] = /^(.*?)(\.\w+)?$/s.exec(name.replace(/[\\/:*?"<>|]/g, "_"));
    let own = stem + (suffix || "");
    for (let number = 2; taken.has(own.toLowerCase()); number++) own = `${stem} (${number})${suffix || ""}`;
    taken.add(own.toLowerCase());
    return [own, content];
  });
}
