"""The process that forks decode processes, and what those do. Run by `decode_processes`, not by people.

It loads FFmpeg's libraries once and stays without threads, so that forking it is quick and safe.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import msgspec

from asr_server.audio.decode_processes import END, HEADER, NEXT, REFUSED, SAMPLES, Finished, Refused
from asr_server.audio.decoders.base import CannotOpen
from asr_server.audio.decoders.ffmpeg import FfmpegDecoder
from asr_server.audio.limits import AudioLimits, invalid_audio
from asr_server.audio.stream import DecodedStream
from asr_server.errors import RequestError

MAX_MESSAGE = 1 << 12
BLOCK_TIMEOUT_S = 30.0  # a codec that works on one block for so long never ends: the system then kills it


def main(socket_fd: int) -> None:
    """Forks a decode process for each connection that arrives, until the server closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the server's business
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=socket_fd) as server:
        while True:
            message, fds, _, _ = socket.recv_fds(server, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                server.close()
                with socket.socket(fileno=fds[0]) as connection:
                    serve(connection)
                os._exit(0)
            os.close(fds[0])


def serve(connection: socket.socket) -> None:
    """One file after another, until the server closes the connection."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 1)
        if not message:
            return
        try:
            if not decode(connection, fds[0], msgspec.msgpack.decode(message, type=AudioLimits)):
                return
        except OSError:
            return
        finally:
            os.close(fds[0])


def decode(connection: socket.socket, fd: int, limits: AudioLimits) -> bool:
    """Answers each request for a block; False when the server has turned away."""
    stream: DecodedStream | None = None
    try:
        while connection.recv(1) == NEXT:
            signal.setitimer(signal.ITIMER_REAL, BLOCK_TIMEOUT_S)  # SIGALRM's default action ends the process
            stream = stream or open_stream(fd, limits)
            samples = stream.read()
            signal.setitimer(signal.ITIMER_REAL, 0)
            if samples is None:
                _answer(connection, END, msgspec.msgpack.encode(Finished(stream.truncated)))
                return True
            _answer(connection, SAMPLES, memoryview(samples).cast("B"))
        return False
    except RequestError as error:
        _answer(connection, REFUSED, msgspec.msgpack.encode(Refused(type(error).__name__, error.message)))
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if stream is not None:
            stream.close()


def open_stream(fd: int, limits: AudioLimits) -> DecodedStream:
    try:
        return DecodedStream(FfmpegDecoder(f"/dev/fd/{fd}"), limits)
    except CannotOpen as error:
        raise invalid_audio("The file is not audio, or damaged beyond reading.") from error


def _answer(connection: socket.socket, kind: int, content: bytes | memoryview) -> None:
    connection.sendall(HEADER.pack(kind, len(content)))
    connection.sendall(content)


if __name__ == "__main__":
    main(int(sys.argv[1]))
