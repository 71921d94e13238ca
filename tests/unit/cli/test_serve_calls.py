"""`asr-server serve` up to the server, its list of models, and `asr-server health` at one that answers."""

import http.server
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from asr_server.cli import checks, main
from asr_server.cli.checks import FOR_A_MODEL
from asr_server.cli.options import checked_settings
from asr_server.cli.serve import health_url, read_models
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError
from asr_server.server.settings import ServerSettings
from tests.support.embedded import embedded
from tests.unit.cli.test_options import problems


class Server:
    """Takes what `serve` would run, and gives it `status`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status = 0
        self.error: Exception | None = None
        self.models: list[ServerSettings] = []
        self.on_term: object = None
        monkeypatch.setattr("asr_server.server.run.run", self._run)

    def _run(self, models: list[ServerSettings]) -> int:
        self.models, self.on_term = models, signal.getsignal(signal.SIGTERM)
        if self.error:
            raise self.error
        return self.status

    def serve(self, *arguments: str) -> Result:
        before = signal.getsignal(signal.SIGTERM)
        try:
            return CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


@pytest.mark.parametrize("status", [0, 1, 3])
def test_the_status_is_that_of_the_server(serving: Server, status: int) -> None:
    serving.status = status
    assert serving.serve("whisper-digits", "--beam-size", "2").exit_code == status
    (settings,) = serving.models
    assert (settings.model_names[0], settings.beam_size) == ("whisper-digits", 2)


def test_a_model_that_cannot_be_read_is_a_line_and_status_2(serving: Server) -> None:
    serving.error = CheckpointError("its weights are damaged")
    done = serving.serve()
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, "Error: its weights are damaged")


# -- The check of a container --------------------------------------------------------------------------------


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as answering:
        thread = threading.Thread(target=answering.serve_forever, args=(0.01,))
        thread.start()
        yield answering.server_port
        answering.shutdown()
        thread.join()


@pytest.mark.parametrize("is_there", [True, False])
def test_the_check_asks_the_server_whose_flags_another_process_has(
    port: int, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = port if is_there else 9
    wait = "import sys; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", wait, "asr-server", "serve", "--port", str(port)]
    with subprocess.Popen(words, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its command line is there from when it runs
        done = CliRunner().invoke(main, ["health", "--pid", str(process.pid)])
    assert done.exit_code == (0 if is_there else 1)
    assert done.stderr.startswith("" if is_there else f"Error: http://127.0.0.1:{port}/health: ")


def test_without_such_a_process_the_environment_says_where_the_server_listens(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASR_SERVER_PORT", str(port))
    assert CliRunner().invoke(main, ["health", "--pid", "99999999"]).exit_code == 0
    help_text = " ".join(CliRunner().invoke(main, ["health", "--help"]).output.split())
    assert "[default: 1]" in help_text


@pytest.mark.parametrize(
    ("arguments", "environment", "url"),
    [
        ([], {}, "http://127.0.0.1:8000/health"),
        (["openai/whisper-tiny", "--port", "9000"], {}, "http://127.0.0.1:9000/health"),
        (["--port=9000"], {"ASR_SERVER_PORT": "7000"}, "http://127.0.0.1:9000/health"),
        ([], {"ASR_SERVER_PORT": "7000", "ASR_SERVER_HOST": "0.0.0.0"}, "http://127.0.0.1:7000/health"),
        (["--host", "::", "--ssl-certfile", "a.pem"], {}, "https://[::1]:8000/health"),
    ],
)
def test_flags_and_environment_say_where_the_server_listens(
    arguments: list[str], environment: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert health_url(arguments) == url


def refusal(*arguments: str) -> list[str]:
    result = CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 2
    return result.output.splitlines()


def test_a_flag_names_models_by_name_and_path() -> None:
    base, turbo = read_models("base,turbo=/models/large-v3-turbo")
    assert (base["served_model_name"], base["model"]) == ("", "base")
    assert "model_alias" not in base  # it has those of --model-alias
    assert turbo == {"served_model_name": "turbo", "model": "/models/large-v3-turbo", "model_alias": ""}


def test_a_file_gives_each_model_settings_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "- name: base\n  aliases: [whisper-1, small]\n  load: pinned\n"
        "- name: turbo\n  model: /models/turbo\n  dtype: int8\n  replicas: 2\n  idle_unload_s: 600\n"
    )
    base, turbo = read_models(str(path))
    assert base == {
        "served_model_name": "base",
        "model": "base",
        "model_alias": "whisper-1,small",
        "load": "pinned",
    }
    assert (turbo["model"], turbo["dtype"], turbo["replicas"], turbo["idle_unload_s"]) == (
        *("/models/turbo", "int8"),
        *(2, 600),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("base: turbo", "must be a list of models"),
        ("- [", "not YAML"),
        ("- model: base", "model 1 of the file has no name"),
        ("- name: base\n  dtyp: int8", "base has the unknown key 'dtyp'; known: name, aliases, model"),
        ("- name: base\n  aliases: whisper-1", "aliases of base must be a list"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    (line,) = refusal("--models", str(path))
    assert line.startswith("Error: --models (ASR_SERVER_MODELS) is ")
    assert reason in line


def test_a_wrong_setting_names_its_model(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        f"- name: digits\n  model: {EMBEDDED_MODEL}\n  dtype: int3\n- name: nowhere\n  model: /none\n"
    )
    wrong_value, no_model = refusal("--models", str(path))
    assert wrong_value.startswith("Error: model digits: --dtype (ASR_SERVER_DTYPE) is 'int3'")
    assert no_model.startswith("Error: model nowhere: --model (ASR_SERVER_MODEL) is '/none'")


def test_two_models_cannot_share_a_name() -> None:
    (line,) = refusal("--models", f"one={EMBEDDED_MODEL},one={EMBEDDED_MODEL}")
    assert line.endswith("one is the name of 2 models")


def test_models_cannot_be_combined_with_a_model() -> None:
    (line,) = refusal("whisper-digits", "--models", f"one={EMBEDDED_MODEL}")
    assert "leave out MODEL" in line


def test_a_server_has_one_model_or_all_of_the_list_with_its_other_settings(
    serving: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASR_SERVER_MODEL")
    assert serving.serve(str(EMBEDDED_MODEL), "--drain-s", "7").exit_code == 0
    assert [(each.model_names[0], each.drain_s) for each in serving.models] == [("whisper-digits", 7)]
    done = serving.serve("--models", f"a={EMBEDDED_MODEL}, b={EMBEDDED_MODEL}", "--drain-s", "7")
    assert done.exit_code == 0, done.output
    first, second = serving.models
    assert {(each.drain_s, each.model) for each in (first, second)} == {(7, str(EMBEDDED_MODEL))}
    assert first.model_names[:2] == ("a", "whisper-1")
    assert second.model_names == ("b",)


@pytest.mark.parametrize("text", ["a=", "", "base,,turbo"])
def test_an_entry_without_a_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be name=MODEL,name=MODEL, and '.*' names no model"):
        list(read_models(text))


def test_cuda_without_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    (line,) = problems(device="cuda")
    assert line == (
        "--device (ASR_SERVER_DEVICE) is 'cuda': this machine has no NVIDIA driver; allowed here: auto or cpu"
    )
    assert not list(checks.gpu(embedded(device="cuda", executor="ray")))  # its GPUs are elsewhere


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
    ("values", "num_gpus", "reasons"),
    [
        ({"tensor_parallel_size": 1, "executor": "inline"}, 0, []),
        ({"executor": "inline"}, 0, ["needs --executor multiprocess or ray"]),
        ({"executor": "ray"}, 1, []),
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


def test_a_certificate_and_key_are_taken_unless_with_a_password(tmp_path: Path, certificate: str) -> None:
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
