// Copies a text; also where the page has no https, and so no clipboard of the browser's.

import { h } from "./dom.js";

/** Whether it was copied. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const field = h("textarea", { className: "visually-hidden", value: text, readOnly: true });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}
