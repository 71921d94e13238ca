"""Training of the embedded model ``whisper-digits``: voices, mixing, training, evaluation, export."""
