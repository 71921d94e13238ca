"""What permessage-deflate would cost and save for live audio: `python -m benchmarks.deflate`.

The appends of a speech recording, as clients send them, through the extension of the websockets package that
the server would use; processor time of this process.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import soundfile
import soxr
from websockets.extensions.permessage_deflate import PerMessageDeflate
from websockets.frames import Frame, Opcode

RATE: Final = 24_000
APPEND_S: Final = 0.05  # as LiveKit sends them
RECORDING: Final = Path(__file__).parents[1] / "examples" / "digits.wav"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    seconds = 10.0 if parser.parse_args().quick else 120.0
    frames = list(appends(seconds))
    plain_bytes = sum(len(frame.data) for frame in frames)
    rate_kb = plain_bytes / seconds / 1000
    print(f"{seconds:g} s of speech in appends of {APPEND_S * 1000:g} ms: {rate_kb:.1f} kB/s")
    parsing_s = processor_s(lambda: [json.loads(bytes(frame.data)) for frame in frames])
    print(f"json alone: {1e6 * parsing_s / seconds:.0f} us of processor time a second of audio")
    for with_context in (False, True):
        print_row(frames, plain_bytes, seconds, with_context)


def print_row(frames: list[Frame], plain_bytes: int, seconds: float, with_context: bool) -> None:
    client, server = (PerMessageDeflate(not with_context, not with_context, 15, 15) for _ in range(2))
    packed: list[Frame] = []
    packing_s = processor_s(lambda: packed.extend(client.encode(frame) for frame in frames))
    unpacking_s = processor_s(lambda: [server.decode(frame) for frame in packed])
    num_bytes = sum(len(frame.data) for frame in packed)
    how = "context kept" if with_context else "each by itself"
    client_us, server_us = 1e6 * packing_s / seconds, 1e6 * unpacking_s / seconds
    print(
        f"deflate, {how}: {num_bytes / plain_bytes:.0%} of the bytes; "
        f"client {client_us:.0f} us, server {server_us:.0f} us a second of audio"
    )


def processor_s(work: Callable[[], object]) -> float:
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


def appends(seconds: float) -> Iterator[Frame]:
    """Text frames with the recording, again and again."""
    samples, rate = soundfile.read(RECORDING, dtype="float32")
    pcm = (soxr.resample(samples, rate, RATE) * 32767).clip(-32768, 32767).astype("<i2")
    pcm = np.resize(pcm, round(seconds * RATE))
    step = round(APPEND_S * RATE)
    for first in range(0, len(pcm), step):
        audio = base64.b64encode(pcm[first : first + step].tobytes()).decode()
        message = json.dumps({"type": "input_audio_buffer.append", "audio": audio})
        yield Frame(Opcode.TEXT, message.encode())


if __name__ == "__main__":
    main()
