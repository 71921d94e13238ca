// A button that opens a few choices below it. Escape, a choice or a click elsewhere closes it.

import { h } from "./dom.js";

/** `choices`: [label, hint, chosen()] each. */
export function menu(label, name, choices) {
  const summary = h("summary", { className: "button small", "aria-label": `${label} ${name}` }, label);
  const buttons = choices.map(([text, hint, chosen]) => {
    const button = h("button", { type: "button" }, text, " ", h("span", { className: "muted" }, hint));
    button.onclick = () => {
      close();
      chosen();
    };
    return button;
  });
  const element = h("details", { className: "menu" }, summary, h("div", { className: "menu-choices", role: "group", "aria-label": label }, ...buttons));
  const close = () => {
    element.open = false;
    summary.focus();
  };
  const onPress = (event) => element.contains(event.target) || (element.open = false);
  element.ontoggle = () => {
    document[element.open ? "addEventListener" : "removeEventListener"]("pointerdown", onPress);
    if (element.open) element.lastChild.scrollIntoView({ block: "nearest" });
  };
  element.onkeydown = (event) => {
    if (event.key === "Escape" && element.open) close();
  };
  return element;
}
