"""Decodes recordings of any format to 16 kHz mono and cuts them into chunks, in threads of its own.

The transcription package uses it. It knows neither HTTP nor the engine.
"""
