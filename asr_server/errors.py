"""The errors that a user can meet, as exception types. `api.errors` alone turns them into HTTP.

Raised and caught in every process. Imports nothing of ours.
"""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_CHARS: Final = 2000  # of what may repeat names and values of the client
MAX_PARAM_CHARS: Final = 200


class RequestError(Exception):
    """An error that the sender can mend. `param` is the field at fault, `code` OpenAI's word for programs."""

    code: str = "invalid_value"
    param: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = message[:MAX_MESSAGE_CHARS]
        super().__init__(self.message)
        if param is not None:
            self.param = param[:MAX_PARAM_CHARS]


class InvalidValue(RequestError):
    """A field is unknown, out of range or does not go with another."""


class NotStereo(RequestError):
    """Channels are to be kept apart, and this file has not two of them."""

    param = "channels"


class NoSuchTrack(RequestError):
    """The file has no audio track of the number or language that the request names."""

    param = "track"


class InvalidAudio(RequestError):
    """Not audio, damaged beyond reading, or without an audio stream."""

    code = "invalid_audio"
    param = "file"


class AudioTooShort(RequestError):
    code = "audio_too_short"
    param = "file"


class AudioTooLong(RequestError):
    """Longer, larger or wider than the limits once decoded; the message names the limit and its setting."""

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
    """The client takes too long to send its request."""

    code = "request_timeout"


class InvalidApiKey(RequestError):
    code = "invalid_api_key"


class AdminOff(RequestError):
    """The server has no admin key: nobody can load and unload models."""

    code = "admin_off"


class HostNotAllowed(RequestError):
    """The Host names neither this machine nor a name in --allowed-hosts."""

    code = "host_not_allowed"


class OriginNotAllowed(RequestError):
    """A page of another site asks for a realtime session."""

    code = "origin_not_allowed"


class ModelNotFound(RequestError):
    code = "model_not_found"
    param = "model"


class Overloaded(RequestError):
    """The limit of requests in flight or of open connections is reached."""

    code = "server_overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceUnavailable(Exception):
    """An error that is not the sender's fault: another try later may succeed."""

    code: str

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class EngineUnavailable(ServiceUnavailable):
    """No replica can take work now (starting, draining or down)."""

    code = "engine_unavailable"


class SessionsTaken(ServiceUnavailable):
    """The limit of realtime sessions is reached."""

    code = "server_overloaded"


class StorageUnavailable(ServiceUnavailable):
    """The temporary folder is full or gone."""

    code = "storage_unavailable"


class DecodingUnavailable(ServiceUnavailable):
    """The system has ended the process that decoded the file, or could not start one."""

    code = "decoding_unavailable"


class SpeakersUnavailable(ServiceUnavailable):
    """The models that tell speakers apart have not been fetched."""

    code = "speakers_unavailable"


class ShuttingDown(EngineUnavailable):
    """The server is about to stop: another one, or the next one, can take the request."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


class ChunkFailed(Exception):
    """A replica could not decode this chunk. The message is for the log."""


class RequestStalled(Exception):
    """Nothing of the request moved any more: a fault of the server. The message is for the client too."""

    code = "request_stalled"


class ReplicasEnded(ChunkFailed):
    """Every replica that was given this chunk ended before it had a result, also with nothing beside it.

    The message is for the client too.
    """

    def __init__(self, num_replicas: int) -> None:
        super().__init__(f"A part of the audio has ended {num_replicas} engine processes one after another.")


class CheckpointError(Exception):
    """The checkpoint is not there, incomplete, or not Whisper. The message says what to do."""


class NotFetched(Exception):
    """A source does not have the model, or cannot be reached. The message says why in a few words."""
