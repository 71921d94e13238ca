// Keys that work anywhere on the page. Unless one writes: Space plays, arrows go 5 s, Ctrl+Z takes a correction back.
// Also in a field, as in oTranscribe: F1 goes back, F2 forth, F3 is slower, F4 faster; Ctrl+Space plays and pauses.

const STEP_S = 5;
const BACK_S = 2; // as much as one has just failed to understand
const OWN_KEYS = "input, textarea, select, button, summary, a";

/** `cards()`: the cards that are open, from the top. */
export function listenToKeys(cards) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.altKey) return;
    const isCommand = event.ctrlKey || event.metaKey;
    const isOwn = event.target.closest?.(OWN_KEYS);
    const isInField = event.target.closest?.("input:not([type=range]), textarea, select");
    const isTaken = onPlayerKey(event, cards(), !isCommand && !isOwn) || (isCommand && !isInField && onCommand(event, cards()));
    if (isTaken) event.preventDefault();
  });
}

function onCommand({ key, shiftKey }, cards) {
  const name = key.toLowerCase();
  const corrected = cards.map(({ recording }) => recording).sort((a, b) => b.amendedAt - a.amendedAt)[0];
  if (name === "z" && !shiftKey) return corrected?.undo();
  return (name === "y" || name === "z") && corrected?.redo();
}

function onPlayerKey({ key, ctrlKey, target }, cards, isPlain) {
  const players = cards.map(({ player }) => player).filter(Boolean);
  const player = players.find(({ isPlaying }) => isPlaying) || players[0];
  const go = (seconds) => () => player.seek(player.audio.currentTime + seconds);
  const actions = {
    F1: go(-BACK_S),
    F2: go(BACK_S),
    F3: () => player.changeRate(-1),
    F4: () => player.changeRate(1),
    ...(isPlain && { ArrowLeft: go(-STEP_S), ArrowRight: go(STEP_S) }),
    ...(target.type === "range" && { ArrowLeft: go(-1), ArrowRight: go(1), ArrowDown: go(-1), ArrowUp: go(1) }),
    ...((isPlain || ctrlKey || target.type === "range") && { " ": () => player.toggle() }),
  };
  if (!player || !actions[key]) return false;
  actions[key]();
  return true;
}
