"""Gives tests and benchmarks speech whose words are known, and counts what was heard wrong of it."""

from harness.speech.corpora import Clip, corpora, corpus
from harness.speech.error_rates import Score, normalise, word_errors
from harness.speech.synthesis import SaidSentence, Speech, read_aloud, sentences

__all__ = [
    "Clip",
    "SaidSentence",
    "Score",
    "Speech",
    "corpora",
    "corpus",
    "normalise",
    "read_aloud",
    "sentences",
    "word_errors",
]
