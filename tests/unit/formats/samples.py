"""Transcripts to render."""

from asr_server.core import Segment, TokenLogprob, Transcript


def segment(id: int, start_s: float, end_s: float, text: str) -> Segment:
    return Segment(id, 0, start_s, end_s, text, (1, 2), 0.0, -0.1, 1.2, 0.01)


def transcript(*segments: Segment, text: str = "", duration_s: float = 12.3) -> Transcript:
    return Transcript(
        text=text,
        segments=segments,
        logprobs=(TokenLogprob(" one", -0.5, (32, 111, 110, 101)),),
        language="english",
        duration_s=duration_s,
        num_audio_tokens=615,
        num_text_tokens=2,
        languages=("en",) if text else (),
    )


ONE = transcript(segment(0, 0.5, 2.0, " one"), segment(1, 3661.2341, 3662, " two"), text="one two")
