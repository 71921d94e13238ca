"""`asr-server` for `test_alerts_fire.py`: uploads lie on the disk, and seconds of standstill are a stall."""

from functools import partial

from asr_server.__main__ import main
from asr_server.api.upload import UploadStore
from asr_server.server import app
from asr_server.transcription import transcriber
from asr_server.transcription.progress import StallLimits

vars(app)["UploadStore"] = partial(UploadStore, 0)
vars(transcriber)["StallLimits"] = partial(StallLimits, request_s=1.0, pool_s=2.0)

if __name__ == "__main__":
    main()
