"""Jobs: requests that are done without their client, and survive the end of the server."""

from pydantic.dataclasses import dataclass

from asr_server.config import CHECKED, HOSTS, MIB, Settings, setting


@dataclass(frozen=True, config=CHECKED)
class JobsSettings(Settings):
    jobs_dir: str = setting(
        "", "folder that keeps jobs (background=true) through the end of the server; empty: there are none"
    )
    jobs_keep_s: float = setting(
        24 * 3600.0, "seconds that a finished job or a file is kept, counted while a server runs", gt=0
    )
    jobs_keep_read_s: float = setting(
        1800.0, "seconds that a finished job is kept once its content was read", gt=0
    )
    max_jobs: int = setting(10_000, "jobs, files and batches kept at once; more are refused with 429", ge=1)
    max_jobs_bytes: int = setting(100 * 1024 * MIB, "bytes of recordings and files of jobs at once", ge=1)
    max_jobs_audio_s: float = setting(
        1000 * 3600.0, "seconds of audio in unfinished jobs, where their headers say", gt=0
    )
    callback_hosts: str = setting(
        "",
        "hosts that jobs may report their end to, separated by commas; *: any with a public address; empty: "
        "none",
        pattern=HOSTS,
        allowed="*, or names such as hooks.example.com without a port, separated by commas",
    )
    callback_secret: str = setting(
        "",
        "secret that signs these reports (Standard Webhooks)",
        pattern=r"^(whsec_[A-Za-z0-9+/]{24,}={0,2})?$",
        allowed="whsec_ and at least 24 characters of base64",
    )
