"""Map ISO 639-2, 639-3 and withdrawn language codes to Whisper's."""

from __future__ import annotations

from typing import Final

_CODES: Final = (
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
    other: code for code, *others in (entry.split() for entry in _CODES.split("|")) for other in others
}


def whisper_code(code: str) -> str:
    """Return Whisper's code: `ger` and `de-AT` give `de`; unknown codes stay."""
    base = code.strip().lower().replace("_", "-").partition("-")[0]
    return _WHISPER_CODES.get(base, base)
