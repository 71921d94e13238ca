"""Files that have come to harm, and files that mean harm."""

from collections.abc import Iterator

import numpy as np

Generator = np.random.Generator


def flip_bits(data: bytearray, rng: Generator) -> bytearray:
    """A few flips; half of the time all within the first 512 bytes, where the headers are."""
    reach = min(len(data), 512) if rng.random() < 0.5 else len(data)
    for _ in range(int(rng.integers(1, 65))):
        data[int(rng.integers(reach))] ^= 1 << int(rng.integers(8))
    return data


def cut(data: bytearray, rng: Generator) -> bytearray:
    return data[: int(rng.integers(len(data)))]


def lose_a_part(data: bytearray, rng: Generator) -> bytearray:
    start, end = sorted(rng.integers(len(data), size=2).tolist())
    return data[:start] + data[end:]


def repeat_a_part(data: bytearray, rng: Generator) -> bytearray:
    start, end = sorted(rng.integers(len(data), size=2).tolist())
    return data[:end] + data[start:]


def overwrite(data: bytearray, rng: Generator) -> bytearray:
    """A run of zeros, of ones, or of noise."""
    start = int(rng.integers(len(data)))
    length = min(int(rng.integers(1, 4096)), len(data) - start)
    fill = (bytes(length), b"\xff" * length, rng.bytes(length))[int(rng.integers(3))]
    data[start : start + length] = fill
    return data


def extreme_number(data: bytearray, rng: Generator) -> bytearray:
    """A 32-bit field near the start set to a size that cannot be."""
    start = int(rng.integers(min(len(data), 256)))
    value = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF8)[int(rng.integers(6))]
    data[start : start + 4] = value.to_bytes(4, "little" if rng.random() < 0.5 else "big")
    return data


MUTATIONS = (flip_bits, cut, lose_a_part, repeat_a_part, overwrite, extreme_number)


def mutated(originals: dict[str, bytes], count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(name, content): the formats in turn; now and then one format's head on another's body."""
    rng = np.random.default_rng(seed)
    names = list(originals)
    for number in range(count):
        name = names[number % len(names)]
        data = bytearray(originals[name])
        if rng.random() < 0.15:
            other = originals[names[int(rng.integers(len(names)))]]
            head = int(rng.integers(1, 256))
            data[:head] = other[:head]
        for _ in range(int(rng.integers(1, 4))):
            mutation = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
            data = mutation(data, rng) if data else data
        yield f"{number}-{name}", bytes(data)
