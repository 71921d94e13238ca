"""Check settings against this machine, its files and the model: a line for each wrong setting."""

import ctypes
import errno
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from asr_server.annexes.keys.accounts import read_keys_file
from asr_server.checkpoint.sizes import WhisperSizes
from asr_server.config import NO_PORT, naming
from asr_server.errors import StorageUnavailable
from asr_server.machine import bound_sockets, num_gpus
from asr_server.server.settings import ServerSettings

Check = Callable[[ServerSettings], Iterator[str]]
SECRET: Final = ("api_key", "callback_secret")  # never printed


def problem(setting: str, value: object, reason: str) -> str:
    shown = "wrong" if setting in SECRET else repr(value)
    return f"{naming(setting)} is {shown}: {' '.join(reason.split())}"


def gpu(settings: ServerSettings) -> Iterator[str]:
    if settings.device == "cuda" and settings.executor != "ray" and (reason := _why_no_cuda()):
        yield problem("device", settings.device, f"{reason}; allowed here: auto or cpu")


def ray_package(settings: ServerSettings) -> Iterator[str]:
    if settings.executor == "ray" and find_spec("ray") is None:
        yield problem("executor", "ray", "needs Ray, an extra: pip install '.[ray]' in the checkout")


def tensor_parallel(settings: ServerSettings) -> Iterator[str]:
    size = settings.tensor_parallel_size
    if size == 1:
        return
    if settings.executor == "inline":
        yield problem("tensor_parallel_size", size, "needs --executor multiprocess or ray")
    if settings.executor != "ray" and settings.device != "cpu" and 0 < (found := num_gpus()) < size:
        yield problem("tensor_parallel_size", size, f"needs as many GPUs; this process sees {found}")


def _why_no_cuda() -> str:
    if Path("/dev/kfd").exists():
        return ""  # an AMD GPU, which torch calls cuda too
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver"
    if not num_gpus():
        return "the NVIDIA driver has no GPU for this process"
    return ""


def model_fits(settings: ServerSettings, directory: Path) -> Iterator[str]:
    num_ranks = settings.tensor_parallel_size
    if reason := WhisperSizes.from_directory(directory).why_not_shared_by(num_ranks):
        yield problem("tensor_parallel_size", num_ranks, reason)


def tls_files(settings: ServerSettings) -> Iterator[str]:
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if key and not certificate:
        yield problem("ssl_keyfile", key, f"needs a certificate too: {naming('ssl_certfile')}")
    if not certificate:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key or None, lambda: b"")
    except (OSError, ValueError) as error:
        reason = (
            f"must be a readable certificate in PEM format, its key in the same file or in that of "
            f"{naming('ssl_keyfile')}, without a password ({error})"
        )
        yield problem("ssl_certfile", certificate, reason)


def keys_file(settings: ServerSettings) -> Iterator[str]:
    if path := settings.keys_file:
        try:
            if not read_keys_file(Path(path)):
                yield problem("keys_file", path, "must have at least one key")
        except OSError as error:
            yield problem("keys_file", path, f"the file cannot be read: {error.strerror}")
        except ValueError as error:
            yield problem("keys_file", path, str(error))


def wyoming(settings: ServerSettings) -> Iterator[str]:
    if settings.wyoming_port == NO_PORT:
        return
    if find_spec("wyoming") is None:
        reason = "needs the package wyoming, an extra: pip install '.[wyoming]' in the checkout"
        yield problem("wyoming_port", settings.wyoming_port, reason)
    else:
        yield from _why_not_on(settings, "host", "wyoming_port", ("port",))


def metrics(settings: ServerSettings) -> Iterator[str]:
    if settings.has_metrics_port:
        host_setting = "metrics_host" if settings.metrics_host else "host"
        yield from _why_not_on(settings, host_setting, "metrics_port", ("port", "wyoming_port"))


def jobs(settings: ServerSettings) -> Iterator[str]:
    if settings.callback_hosts and not settings.callback_secret:
        reason = f"needs a secret too: {naming('callback_secret')}"
        yield problem("callback_hosts", settings.callback_hosts, reason)
    if not settings.jobs_dir:
        return
    if not (find_spec("sqlalchemy") and find_spec("standardwebhooks")):
        reason = "needs the extra jobs: pip install '.[jobs]' in the checkout"
        yield problem("jobs_dir", settings.jobs_dir, reason)
        return
    from asr_server.annexes.jobs.store import Store  # brings SQLAlchemy

    try:
        store = Store(Path(settings.jobs_dir))
        store.open()
        store.close()
    except StorageUnavailable as error:
        yield problem("jobs_dir", settings.jobs_dir, error.message)


def _why_not_on(
    settings: ServerSettings, host_setting: str, port_setting: str, others: tuple[str, ...] = ()
) -> Iterator[str]:
    """Bind the port and free it again, to report errors before the model loads."""
    host, port = getattr(settings, host_setting), getattr(settings, port_setting)
    if taken_by := [other for other in others if port == getattr(settings, other) != 0]:
        yield problem(port_setting, port, f"must differ from {naming(taken_by[0])}")
        return
    is_shared = settings.reuse_port and port_setting != "metrics_port"
    try:
        for listener in bound_sockets(host, port, is_shared):
            listener.close()
    except (socket.gaierror, UnicodeError) as error:
        yield problem(host_setting, host, f"no address of this machine ({error})")
    except OSError as error:
        setting = host_setting if error.errno == errno.EADDRNOTAVAIL else port_setting
        reason = f"cannot listen on {host} port {port}: {error.strerror}"
        yield problem(setting, getattr(settings, setting), reason)


address: Final = partial(_why_not_on, host_setting="host", port_setting="port")
FOR_A_MODEL: Final[tuple[Check, ...]] = (gpu, ray_package, tensor_parallel)
FOR_A_SERVER: Final[tuple[Check, ...]] = (*FOR_A_MODEL, tls_files, keys_file, address, wyoming, metrics, jobs)
