// What the server serves, and whether it can be asked at all: it is away, or locked by a key, until it is not.

import { keepApiKey, models, whyUnready } from "./api.js";
import { Emitter } from "./dom.js";

const POLL_MS = 2000;

/** Events: "change" for another state, model or reason. */
export class Serving extends Emitter {
  state = "unknown"; // served, away, locked
  models = []; // as the server describes them
  reason = "";
  #timer = null;

  /** Whether the server can be asked. */
  async refresh(key) {
    try {
      const named = await models(key);
      const served = [...Map.groupBy(named, ({ id, root }) => root ?? id).values()].map(([own]) => own); // without other names
      if (key) keepApiKey(key);
      this.#become("served", "", served);
    } catch (error) {
      if (!key) this.#become(error.status === 401 ? "locked" : "away", error.message);
    }
    return this.state === "served";
  }

  /** The model of that name, or the first. */
  find(id) {
    return this.models.find((model) => model.id === id) || this.models[0];
  }

  /** Whether it is away after all; until it is back it is asked again and again. */
  async isAway() {
    const reason = await whyUnready();
    if (reason) this.#become("away", reason);
    return Boolean(reason);
  }

  /** Whether an error asks for a key: that of before may have expired. */
  lockOn({ status }) {
    if (status === 401) this.#become("locked", "");
    return status === 401;
  }

  #become(state, reason, models = this.models) {
    Object.assign(this, { state, reason, models });
    clearTimeout(this.#timer);
    if (state === "away") this.#timer = setTimeout(async () => (await this.isAway()) || this.refresh(), POLL_MS);
    this.emit("change");
  }
}
