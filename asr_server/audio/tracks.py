"""Choose a file's audio tracks. Decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asr_server.core import Track
from asr_server.errors import InvalidValue, NoSuchTrack
from asr_server.language_codes import whisper_code

MAX_TRACK = 999


class TrackChoice(msgspec.Struct, frozen=True):
    """The requested tracks; empty uses the file's default."""

    numbers: tuple[int, ...] = ()
    language: str = ""


DEFAULT_TRACK = TrackChoice()


def parse_choice(text: str, split_channels: bool) -> TrackChoice:
    """Read a number, a language code or, for split channels, two numbers (`1,2`). Raises InvalidValue."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        return DEFAULT_TRACK
    if all(part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= MAX_TRACK for part in parts):
        numbers = tuple(int(part) for part in parts)
        if len(numbers) == 1 or (split_channels and len(numbers) == 2 and numbers[0] != numbers[1]):
            return TrackChoice(numbers)
        raise InvalidValue(
            "'track' takes one number; with channels=split it can be two different ones.", "track"
        )
    if len(parts) > 1 or not parts[0][0].isalpha():
        raise InvalidValue(
            f"'track' is a number from 1 to {MAX_TRACK} or the code of a language, such as 2 or eng.", "track"
        )
    return TrackChoice(language=parts[0])


def ranked(tracks: Sequence[Track], choice: TrackChoice) -> list[Track]:
    """Return the tracks to try, the best first. Raises NoSuchTrack."""
    if choice.numbers:
        if max(choice.numbers) > len(tracks):
            raise NoSuchTrack(f"'track' asks for number {max(choice.numbers)}; {_described(tracks)}.")
        return [tracks[number - 1] for number in choice.numbers]
    wanted = whisper_code(choice.language)
    suitable = [track for track in tracks if not wanted or whisper_code(track.language or "") == wanted]
    if not suitable:
        raise NoSuchTrack(f"'track' asks for the language '{choice.language[:20]}'; {_described(tracks)}.")
    return sorted(suitable, key=lambda track: (not track.is_default, track.is_extra))


def require_only_track(choice: TrackChoice) -> None:
    """Check a choice for a format with one track. Raises NoSuchTrack."""
    if choice != DEFAULT_TRACK:
        ranked([Track(1)], choice)


def _described(tracks: Sequence[Track]) -> str:
    plural = "" if len(tracks) == 1 else "s"
    languages = ", ".join(f"{track.number}: {track.language or 'no language'}" for track in tracks[:20])
    return f"the file has {len(tracks)} audio track{plural} ({languages})"
