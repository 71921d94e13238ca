"""`make serve` installs what TORCH says, and says first how large it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.toolchain.packaging.package_index import ROOT, clean_environment, need_index

HAS_GPU = os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None
WITHOUT_GPU = pytest.mark.skipif(HAS_GPU, reason="this machine has an NVIDIA GPU")
WANTED = "install --constraint constraints.txt --editable .[test]"
NOTES_ITS_CALLS = '#!/bin/sh\necho "$(basename "$0") $*" >&2\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose programs print their arguments, so that nothing is downloaded."""
    for folder in (".venv/bin", "tools", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "install.sh", tmp_path / "tools")
    for program in (".venv/bin/python", ".venv/bin/uv"):
        write_program(tmp_path / program, NOTES_ITS_CALLS)
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def install(checkout: Path, torch: str, python: str = sys.executable) -> tuple[int, list[str]]:
    own = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "PYTHON": python, "TORCH": torch}
    done = run_command(checkout / "tools" / "install.sh", "test", env=own)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("torch", "size", "backend"),
    [
        ("cpu", "0.3 GB", " --torch-backend cpu"),
        ("cu130", "3 GB", " --torch-backend cu130"),
        ("pypi", " GB", ""),
        pytest.param("auto", "0.3 GB", " --torch-backend cpu", marks=WITHOUT_GPU),
    ],
)
def test_the_size_is_printed_before_a_download(checkout: Path, torch: str, size: str, backend: str) -> None:
    status, lines = install(checkout, torch)
    if torch == "auto":
        assert lines.pop(0) == "python -m pip config list"
    message, gets_uv, installs = lines
    assert status == 0
    assert message.startswith("Installing into .venv with ")
    assert size in message
    assert gets_uv.startswith("python -m pip install ")
    assert installs == f"uv pip {WANTED} --system-certs --python .venv/bin/python{backend}"


def test_a_machine_with_a_gpu_gets_cuda_from_the_package_index(checkout: Path) -> None:
    write_program(checkout / "bin" / "nvidia-smi", "#!/bin/sh\n")
    _, (_, message, _, installs) = install(checkout, "auto")
    assert "2.8 GB" in message
    assert "--torch-backend" not in installs


@pytest.mark.parametrize("setting", ["global.index-url", "user.extra-index-url", ":env:.find-links"])
def test_pip_that_is_configured_for_other_wheels_is_used(checkout: Path, setting: str) -> None:
    write_program(
        checkout / ".venv" / "bin" / "python", f"{NOTES_ITS_CALLS}echo \"{setting}='/srv/wheels'\"\n"
    )
    status, (_, message, installs, *_) = install(checkout, "auto")
    assert status == 0
    assert "pip is configured for" in message
    assert installs == f"python -m pip {WANTED} --quiet"


def test_an_older_python_is_refused_in_one_line(checkout: Path) -> None:
    older = checkout / "bin" / "python3.9"
    write_program(older, "#!/bin/sh\nexit 1\n")
    message = f"{older} is not Python 3.11 or later; name one that is, such as PYTHON=python3.12"
    assert install(checkout, "cpu", str(older)) == (1, [message])


def test_wheels_that_cannot_be_reached_name_the_other_way(checkout: Path) -> None:
    write_program(checkout / ".venv" / "bin" / "uv", "#!/bin/sh\nexit 2\n")
    status, lines = install(checkout, "cpu")
    assert status == 1
    assert lines[-1].endswith("TORCH=pypi")


@WITHOUT_GPU
def test_nobody_who_chose_no_wheels_is_left_without_any(checkout: Path) -> None:
    """As where the package index is the only place that can be reached."""
    only_index = f'case "$*" in *torch-backend*) exit 2;; esac\n{NOTES_ITS_CALLS}'
    write_program(checkout / ".venv" / "bin" / "uv", f"#!/bin/sh\n{only_index}")
    status, lines = install(checkout, "auto")
    assert status == 0
    assert any(line.startswith("Installing into .venv with PyTorch for CUDA") for line in lines)
    assert lines[-1] == f"uv pip {WANTED} --system-certs --python .venv/bin/python"


def test_musl_is_refused_in_one_line(checkout: Path) -> None:
    write_program(checkout / "bin" / "ldd", "#!/bin/sh\necho 'musl libc (x86_64)' >&2\nexit 1\n")
    status, (line,) = install(checkout, "cpu")
    assert status == 1
    assert line.startswith("PyTorch has no wheels for musl (Alpine)")


@pytest.mark.trial
def test_a_fresh_clone_transcribes_by_the_one_command_of_the_readme(tmp_path: Path) -> None:
    """With the package index alone, but for a CPU wheel of PyTorch where pip's configuration has one."""
    need_index()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    wheels = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*wheels, "--constraint", str(ROOT / "constraints.txt"), "torch"], check=False)
    environment = clean_environment() | {
        "HOME": str(tmp_path / "home"),
        "PYTHON": sys.executable,
        "TORCH": "pypi",
        "UV_FIND_LINKS": str(tmp_path),
    }
    for name in ("VIRTUAL_ENV", "ASR_SERVER_MODEL", "HF_HOME", "MAKEFLAGS"):
        environment.pop(name, None)
    done = subprocess.run(
        ["make", "transcribe"],
        cwd=tmp_path / "clone",
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == (ROOT / "examples" / "speech.txt").read_text()
