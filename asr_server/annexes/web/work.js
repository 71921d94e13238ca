// What is seen of a recording on its way to a text: what is done with it, for how long, and what went wrong.

import { clock, h, show } from "./dom.js";

export class Work {
  /** `onRetry()` when one asks for it again; `length()`: its seconds, as far as they are known. */
  constructor(recording, owner, onRetry, length) {
    [this.recording, this.length] = [recording, length];
    this.facts = h("div", { className: "facts" });
    this.progress = h("progress", { max: 1, value: 0, "aria-label": `Progress of ${recording.name}` });
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    this.retry = h("button", { type: "button", className: "small retry", hidden: true }, "Try again");
    this.retry.onclick = onRetry;
    this.elements = [this.progress, this.error, this.retry];
    owner.keep(() => clearInterval(this.timer));
  }

  draw() {
    const { isAtWork, state, error } = this.recording;
    clearInterval(this.timer);
    if (isAtWork) this.timer = setInterval(() => this.#drawDoing(), 1000);
    if (isAtWork) this.#drawDoing();
    else if (state === "failed") this.setFacts("not transcribed");
    this.progress.hidden = !isAtWork;
    if (this.error.textContent !== plain(error?.message)) show(this.error, error?.message);
    this.retry.hidden = !this.recording.isRetriable;
  }

  #drawDoing() {
    const { note, since, seconds, state, share } = this.recording;
    const rest = this.recording.rest(this.length()); // of a length that may be known only by now
    if (state === "listening" && !rest) this.progress.removeAttribute("value"); // no one knows how far it is
    else this.progress.value = rest?.share ?? (state === "uploading" ? share : 0);
    const facts = [rest ? `listening, ${Math.ceil(rest.share * 100)} %` : note];
    if (since !== null && since !== undefined) facts.push(clock(seconds));
    if (rest?.seconds != null) facts.push(`about ${clock(Math.ceil(rest.seconds))} left`);
    this.setFacts(...facts);
  }

  setFacts(...facts) {
    this.facts.replaceChildren(...facts.map((fact) => h("span", {}, fact)));
  }

  /** Behind a word; open they stay so. */
  setDetails(...details) {
    const isOpen = this.details?.open;
    this.details = h("details", { open: isOpen }, h("summary", {}, "Details"), ...details.map((detail) => h("span", {}, detail)));
    this.facts.append(this.details);
  }
}

const plain = (text = "") => text.replaceAll("`", "");
