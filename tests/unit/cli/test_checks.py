"""What this machine and its files lack for the settings: a line for each."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asr_server.cli import checks
from asr_server.cli.checks import FOR_A_MODEL
from asr_server.cli.options import checked_settings
from tests.support.embedded import embedded
from tests.unit.cli.test_options import problems


def test_cuda_without_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    (line,) = problems(device="cuda")
    assert line == (
        "--device (ASR_SERVER_DEVICE) is 'cuda': this machine has no NVIDIA driver; allowed here: auto or cpu"
    )


def test_tls_files_that_are_missing_or_do_not_belong_together_are_one_line_each(tmp_path: Path) -> None:
    key, no_pem = tmp_path / "key.pem", tmp_path / "no.pem"
    no_pem.write_text("no certificate")
    missing = problems(ssl_certfile=str(key), ssl_keyfile=str(key))
    (line,) = missing
    assert line.startswith("--ssl-certfile (ASR_SERVER_SSL_CERTFILE) is ")
    assert "No such file" in line
    (alone,) = problems(ssl_keyfile=str(no_pem))
    assert "needs a certificate too: --ssl-certfile" in alone
    (broken,) = problems(ssl_certfile=str(no_pem))
    assert "PEM" in broken


def test_an_address_that_is_not_free_or_not_here_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (taken,) = problems(port=port)
        assert taken.startswith(f"--port (ASR_SERVER_PORT) is {port}: cannot listen on 127.0.0.1 port {port}")
        given = {"port": port, "model": "whisper-digits"}
        settings = checked_settings(given, FOR_A_MODEL)  # without a server its address is no matter
        assert settings == embedded(port=port, served_model_name="whisper-digits")
        (taken,) = problems(wyoming_port=port)
        assert taken.startswith(f"--wyoming-port (ASR_SERVER_WYOMING_PORT) is {port}: cannot listen")
        (taken,) = problems(metrics_port=port, reuse_port=True)
        assert taken.startswith(f"--metrics-port (ASR_SERVER_METRICS_PORT) is {port}: cannot listen")
    (elsewhere,) = problems(host="192.0.2.1")
    assert elsewhere.startswith("--host (ASR_SERVER_HOST) is '192.0.2.1': cannot listen")
    (elsewhere,) = problems(metrics_port=0, metrics_host="192.0.2.1")
    assert elsewhere.startswith("--metrics-host (ASR_SERVER_METRICS_HOST) is '192.0.2.1': cannot listen")


def test_the_wyoming_door_says_which_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wyoming", None)
    (missing,) = problems(wyoming_port=0)
    assert missing.endswith("an extra: pip install '.[wyoming]' in the checkout")


def test_more_ranks_than_the_model_can_be_split_into_are_refused() -> None:
    (line,) = problems(model="whisper-digits", tensor_parallel_size="3", device="cpu")
    assert line.endswith("is 3: must divide the model's encoder_attention_heads, 4")


def test_two_doors_on_one_port_are_refused() -> None:
    (line,) = problems(port="7001", wyoming_port="7001")
    assert (
        line == "--wyoming-port (ASR_SERVER_WYOMING_PORT) is 7001: must differ from --port (ASR_SERVER_PORT)"
    )
    (line,) = problems(wyoming_port="7001", metrics_port="7001")
    assert line.startswith(
        "--metrics-port (ASR_SERVER_METRICS_PORT) is 7001: must differ from --wyoming-port"
    )


# -- Each check by itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "executor", "is_wrong"),
    [
        ("cuda", "multiprocess", True),
        ("cuda", "inline", True),
        ("cuda", "ray", False),
        ("auto", "inline", False),
    ],
)
def test_only_a_gpu_that_was_asked_for_here_has_to_be_there(
    device: Any, executor: Any, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver(name: str) -> None:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    assert len(list(checks.gpu(embedded(device=device, executor=executor)))) == is_wrong


@pytest.mark.parametrize(
    ("values", "num_gpus", "reasons"),
    [
        ({"tensor_parallel_size": 1, "executor": "inline"}, 0, []),
        ({"executor": "inline"}, 0, ["needs --executor multiprocess or ray"]),
        (
            {"executor": "ray", "replicas_per_device": 2},
            1,
            ["with --executor ray needs --replicas-per-device 1"],
        ),
        ({"executor": "ray", "replicas_per_device": 1}, 1, []),
        ({"executor": "multiprocess", "replicas_per_device": 2}, 0, []),
        ({}, 0, []),
        ({}, 1, ["needs as many GPUs; this process sees 1"]),
        ({}, 2, []),
        ({"device": "cpu"}, 1, []),
    ],
)
def test_what_ranks_need(
    values: dict[str, Any], num_gpus: int, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "num_gpus", lambda: num_gpus)
    lines = checks.tensor_parallel(embedded(**{"tensor_parallel_size": 2} | values))
    assert [line.rpartition(": ")[2] for line in lines] == reasons


def test_a_certificate_with_its_key_is_taken_and_one_with_a_password_is_not(
    tmp_path: Path, certificate: str
) -> None:
    both = Path(certificate).read_text()
    key, locked = tmp_path / "key.pem", tmp_path / "locked.pem"
    key.write_text(both[both.index("-----BEGIN PRIVATE") : both.index("-----BEGIN CERT")])
    alone = tmp_path / "alone.pem"
    alone.write_text(both[both.index("-----BEGIN CERT") :])
    command = ["openssl", "rsa", "-aes128", "-passout", "pass:x", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    assert not list(checks.tls_files(embedded(ssl_certfile=certificate)))
    assert not list(checks.tls_files(embedded(ssl_certfile=str(alone), ssl_keyfile=str(key))))
    assert not list(checks.tls_files(embedded()))
    for key_file in ("", str(locked)):
        (line,) = checks.tls_files(embedded(ssl_certfile=str(alone), ssl_keyfile=key_file))
        assert "must be a readable certificate in PEM format" in line


@pytest.mark.parametrize(
    ("check", "values", "lines"),
    [
        (checks.wyoming, {"wyoming_port": -1, "host": "192.0.2.1"}, []),
        (checks.wyoming, {"wyoming_port": 0, "port": 0}, []),
        (checks.metrics, {"metrics_port": -1, "host": "192.0.2.1"}, []),
        (checks.metrics, {"metrics_port": 0, "port": 0, "wyoming_port": 0}, []),
        (checks.metrics, {"metrics_port": 0, "host": "192.0.2.1", "metrics_host": "127.0.0.1"}, []),
        (checks.address, {"port": 0, "host": "h" * 70}, ["--host"]),
        (checks.address, {"port": 0, "host": "192.0.2.1"}, ["--host"]),
    ],
)
def test_ports_that_are_free_or_not_wanted_are_right(
    check: checks.Check, values: dict[str, Any], lines: list[str]
) -> None:
    assert [line.split()[0] for line in check(embedded(**values))] == lines


def test_a_port_is_shared_with_servers_that_share_it_too() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert not list(checks.address(embedded(port=port, reuse_port=True)))
        assert len(list(checks.address(embedded(port=port)))) == 1


def test_a_port_that_was_just_left_is_free() -> None:
    """Its last connection waits to be forgotten, which keeps nobody from listening there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # who closes first keeps the address for a while
    assert not list(checks.address(embedded(port=port)))


def test_a_key_is_never_printed() -> None:
    assert checks.problem("api_key", "s3cret", "no") == "--api-key (ASR_SERVER_API_KEY) is wrong: no"
    assert checks.problem("port", 7, "two\n  lines") == "--port (ASR_SERVER_PORT) is 7: two lines"
