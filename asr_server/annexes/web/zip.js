// Several files in one. Browsers deflate; the checksum is the one that gzip puts behind.

const UTF_8 = 0x0800;
const DEFLATED = 8;
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
  return view;
}

/** `files`: [name, text or blob] each. */
export async function zipOf(files, type = "application/zip") {
  const [parts, directory] = [[], []];
  let [at, directorySize] = [0, 0];
  for (const [name, content] of files) {
    const letters = new TextEncoder().encode(name);
    const whole = new Blob([content]);
    const gzip = await new Response(whole.stream().pipeThrough(new CompressionStream("gzip"))).arrayBuffer();
    const [bytes, checksum] = [gzip.slice(10, -8), new DataView(gzip).getUint32(gzip.byteLength - 8, true)];
    const sizes = [[4, checksum], [4, bytes.byteLength], [4, whole.size], [2, letters.length], [2, 0]];
    const common = [[2, 20], [2, UTF_8], [2, DEFLATED], [2, 0], [2, JANUARY_1ST_1980], ...sizes];
    parts.push(record([4, 0x04034b50], ...common), letters, bytes);
    directory.push(record([4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, at]), letters);
    at += 30 + letters.length + bytes.byteLength;
    directorySize += 46 + letters.length;
  }
  const counts = [[2, files.length], [2, files.length]];
  const end = record([4, 0x06054b50], [2, 0], [2, 0], ...counts, [4, directorySize], [4, at], [2, 0]);
  return new Blob([...parts, ...directory, end], { type });
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
