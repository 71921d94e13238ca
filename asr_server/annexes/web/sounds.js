// The recordings themselves, kept in this browser's private files (OPFS) where one wants that.

import { attempt } from "./dom.js";
import { wavOf } from "./wav.js";

const FOLDER = "recordings";
export const SPOKEN = "spoken"; // each deleted with its transcript alone: there is no other copy of it
const MOST_BYTES = 2 ** 30; // together; the oldest go first
const SWITCH = "asr-server-keeps-recordings";

export const folderOf = async (name) => (await navigator.storage.getDirectory()).getDirectoryHandle(name, { create: true });

const fileOf = async (folder, id) => (await (await folderOf(folder)).getFileHandle(id)).getFile();

export class Sounds {
  constructor(most = MOST_BYTES) {
    this.most = most;
    this.isPossible = Boolean(navigator.storage?.getDirectory); // by https or localhost
  }

  /** In all tabs: any of them may have switched it. */
  get isOn() {
    return attempt(() => localStorage.getItem(SWITCH)) === "on";
  }

  async switchTo(isOn) {
    localStorage.setItem(SWITCH, isOn ? "on" : "off");
    if (!isOn) await this.#sweep(FOLDER, new Set());
  }

  async keep(id, file) {
    if (!this.isOn || file.size > this.most) return;
    const folder = await folderOf(FOLDER);
    await this.#makeRoom(folder, id, file.size);
    const writer = await (await folder.getFileHandle(id, { create: true })).createWritable();
    await writer.write(file);
    await writer.close();
    if (!this.isOn) await folder.removeEntry(id).catch(() => {}); // switched off meanwhile
  }

  async #makeRoom(folder, id, size) {
    const others = [];
    for await (const handle of folder.values()) if (handle.name !== id) others.push(await handle.getFile());
    others.sort((a, b) => a.lastModified - b.lastModified);
    let total = others.reduce((sum, file) => sum + file.size, size);
    for (const file of others) {
      if (total <= this.most) return;
      await folder.removeEntry(file.name);
      total -= file.size;
    }
  }

  /** The samples of what one spoke, or null. */
  spoken(id) {
    return fileOf(SPOKEN, id).catch(() => null);
  }

  /** Null where it is not kept. */
  async file(id, name) {
    const spoken = await this.spoken(id);
    if (spoken) return wavOf([spoken], `${name}.wav`);
    return fileOf(FOLDER, id).then((file) => new File([file], name), () => null);
  }

  /** Deletes those of no transcript in `ids`; one that is being written stays. */
  async sweep(ids) {
    if (!this.isPossible) return;
    await this.#sweep(FOLDER, this.isOn ? ids : new Set());
    await this.#sweep(SPOKEN, ids);
  }

  async #sweep(name, ids) {
    const folder = await folderOf(name);
    for await (const id of folder.keys()) if (!ids.has(id)) await folder.removeEntry(id).catch(() => {});
  }
}
