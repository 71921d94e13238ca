"""Makes `python -m asr_server` the same as the command `asr-server`."""

from asr_server.cli import main

main()
