// Keys that work anywhere on the page, unless one writes: Space plays, arrows go 5 s, Ctrl+Z takes a correction back.

const STEP_S = 5;
const OWN_KEYS = "input, textarea, select, button, summary, a, [role=slider]";

/** `cards()`: the cards that are open, from the top. */
export function listenToKeys(cards) {
  document.addEventListener("keydown", (event) => {
    if (event.target.closest?.("input, textarea, select") || event.defaultPrevented || event.altKey) return;
    const isCommand = event.ctrlKey || event.metaKey;
    const isTaken = isCommand ? onCommand(event, cards()) : !event.target.closest?.(OWN_KEYS) && onKey(event, cards());
    if (isTaken) event.preventDefault();
  });
}

function onCommand({ key, shiftKey }, cards) {
  const name = key.toLowerCase();
  const corrected = cards.map(({ recording }) => recording).sort((a, b) => b.amendedAt - a.amendedAt)[0];
  if (name === "z" && !shiftKey) return corrected?.undo();
  return (name === "y" || name === "z") && corrected?.redo();
}

function onKey({ key }, cards) {
  const players = cards.map(({ player }) => player).filter(Boolean);
  const player = players.find(({ isPlaying }) => isPlaying) || players[0];
  const step = { ArrowRight: STEP_S, ArrowLeft: -STEP_S }[key];
  if (!player) return false;
  if (key === " ") player.toggle();
  else if (step) player.seek(player.audio.currentTime + step);
  return key === " " || Boolean(step);
}
