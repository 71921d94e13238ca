"""Gives tests and benchmarks speech whose words are known, and counts what was heard wrong of it."""

from benchmarks.speech.corpora import Clip, corpora, corpus
from benchmarks.speech.error_rates import Score, normalise, word_errors
from benchmarks.speech.synthesis import SaidSentence, Speech, read_aloud, sentences

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
