"""The recorded people of the Free Spoken Digit Dataset by the part they play."""

LEFT_OUT_SPEAKER = "jackson"
"""Fixed before any result was seen: trains and selects nothing in the plan ``examined``."""

SPEAKERS = ("george", "jackson", "lucas", "nicolas", "yweweler")
