// Writes what one speaks to a file as it comes, so that a crash of the page leaves it. Takes the name of the file,
// then blocks of samples, then null; answers each once it is done, with a reason where it failed.

import { folderOf, SPOKEN } from "./sounds.js";

let file = null;
let size = 0;
let last = Promise.resolve();

async function take(data) {
  if (typeof data === "string") file = await openFile(data);
  else if (data) write(data);
  else close();
}

async function openFile(name) {
  const handle = await (await folderOf(SPOKEN)).getFileHandle(name, { create: true });
  return handle.createSyncAccessHandle();
}

function write(block) {
  if (!file) throw new Error("it keeps no files");
  if (file.write(block, { at: size }) < block.byteLength) throw new Error("it has no space left");
  size += block.byteLength;
}

function close() {
  file?.truncate(size); // the last block may be there in part
  file?.close();
}

onmessage = ({ data }) => {
  last = last.then(() => take(data)).then(() => postMessage(""), ({ message }) => postMessage(message));
};
