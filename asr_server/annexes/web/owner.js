// What one card or one microphone has taken from the browser; one close() gives all of it back.

export class Owner {
  #abort = new AbortController();
  #releases = [];

  get signal() {
    return this.#abort.signal;
  }

  get isClosed() {
    return this.signal.aborted;
  }

  listen(target, type, listener) {
    target.addEventListener(type, listener, { signal: this.signal });
  }

  /** Calls `release` at close(), or at once where that is over. */
  keep(release) {
    if (this.isClosed) release();
    else this.#releases.push(release);
  }

  close() {
    this.#abort.abort();
    for (const release of this.#releases.splice(0).reverse()) release();
  }
}
