"""Sounds without a word in them."""

from harness.speech.noises import KINDS, forty_minutes, make_noise, thump

__all__ = ["KINDS", "forty_minutes", "make_noise", "thump"]
