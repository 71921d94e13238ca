// A field in the place of some text: Enter or leaving it takes what it says, Escape does not.

import { h } from "./dom.js";

const COMPOSING = 229; // all that Safari says of it

/**
 * `onEnd(text, isByKey, isConfirmed)`, with the text of before where nothing is taken; what stood there is back by then.
 * Enter confirms a text, also one that is as before.
 */
export function editInPlace(element, before, label, onEnd) {
  const content = [...element.childNodes];
  const field = h("input", { value: before, "aria-label": label, autocomplete: "off" });
  const fit = () => (field.size = Math.max(3, field.value.length + 1));
  let isOpen = true;
  const end = (text, isByKey, isConfirmed = false) => {
    if (!isOpen) return;
    isOpen = false;
    element.replaceChildren(...content);
    onEnd(text, isByKey, isConfirmed);
  };
  const typed = () => field.value.trim().replace(/\s+/g, " ");
  fit();
  field.oninput = fit;
  field.onblur = () => end(typed(), false);
  field.onkeydown = (event) => {
    if (event.isComposing || event.keyCode === COMPOSING) return; // they are the input method's
    if (event.key === "Escape") end(before, true);
    else if (event.key === "Enter") end(typed(), true, true);
    else return;
    event.preventDefault();
  };
  element.replaceChildren(field);
  field.select();
  field.focus();
}
