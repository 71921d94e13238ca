"""The levels of G.711's codes.

A code is a sign, three bits of exponent and four of mantissa (ITU-T G.711).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float32]  # [256], by code

_CODES: Final = np.arange(256)
_FULL_SCALE: Final = 2.0**15


def _mu_law() -> Table:
    """Decode mu-law: all bits inverted, the magnitude biased by 132."""
    codes = ~_CODES & 0xFF
    exponent, mantissa = (codes >> 4) & 7, codes & 15
    magnitude = (((mantissa << 3) + 132) << exponent) - 132
    return (np.where(codes & 0x80, -magnitude, magnitude) / _FULL_SCALE).astype(np.float32)


def _a_law() -> Table:
    """Decode A-law: every other bit inverted, the lowest exponent linear."""
    codes = _CODES ^ 0x55
    exponent, mantissa = (codes >> 4) & 7, codes & 15
    magnitude = np.where(
        exponent == 0, (mantissa << 4) + 8, ((mantissa << 4) + 264) << np.maximum(exponent - 1, 0)
    )
    return (np.where(codes & 0x80, magnitude, -magnitude) / _FULL_SCALE).astype(np.float32)


MU_LAW: Final = _mu_law()
A_LAW: Final = _a_law()
