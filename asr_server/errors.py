"""The errors that a user can meet. `api.errors` alone makes replies of them."""

from typing import Final

MAX_MESSAGE_CHARS: Final = 2000  # of what may repeat names and values of the client
MAX_PARAM_CHARS: Final = 200


class ReportedError(Exception):
    """An error that the client sees, with HTTP's status and OpenAI's `type`, `code` and `param`."""

    status: int = 500
    type: str = "server_error"
    code: str
    param: str | None = None  # the field at fault

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(ReportedError):
    """An error that the sender can mend."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message[:MAX_MESSAGE_CHARS])
        if param is not None:
            self.param = param[:MAX_PARAM_CHARS]


class InvalidValue(RequestError):
    """A field is unknown, out of range or in conflict with another."""


class NotStereo(RequestError):
    param = "channels"


class NoSuchTrack(RequestError):
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
    status = 413
    code = "request_too_large"
    param = "file"


class HeadersTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class TooManyHeaders(HeadersTooLarge):
    code = "too_many_headers"


class TooSlow(RequestError):
    status = 408
    code = "request_timeout"


class InvalidApiKey(RequestError):
    status = 401
    code = "invalid_api_key"


class AdminRequired(RequestError):
    status = 403
    code = "admin_required"


class HostNotAllowed(RequestError):
    status = 403
    code = "host_not_allowed"


class OriginNotAllowed(RequestError):
    status = 403
    code = "origin_not_allowed"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"
    param = "model"


class NotFound(RequestError):
    """A job, file or batch is not there, or another key's."""

    status = 404
    code = "not_found"


class Overloaded(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "server_overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"


class ServiceUnavailable(ReportedError):
    """Not the sender's fault: a later try may succeed."""

    status = 503
    type = "service_unavailable_error"

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
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


class ShuttingDown(EngineUnavailable):
    """The server is stopping; another can take the request."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


class ChunkFailed(Exception):
    """A replica could not decode this chunk. The message is for the log."""


class RequestStalled(ReportedError):
    """The request made no progress: a server's fault."""

    code = "request_stalled"


class RecordingLost(ReportedError):
    """A job's recording is no longer in the server's folder."""

    code = "recording_lost"


class ServerEnded(ReportedError):
    """The server has ended again and again during this job."""

    code = "server_ended"


class ReplicasEnded(ReportedError, ChunkFailed):
    code = "engine_crashed"

    def __init__(self, num_replicas: int) -> None:
        super().__init__(f"A part of the audio has ended {num_replicas} engine processes one after another.")


class CheckpointError(Exception):
    """The checkpoint is missing, incomplete, or not Whisper. The message says what to do."""


class NotFetched(Exception):
    """A source lacks the model or is unreachable. The message gives the reason."""
