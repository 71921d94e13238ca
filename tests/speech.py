"""Spoken digits, for the embedded model, and where the recordings of people lie."""

from benchmarks.speech.corpora import RECORDINGS
from benchmarks.speech.digits import VOICES, WORDS, Spoken, digit, digits_of, errors_in, say, silence

__all__ = ["RECORDINGS", "VOICES", "WORDS", "Spoken", "digit", "digits_of", "errors_in", "say", "silence"]
