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

/** What `use` returns; undefined where the browser keeps nothing. */
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

/** `1:05` or `1:02:05`. */
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds || 0));
  const pad = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

/** Draws once for all calls until the next frame; of a hidden tab that is when it is seen again. */
export function onceAFrame(draw) {
  let frame = null;
  const drawNow = () => {
    frame = null;
    draw();
  };
  return () => (frame ??= requestAnimationFrame(drawNow));
}

const SLICE_MS = 5; // of elements, whose layout takes ten times as long
const pause = () =>
  new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel(); // timers are slow in a hidden tab
    port1.onmessage = () => resolve(port1.close());
    port2.postMessage(null);
  });

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

export function color(name) {
  const probe = h("span", { className: "probe" });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** A canvas at the screen's resolution. */
export function context2d(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}
