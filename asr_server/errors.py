"""The errors that a user can meet. `api.errors` alone turns them into HTTP."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_CHARS: Final = 2000  # of what may repeat names and values of the client
MAX_PARAM_CHARS: Final = 200


class RequestError(Exception):
    """An error that the sender can mend: the field `param` and OpenAI's `code`."""

    code: str = "invalid_value"
    param: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = message[:MAX_MESSAGE_CHARS]
        super().__init__(self.message)
        if param is not None:
            self.param = param[:MAX_PARAM_CHARS]


class InvalidValue(RequestError):
    """A field is unknown, out of range or in conflict with another."""


class NotStereo(RequestError):
    """Channels cannot be split: the file does not have two."""

    param = "channels"


class NoSuchTrack(RequestError):
    """The file lacks the requested audio track."""

    param = "track"


class InvalidAudio(RequestError):
    """Not audio, damaged, or without an audio stream."""

    code = "invalid_audio"
    param = "file"


class AudioTooShort(RequestError):
    code = "audio_too_short"
    param = "file"


class AudioTooLong(RequestError):
    """Over a limit once decoded; the message names the limit and its setting."""

    code = "audio_too_long"
    param = "file"


class SampleRateTooHigh(AudioTooLong):
    code = "sample_rate_too_high"


class TooManyChannels(AudioTooLong):
    code = "too_many_channels"


class UploadTooLarge(RequestError):
    code = "request_too_large"
    param = "file"


class HeadersTooLarge(RequestError):
    code = "headers_too_large"


class TooManyHeaders(HeadersTooLarge):
    code = "too_many_headers"


class TooSlow(RequestError):
    code = "request_timeout"


class InvalidApiKey(RequestError):
    code = "invalid_api_key"


class AdminOff(RequestError):
    """The server has no admin key: nobody can load and unload models."""

    code = "admin_off"


class HostNotAllowed(RequestError):
    """The Host is neither this machine nor in --allowed-hosts."""

    code = "host_not_allowed"


class OriginNotAllowed(RequestError):
    """Another site's page asks for a realtime session."""

    code = "origin_not_allowed"


class ModelNotFound(RequestError):
    code = "model_not_found"
    param = "model"


class Overloaded(RequestError):
    code = "server_overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """A limit of the request's own key."""

    code = "rate_limit_exceeded"


class ServiceUnavailable(Exception):
    """Not the sender's fault: a later try may succeed."""

    code: str

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class EngineUnavailable(ServiceUnavailable):
    code = "engine_unavailable"


class SessionsTaken(ServiceUnavailable):
    code = "server_overloaded"


class StorageUnavailable(ServiceUnavailable):
    code = "storage_unavailable"


class DecodingUnavailable(ServiceUnavailable):
    """The decode process was ended, or could not start."""

    code = "decoding_unavailable"


class SpeakersUnavailable(ServiceUnavailable):
    code = "speakers_unavailable"


class ShuttingDown(EngineUnavailable):
    """The server is stopping; another can take the request."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


class ChunkFailed(Exception):
    """A replica could not decode this chunk. The message is for the log."""


class RequestStalled(Exception):
    """The request made no progress: a server's fault. The client sees the message."""

    code = "request_stalled"


class ReplicasEnded(ChunkFailed):
    """Every replica given this chunk died on it. The client sees the message."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(f"A part of the audio has ended {num_replicas} engine processes one after another.")


class CheckpointError(Exception):
    """The checkpoint is missing, incomplete, or not Whisper. The message says what to do."""


class NotFetched(Exception):
    """A source lacks the model or is unreachable. The message gives the reason."""
