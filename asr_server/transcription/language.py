"""Name languages, join their texts, and find a request's by the vote of its first chunks with speech."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from asr_server.errors import InvalidValue
from asr_server.language_codes import whisper_code

ENGLISH: Final = "en"
AUTO: Final = "auto"  # as many clients write "detect it"
UNKNOWN_NAME: Final = "unknown"  # nothing was said and nothing was given; a string, as clients require


def _pairs(table: str) -> dict[str, str]:
    return dict(entry.split(" ", 1) for entry in table.split("|"))


# Code of Whisper's <|xx|> token and lower-case English name.
NAMES: Final[Mapping[str, str]] = _pairs(
    "af afrikaans|am amharic|ar arabic|as assamese|az azerbaijani|ba bashkir|be belarusian|"
    "bg bulgarian|bn bengali|bo tibetan|br breton|bs bosnian|ca catalan|cs czech|cy welsh|"
    "da danish|de german|el greek|en english|es spanish|et estonian|eu basque|fa persian|"
    "fi finnish|fo faroese|fr french|gl galician|gu gujarati|ha hausa|haw hawaiian|he hebrew|"
    "hi hindi|hr croatian|ht haitian creole|hu hungarian|hy armenian|id indonesian|is icelandic|"
    "it italian|ja japanese|jw javanese|ka georgian|kk kazakh|km khmer|kn kannada|ko korean|"
    "la latin|lb luxembourgish|ln lingala|lo lao|lt lithuanian|lv latvian|mg malagasy|mi maori|"
    "mk macedonian|ml malayalam|mn mongolian|mr marathi|ms malay|mt maltese|my myanmar|ne nepali|"
    "nl dutch|nn nynorsk|no norwegian|oc occitan|pa punjabi|pl polish|ps pashto|pt portuguese|"
    "ro romanian|ru russian|sa sanskrit|sd sindhi|si sinhala|sk slovak|sl slovenian|sn shona|"
    "so somali|sq albanian|sr serbian|su sundanese|sv swedish|sw swahili|ta tamil|te telugu|"
    "tg tajik|th thai|tk turkmen|tl tagalog|tr turkish|tt tatar|uk ukrainian|ur urdu|uz uzbek|"
    "vi vietnamese|yi yiddish|yo yoruba|yue cantonese|zh chinese"
)
_OTHER_NAMES: Final = (
    "bn bangla|my burmese|es castilian|fa farsi|tl filipino|nl flemish|ht haitian|"
    "lb letzeburgesch|zh mandarin|ro moldavian|ro moldovan|pa panjabi|ps pushto|si sinhalese|"
    "ca valencian"
)
_CODES: Final = {name: code for code, name in NAMES.items()} | {
    name: code for code, name in (entry.split(" ", 1) for entry in _OTHER_NAMES.split("|"))
}

# Written without spaces between words, so that chunks are joined without one.
UNSPACED: Final = frozenset({"bo", "ja", "km", "lo", "my", "th", "yue", "zh"})


class Languages:
    def __init__(self, codes: Iterable[str]) -> None:
        self.codes: frozenset[str] = frozenset(codes) or frozenset({ENGLISH})

    @property
    def only(self) -> str | None:
        return next(iter(self.codes)) if len(self.codes) == 1 else None

    def given_code(self, text: str | None, param: str = "language") -> str | None:
        """Return the client's code; None means detection. Raises InvalidValue."""
        return self.code(text, param) if text and is_given(text) else None

    def choice(
        self, language: str | None, candidates: Sequence[str], params: tuple[str, str]
    ) -> tuple[str | None, tuple[str, ...]]:
        """Return the code (None is detected) and the candidates; a single candidate is the language.

        Args:
            params: the client's field names for both.

        Raises InvalidValue.
        """
        codes = tuple(self.code(candidate, params[1]) for candidate in candidates)
        given = self.given_code(language, params[0])
        return (codes[0], ()) if len(codes) == 1 else (given, codes)

    def code(self, text: str, param: str = "language") -> str:
        """Read `en`, `EN`, `eng`, `english`, `en-GB`, `zh_Hans_CN`. Raises InvalidValue."""
        word = text.strip().lower().replace("_", "-")
        for candidate in (word, _CODES.get(word, ""), word.split("-")[0]):
            code = candidate if candidate in self.codes else whisper_code(candidate)
            if code in self.codes:
                return code
        known = ", ".join(f"{code} ({name_of(code)})" for code in sorted(self.codes))
        raise InvalidValue(f"Language '{text[:40]}' is not known to this model. Known: {known}.", param)


def is_given(text: str) -> bool:
    return text.strip().lower() not in ("", AUTO)


def name_of(code: str | None) -> str:
    return UNKNOWN_NAME if code is None else NAMES.get(code, code)


