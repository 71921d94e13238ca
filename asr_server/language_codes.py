"""Name languages as Whisper does, read what clients call them, and join their texts.

Codes of ISO 639-2 and 639-3 and withdrawn ones are read as Whisper's.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from asr_server.errors import InvalidValue

# The code of Whisper's <|xx|> token, its other codes, its English name, its other names.
_LANGUAGES: Final = (
    "af afr: afrikaans|am amh: amharic|ar ara arb: arabic|as asm: assamese|az aze azj: azerbaijani|"
    "ba bak: bashkir|be bel: belarusian|bg bul: bulgarian|bn ben: bengali/bangla|bo bod tib: tibetan|"
    "br bre: breton|bs bos: bosnian|ca cat: catalan/valencian|cs ces cze: czech|cy cym wel: welsh|"
    "da dan: danish|de deu ger: german|el ell gre: greek|en eng: english|es spa: spanish/castilian|"
    "et est ekk: estonian|eu eus baq: basque|fa fas per pes: persian/farsi|fi fin: finnish|"
    "fo fao: faroese|fr fra fre: french|gl glg: galician|gu guj: gujarati|ha hau: hausa|"
    "haw haw: hawaiian|he heb iw: hebrew|hi hin: hindi|hr hrv scr: croatian|"
    "ht hat: haitian creole/haitian|hu hun: hungarian|hy hye arm: armenian|id ind in: indonesian|"
    "is isl ice: icelandic|it ita: italian|ja jpn: japanese|jw jav jv: javanese|ka kat geo: georgian|"
    "kk kaz: kazakh|km khm: khmer|kn kan: kannada|ko kor: korean|la lat: latin|"
    "lb ltz: luxembourgish/letzeburgesch|ln lin: lingala|lo lao: lao|lt lit: lithuanian|"
    "lv lav lvs: latvian|mg mlg: malagasy|mi mri mao: maori|mk mkd mac: macedonian|ml mal: malayalam|"
    "mn mon khk: mongolian|mr mar: marathi|ms msa may zsm: malay|mt mlt: maltese|"
    "my mya bur: myanmar/burmese|ne nep npi: nepali|nl nld dut: dutch/flemish|nn nno: nynorsk|"
    "no nor nob nb: norwegian|oc oci: occitan|pa pan: punjabi/panjabi|pl pol: polish|"
    "ps pus pbt: pashto/pushto|pt por: portuguese|ro ron rum mol mo: romanian/moldavian/moldovan|"
    "ru rus: russian|sa san: sanskrit|sd snd: sindhi|si sin: sinhala/sinhalese|sk slk slo: slovak|"
    "sl slv: slovenian|sn sna: shona|so som: somali|sq sqi alb: albanian|sr srp scc: serbian|"
    "su sun: sundanese|sv swe: swedish|sw swa swh: swahili|ta tam: tamil|te tel: telugu|tg tgk: tajik|"
    "th tha: thai|tk tuk: turkmen|tl tgl fil: tagalog/filipino|tr tur: turkish|tt tat: tatar|"
    "uk ukr: ukrainian|ur urd: urdu|uz uzb uzn: uzbek|vi vie: vietnamese|yi yid ydd ji: yiddish|"
    "yo yor: yoruba|yue yue: cantonese|zh zho chi cmn: chinese/mandarin"
)
NAMES: Final[dict[str, str]] = {}  # lower-case English ones, by Whisper's codes
_WHISPER_CODES: Final[dict[str, str]] = {}  # by other codes
_CODES: Final[dict[str, str]] = {}  # by names
for _entry in _LANGUAGES.split("|"):
    _codes, _names = _entry.split(": ")
    _code, *_other_codes = _codes.split()
    NAMES[_code], *_ = _names.split("/")
    _WHISPER_CODES.update(dict.fromkeys(_other_codes, _code))
    _CODES.update(dict.fromkeys(_names.split("/"), _code))


def whisper_code(code: str) -> str:
    """Return Whisper's code: `ger` and `de-AT` give `de`; unknown codes stay."""
    base = code.strip().lower().replace("_", "-").partition("-")[0]
    return _WHISPER_CODES.get(base, base)


ENGLISH: Final = "en"
AUTO: Final = "auto"  # as many clients write "detect it"
UNKNOWN_NAME: Final = "unknown"  # nothing was said and nothing was given; a string, as clients require

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
