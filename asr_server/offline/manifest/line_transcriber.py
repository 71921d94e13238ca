"""Takes one entry of a manifest from its recording to its results and says what became of it.

The same for the pipeline of this process (`run.py`) and for an actor of a Ray cluster (`ray_run.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from asr_server.errors import EngineUnavailable
from asr_server.offline.batch import reason_for
from asr_server.offline.inputs import require_file
from asr_server.offline.manifest.entries import BadLine, Entry
from asr_server.offline.manifest.reports import LineReport
from asr_server.offline.manifest.results import ManifestResults
from asr_server.offline.outputs import OutputError
from asr_server.offline.transcriber import LocalTranscriber


class LineTranscriber:
    def __init__(self, transcriber: LocalTranscriber, results: ManifestResults) -> None:
        self._transcriber = transcriber
        self._results = results

    def sorted_out(self, lines: Iterable[Entry | BadLine]) -> Iterator[Entry | LineReport]:
        """The entries that are to be transcribed, and reports of the other lines. Looks at the disk."""
        for line in lines:
            if isinstance(line, BadLine):
                yield LineReport(line.offset, "failed", error=line.reason)
            elif self._results.is_done(line.id):
                yield LineReport(line.offset, "skipped", line.id, str(line.audio))
            else:
                yield line

    async def transcribe(self, entry: Entry) -> LineReport:
        """Raises EngineUnavailable, OutputError: no further entry can be transcribed, or written."""
        try:
            duration_s = await self._transcribe(entry)
        except (EngineUnavailable, OutputError):
            raise
        except Exception as error:
            reason = reason_for(str(entry.audio), error)
            return LineReport(entry.offset, "failed", entry.id, str(entry.audio), reason)
        return LineReport(entry.offset, "transcribed", entry.id, str(entry.audio), duration_s=duration_s)

    async def _transcribe(self, entry: Entry) -> float:
        """The recording's length in seconds. What could be read of a damaged one is transcribed."""
        options = self._transcriber.options_for(entry.language, entry.prompt)
        await asyncio.to_thread(require_file, entry.audio)
        transcript = await self._transcriber.transcribe(entry.audio, lambda done_s, total_s: None, options)
        await asyncio.to_thread(self._results.write, entry.id, transcript)
        return transcript.duration_s
