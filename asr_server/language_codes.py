"""Name languages as Whisper does, read what clients call them, and join their texts.

Codes of ISO 639-2 and 639-3 and withdrawn ones are read as Whisper's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from asr_server.errors import InvalidValue

_OTHER_CODES: Final = (
    "af afr|am amh|ar ara arb|as asm|az aze azj|ba bak|be bel|bg bul|bn ben|bo bod tib|br bre|bs bos|ca cat|"
    "cs ces cze|cy cym wel|da dan|de deu ger|el ell gre|en eng|es spa|et est ekk|eu eus baq|fa fas per pes|"
    "fi fin|fo fao|fr fra fre|gl glg|gu guj|ha hau|haw haw|he heb iw|hi hin|hr hrv scr|ht hat|hu hun|"
    "hy hye arm|id ind in|is isl ice|it ita|ja jpn|jw jav jv|ka kat geo|kk kaz|km khm|kn kan|ko kor|la lat|"
    "lb ltz|ln lin|lo lao|lt lit|lv lav lvs|mg mlg|mi mri mao|mk mkd mac|ml mal|mn mon khk|mr mar|"
    "ms msa may zsm|mt mlt|my mya bur|ne nep npi|nl nld dut|nn nno|no nor nob nb|oc oci|pa pan|pl pol|"
    "ps pus pbt|pt por|ro ron rum mol mo|ru rus|sa san|sd snd|si sin|sk slk slo|sl slv|sn sna|so som|"
    "sq sqi alb|sr srp scc|su sun|sv swe|sw swa swh|ta tam|te tel|tg tgk|th tha|tk tuk|tl tgl fil|tr tur|"
    "tt tat|uk ukr|ur urd|uz uzb uzn|vi vie|yi yid ydd ji|yo yor|yue yue|zh zho chi cmn"
)
_WHISPER_CODES: Final = {
    other: code for code, *others in (entry.split() for entry in _OTHER_CODES.split("|")) for other in others
}


def whisper_code(code: str) -> str:
    """Return Whisper's code: `ger` and `de-AT` give `de`; unknown codes stay."""
    base = code.strip().lower().replace("_", "-").partition("-")[0]
    return _WHISPER_CODES.get(base, base)


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


def continuation(so_far: str, text: str, language: str | None) -> str:
    """Return what `text` adds to `so_far`, with one space between.

    Languages without spaces keep only the model's.
    """
    words = text.strip()
    if not so_far or not words:
        return words
    spaced = language not in UNSPACED or text[0].isspace()
    return f" {words}" if spaced else words