def likeliest(probabilities: Mapping[str, float], candidates: Collection[str]) -> str:
    eligible = [code for code in probabilities if code in candidates] or list(probabilities)
    return max(eligible, key=probabilities.__getitem__)


def continuation(so_far: str, text: str, language: str | None) -> str:
    """Return what `text` adds to `so_far`, with one space between.

    Languages without spaces keep only the model's.
    """
    words = text.strip()
    if not so_far or not words:
        return words
    spaced = language not in UNSPACED or text[0].isspace()
    return f" {words}" if spaced else words


CONFIDENT: Final = 0.8  # that the language is right: more chunks need not be heard
MAX_VOTES: Final = 4  # chunks with speech, however doubtful
LEAST_PROBABILITY: Final = 1e-6  # so that one chunk cannot rule out a language


class LanguageDetector:
    """Let one chunk at a time detect, while the others wait.

    A chunk votes with its log-probabilities; the largest sum wins. A sure first chunk decides alone.
    `guess` is the language in which a voting chunk is decoded; if another wins, it is decoded again.

    Args:
        code: the language, if there is no choice.
        candidates: the languages allowed; empty: all.
        max_votes: most chunks that vote.
        per_chunk: detect every chunk by itself.
    """

    def __init__(
        self,
        code: str | None,
        candidates: tuple[str, ...] = (),
        max_votes: int = MAX_VOTES,
        per_chunk: bool = False,
    ) -> None:
        self.is_per_chunk = per_chunk and code is None
        self.code = code  # once known
        self.probability: float | None = None  # that it is right, where it was detected
        self.guess = code  # the likeliest so far, perhaps of a chunk without speech
        self._candidates = candidates
        self._max_votes = max_votes
        self._num_votes = 0
        self._votes: dict[str, float] = {}
        self._pending: dict[str, float] = {}  # of the chunk that detects
        self._all_sent = False
        self._probe_finished: asyncio.Event | None = None  # by the chunk that detects
        self._settled = asyncio.Event()
        if code is not None:
            self._settled.set()

    @property
    def is_settled(self) -> bool:
        return self.is_per_chunk or self.code is not None

    def of_chunk(self, detected: str | None) -> str | None:
        return detected if self.is_per_chunk else self.code

    async def next_language(self) -> str | None:
        """Return the next chunk's language; None lets it detect."""
        while not self.is_settled:
            if self._probe_finished is None or self._probe_finished.is_set():
                self._probe_finished = asyncio.Event()
                return None
            await self._probe_finished.wait()
        return self.code

    def on_probabilities(self, probabilities: Mapping[str, float]) -> str:
        if self.is_per_chunk:
            return likeliest(probabilities, self._candidates)
        self._pending = self._log_probabilities(probabilities)
        self.guess, probability = _winner(self._sum())
        if probability >= CONFIDENT:
            self._settle(self.guess, probability)
        return self.guess

    def of_part(self, probabilities: Mapping[str, float]) -> str:
        return likeliest(probabilities, self._candidates)

    def on_decoded(self, language: str | None) -> None:
        """Note the language in which the detecting chunk was read; None, without speech, has no vote."""
        if self.code is None and language is not None:
            self._votes, self._num_votes = self._sum(), self._num_votes + 1
        self._pending = {}
        if self._probe_finished is not None:
            self._probe_finished.set()
        if self._all_sent or self._num_votes >= self._max_votes:
            self._conclude()

    def on_all_sent(self) -> None:
        """Note that no further chunk will vote."""
        self._all_sent = True
        if self._probe_finished is None or self._probe_finished.is_set():
            self._conclude()

    def _conclude(self) -> None:
        if self.code is None and self._votes:
            self._settle(*_winner(self._votes))
        self._settled.set()

    async def conclusion(self) -> str | None:
        """Wait for the language. Only a chunk that has voted may wait."""
        await self._settled.wait()
        return self.code

    def _log_probabilities(self, probabilities: Mapping[str, float]) -> dict[str, float]:
        eligible = [code for code in probabilities if code in self._candidates] or list(probabilities)
        total = sum(probabilities[code] for code in eligible) or 1.0
        return {code: math.log(max(probabilities[code] / total, LEAST_PROBABILITY)) for code in eligible}

    def _sum(self) -> dict[str, float]:
        return {code: value + self._votes.get(code, 0.0) for code, value in self._pending.items()}

    def _settle(self, language: str, probability: float) -> None:
        self.code, self.probability = language, probability
        if self._probe_finished is not None:
            self._probe_finished.set()
        self._settled.set()


def _winner(votes: Mapping[str, float]) -> tuple[str, float]:
    code = max(votes, key=votes.__getitem__)
    return code, 1 / sum(math.exp(value - votes[code]) for value in votes.values())
