"""When each word of a given text is said: `POST /v1/audio/alignments` and `asr-server align`.

The server's own transcription gives most words their times: the same words, matched in order. What differs is
laid along the sound between by the decoder itself. Text that nobody says is marked, and so is speech that
the text lacks.
"""
