"""Take one request from audio to text, on the event loop. Knows no HTTP and imports no torch."""
