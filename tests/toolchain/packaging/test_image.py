"""The image's packages: pinned as everywhere, each file by its hash. The image itself is not built here."""

import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from asr_server import __version__
from tests.toolchain.packaging.package_index import ROOT
from tests.toolchain.packaging.test_dependencies import PROJECT, pins

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def hashed(name: str) -> dict[str, str]:
    """Return each package of a lock and its version. Each has hashes, or this fails."""
    packages = re.split(r"\n(?=[a-z])", (ROOT / "image" / name).read_text())[1:]
    for package in packages:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n?", package), package
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1].split()[0] for line in packages}


def test_every_package_but_pytorch_is_in_the_lock_of_the_image_with_its_hashes() -> None:
    locked = hashed("requirements.txt")
    assert {name: pins()[name] for name in locked if name in pins()} == {
        name: version for name, version in locked.items() if name in pins()
    }
    assert locked.keys() - pins().keys() <= {"setuptools"}
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["jobs"]]
    wanted = {canonicalize_name(Requirement(each).name) for each in declared}
    assert wanted - locked.keys() == {"torch"}


def test_pytorch_of_the_package_index_is_hashed_with_all_that_cuda_needs() -> None:
    locked = hashed("torch.txt")
    assert locked["torch"] == pins()["torch"]
    assert all(re.match(r"torch$|triton$|nvidia-|cuda-", name) for name in locked)


def test_what_installs_pytorch_of_its_own_index_is_hashed() -> None:
    assert hashed("uv.txt") == {"uv": pins()["uv"]}


def test_the_image_installs_nothing_without_a_hash_but_pytorch_of_its_own_index() -> None:
    installs = re.findall(r"pip install ([^\n]+)", DOCKERFILE)
    assert len(installs) == 4
    for arguments in installs:
        is_own = arguments.startswith("--no-deps --no-build-isolation --target /opt/server .")
        is_pytorch = re.search(r'--torch-backend "\$TORCH" torch;', arguments)
        assert is_own or is_pytorch or "--require-hashes" in arguments


def test_the_models_of_the_image_do_not_belong_to_the_user_that_it_runs_as() -> None:
    assert "COPY --from=build /opt/models /models" in DOCKERFILE
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.MULTILINE)


def test_the_image_names_its_version_and_revision() -> None:
    labels = dict(re.findall(r"org\.opencontainers\.image\.(\w+)=(\S+)", DOCKERFILE))
    assert (labels["version"], labels["revision"]) == (__version__, "$REVISION")


def test_both_stages_begin_with_one_patch_release_of_python() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim", bases[0])


def test_an_image_with_cuda_has_the_compiler_that_triton_needs() -> None:
    served = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r'if \[ "\$TORCH" != cpu \].*\bgcc libc6-dev\b', served, re.DOTALL)
