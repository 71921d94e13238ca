// The recordings themselves, kept in this browser's private files (OPFS) where one wants that.

const FOLDER = "recordings";
const MOST_BYTES = 2 ** 30; // together; the oldest go first
const SWITCH = "asr-server-keeps-recordings";

export class Sounds {
  constructor(most = MOST_BYTES) {
    this.most = most;
    this.isPossible = Boolean(navigator.storage?.getDirectory); // by https or localhost
  }

  /** In all tabs: any of them may have switched it. */
  get isOn() {
    try {
      return localStorage.getItem(SWITCH) === "on";
    } catch {
      return false; // a browser that keeps nothing
    }
  }

  async switchTo(isOn) {
    localStorage.setItem(SWITCH, isOn ? "on" : "off");
    if (!isOn) await this.sweep(new Set());
  }

  async #folder() {
    return (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER, { create: true });
  }

  async keep(id, file) {
    if (!this.isOn || file.size > this.most) return;
    const folder = await this.#folder();
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

  /** Null where it is not kept. */
  async file(id, name) {
    try {
      const handle = await (await this.#folder()).getFileHandle(id);
      return new File([await handle.getFile()], name);
    } catch {
      return null;
    }
  }

  /** Deletes those of no transcript in `ids`, all while it is off; one that is being written stays. */
  async sweep(ids) {
    if (!this.isPossible) return;
    const folder = await this.#folder();
    for await (const id of folder.keys()) if (!this.isOn || !ids.has(id)) await folder.removeEntry(id).catch(() => {});
  }
}
