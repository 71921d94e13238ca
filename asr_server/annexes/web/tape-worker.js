// Writes what one speaks to a file as it comes, so that a crash of the page leaves it. Takes the name of the file,
// then blocks of samples, then null; answers each once it is done, with a reason where it failed.

import { folderOf, SPOKEN } from "./sounds.js";

let file = null;
let size = 0;
let last = Promise.resolve();

async function take(data) {
  if (typeof data === "string") {
    const handle = await (await folderOf(SPOKEN)).getFileHandle(data, { create: true });
    file = await handle.createSyncAccessHandle();
  } else if (data) {
    if (!file) throw new Error("it keeps no files");
    if (file.write(data, { at: size }) < data.byteLength) throw new Error("it has no space left");
    size += data.byteLength;
  } else {
    file?.truncate(size); // the last block may be there in part
    file?.close();
  }
}

onmessage = ({ data }) => {
  last = last.then(() => take(data)).then(() => postMessage(""), ({ message }) => postMessage(message));
};
