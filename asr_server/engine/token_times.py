"""From attention to the times of a text's tokens: none lasts through a pause. Used by `alignment.py`."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.engine.dtw import Matrix, first_frames
from asr_server.levels import Pauses

SPOKEN_IN_ONE_S: Final = 0.1  # the closure of a consonant, within a word, is a shorter pause
# What a token pays for each position of a longer one that it lasts through. Attention that lies where it
# should is worth two or three for each position.
PAUSE_COST: Final = 12.0


class TokenFrames(NamedTuple):
    first: npt.NDArray[np.intp]  # the frame with which each row begins
    peaks: npt.NDArray[np.intp]  # its frame with the most attention


def token_frames(
    gain: Matrix, attention: Matrix, pauses: Pauses, frame_s: float, pause_cost: float = PAUSE_COST
) -> TokenFrames:
    """Lays tokens along the audio by openai/whisper's dynamic time warping, which the pauses have a say in.

    Attention often lies on the same word said again next to it. One token then gets the time of two words
    and the other none, though a pause lies between them: to last through it has its price.

    Args:
        gain: [rows, frames], what it is worth to lay a row at a frame.
        attention: [rows, frames]
        pause_cost: 0: openai/whisper's plain method.
    """
    num_frames = gain.shape[1]
    first = first_frames(gain, pause_cost * _frames_of_pauses(pauses, num_frames, frame_s))
    ends = np.maximum([*first[1:], num_frames], first + 1)
    spans = zip(attention, first.tolist(), ends.tolist(), strict=True)
    return TokenFrames(first, np.array([start + np.argmax(row[start:end]) for row, start, end in spans]))


def _frames_of_pauses(pauses: Pauses, num_frames: int, frame_s: float) -> npt.NDArray[np.float64]:
    """[frames]: how many frames long the pause is that has its middle there. Before the first sound no token
    can end.
    """
    lengths = np.zeros(num_frames)
    for start_s, end_s in pauses.tolist():
        if start_s > 0 and end_s - start_s >= SPOKEN_IN_ONE_S:
            lengths[min(int((start_s + end_s) / 2 / frame_s), num_frames - 1)] = (end_s - start_s) / frame_s
    return lengths
