// Small helpers for the document.

export const $ = (id) => document.getElementById(id);

/** An element with properties, `dataset`, `aria-*` attributes and children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "role") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The parts of a template's copy by their `data-part`, and the whole as `element`. */
export function partsOf(id, name) {
  const element = $(id).content.firstElementChild.cloneNode(true);
  label(element, name);
  const parts = [...element.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]);
  return { element, ...Object.fromEntries(parts) };
}

/** Names what belongs to a recording: `Play call.wav`. */
export function label(element, name) {
  for (const part of element.querySelectorAll("[data-label]")) part.setAttribute("aria-label", `${part.dataset.label} ${name}`);
}

/** What `use` returns; undefined where it throws, as where the browser keeps nothing. */
export function attempt(use) {
  try {
    return use();
  } catch {
    return undefined;
  }
}

/** What stands between `backticks` is shown as code. */
export function show(element, text) {
  element.hidden = !text;
  element.replaceChildren(...(text || "").split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part)));
}

/** Also where the page has no https, and so no randomUUID. */
export const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("-");

/** In lower case, each letter at its old place: “İ” has two letters there. */
export function lower(text) {
  const found = text.toLowerCase();
  if (found.length === text.length) return found;
  return [...text].map((letter) => letter.toLowerCase().slice(0, letter.length).padEnd(letter.length)).join("");
}

/** `1 turn`, `2 turns`. */
export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export const pad = (value, digits = 2) => String(value).padStart(digits, "0");

/** `1:05` or `1:02:05`. */
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds || 0));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

const SLICE_MS = 5; // of elements, whose layout takes ten times as long
const pause = () => globalThis.scheduler?.yield?.() ?? new Promise((resolve) => setTimeout(resolve));

/** Calls `each` for all `items`, the first at once; now and then the browser may draw and listen in between. */
export async function inSlices(items, each) {
  let since = performance.now();
  for (const item of items) {
    each(item);
    if (performance.now() - since < SLICE_MS) continue;
    await pause();
    since = performance.now();
  }
}

/** What tells others of itself. */
export class Emitter extends EventTarget {
  emit(what, detail = null) {
    this.dispatchEvent(new CustomEvent(what, { detail }));
  }
}

/** What one card or one microphone has taken from the browser; abort() gives all of it back. */
export class Owner extends AbortController {
  get isClosed() {
    return this.signal.aborted;
  }

  listen(target, type, listener) {
    target.addEventListener(type, listener, { signal: this.signal });
  }

  /** Calls `release` at abort(), or at once where that is over. */
  keep(release) {
    if (this.isClosed) release();
    else this.signal.addEventListener("abort", release, { once: true });
  }
}

/** An element around `first`, `last` and all between them, which have one parent. */
export function wrap(first, last) {
  const range = new Range();
  range.setStartBefore(first);
  range.setEndAfter(last);
  const element = h("span");
  range.surroundContents(element);
  return element;
}

const COMPOSING = 229; // all that Safari says of it

/**
 * A field in the place of some text: Enter or leaving it takes what it says, Escape does not.
 * `onEnd(text, key)`, with the text of before where nothing is taken and the event of the key that ended it, if one did;
 * what stood there is back by then.
 */
export function editInPlace(element, before, label, onEnd, { keys = ["Enter"], tag = "input" } = {}) {
  const content = [...element.childNodes];
  const field = h(tag, { value: before, "aria-label": label, autocomplete: "off" });
  let isOpen = true;
  const end = (text, key = null) => {
    if (!isOpen) return;
    isOpen = false;
    element.replaceChildren(...content);
    onEnd(text, key);
  };
  const typed = () => field.value.trim().replace(/\s+/g, " ");
  field.onblur = () => end(typed());
  field.onkeydown = (event) => {
    if (event.isComposing || event.keyCode === COMPOSING) return; // they are the input method's
    if (event.key === "Escape") end(before, event);
    else if (keys.includes(event.key)) end(typed(), event);
    else return;
    event.preventDefault();
  };
  element.replaceChildren(field);
  field.select();
  field.focus();
}
