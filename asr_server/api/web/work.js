// What is seen of a recording on its way to a text: what is done with it, for how long, and what went wrong.

import { clock, h, show } from "./dom.js";

const FUTILE = new Set([400, 413, 415]); // the same file would get the same answer

export class Work {
  /** `onDoing(what, time)` once a second while it goes on; `onRetry()` when one asks for it again. */
  constructor(name, { onDoing, onRetry }) {
    this.onDoing = onDoing;
    this.progress = h("progress", { max: 1, value: 0, "aria-label": `Progress of ${name}` });
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    this.retry = h("button", { type: "button", className: "small retry", hidden: true }, "Try again");
    this.retry.onclick = onRetry;
    this.elements = [this.progress, this.error, this.retry];
  }

  begin() {
    this.since = performance.now();
    show(this.error, "");
    this.retry.hidden = true;
    this.progress.hidden = false;
    this.doing = "waiting";
    this.timer = setInterval(() => this.say(this.doing), 1000);
  }

  get seconds() {
    return (performance.now() - this.since) / 1000;
  }

  say(doing) {
    this.doing = doing;
    this.onDoing(doing, clock(this.seconds));
  }

  /** `share` of the upload; behind it no one knows how far the work is. */
  upload(share) {
    if (share < 1) this.progress.value = share;
    else this.progress.removeAttribute("value");
    this.say(share < 1 ? `uploading, ${Math.round(share * 100)} %` : "listening …");
  }

  fail({ message, status }) {
    this.end();
    show(this.error, message);
    this.retry.hidden = FUTILE.has(status);
  }

  end() {
    clearInterval(this.timer);
    this.progress.hidden = true;
  }
}
