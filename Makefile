# Each target sets up what it needs, from nothing but python3 and make, into .venv.
PYTHON ?= python3
BIN    := .venv/bin
ARGS   ?=
FILE   ?= examples/speech.wav

.DEFAULT_GOAL := help
.PHONY: help serve transcribe test quick check format bench gpu-dry-run trial clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/serve.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/test.stamp: .venv/serve.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,bench]'
	@touch $@

serve: .venv/serve.stamp  ## the server, with whisper-base (ARGS='--model turbo --port 9000 ...')
	$(BIN)/asr-server serve $(ARGS)

transcribe: .venv/serve.stamp  ## a recording as text, without a server (FILE=talk.m4a ARGS='--model turbo ...')
	@$(BIN)/asr-server transcribe $(ARGS) -- "$(FILE)"

test: .venv/test.stamp  ## the test suite; fetches weights, speech, Chromium and the Node client where it can
	@benchmarks/speech/install.sh
	@tests/install-browser.sh
	@tests/node/install.sh
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

quick: .venv/test.stamp  ## the tests that need no server, browser, Ray, Triton, reference implementation nor seconds
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not trial and not slow" $(ARGS)

check: .venv/test.stamp  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/test.stamp  ## formats and mends what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/trial.stamp: .venv/test.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[trial]'
	@touch $@

trial: .venv/trial.stamp  ## what takes long: fuzzing, soaks, hours-long files
	@benchmarks/speech/install.sh
	@tests/clients/install.sh
	$(BIN)/python -m pytest -m trial --timeout 3600 $(ARGS)

bench: .venv/test.stamp  ## every benchmark, briefly (ARGS= for the full runs)
	@benchmarks/speech/install.sh
	@for benchmark in frontend engine shapes accuracy peers serving fairness transport executors realtime words voice parity api_process; do \
		$(BIN)/python -m benchmarks.$$benchmark $(or $(ARGS),--quick) || exit 1; \
	done

gpu-dry-run: .venv/test.stamp  ## what would be measured on a GPU, on CPU with a small shape: does all of it run
	@PATH="$(CURDIR)/$(BIN):$$PATH" OUT=.cache/gpu-dry-run benchmarks/gpu.sh --dry-run $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
