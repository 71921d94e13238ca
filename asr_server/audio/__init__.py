"""Decode recordings of any format to 16 kHz mono and cut them into chunks.

Runs in threads of the API process; FFmpeg has processes of its own. Knows neither HTTP nor the engine.
"""
