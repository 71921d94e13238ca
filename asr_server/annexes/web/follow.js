// Keeps in view what plays or is being said, until one looks elsewhere: a wheel, a touch or an open field ends that.

import { h } from "./dom.js";

export class Follow {
  isOn = true;
  target = null;

  /** Follows within `box` and the window below `bar`; `block`: where in it what came into view stands. */
  constructor(box, label, owner, { bar = null, block = "center" } = {}) {
    Object.assign(this, { box, bar, block });
    this.back = h("button", { type: "button", className: "small back", hidden: true }, label);
    this.back.onclick = () => this.start();
    for (const type of ["wheel", "touchmove"]) owner.listen(document, type, () => this.stop());
  }

  start() {
    this.isOn = true;
    this.back.hidden = true;
    if (this.target) this.show(this.target);
  }

  stop() {
    this.isOn = false;
    this.back.hidden = !this.target;
  }

  /** Nothing plays or is said any more. */
  rest() {
    this.target = null;
    this.back.hidden = true;
  }

  show(target) {
    this.target = target;
    this.back.hidden = this.isOn;
    if (!this.isOn) return;
    const [box, { top, bottom }] = [this.box.getBoundingClientRect(), target.getBoundingClientRect()];
    const isBelowBar = top >= Math.max(box.top, this.bar?.getBoundingClientRect().bottom ?? 0);
    if (!isBelowBar || bottom > Math.min(box.bottom, innerHeight)) target.scrollIntoView({ block: this.block });
  }
}
