# Nightjar. `make demo` and `make test` are all a new user needs; both may be run again at any time.

PYTHON      ?= python3
# cpu | cuda: which lock file is installed.
DEVICE      ?= cpu
# A package index that serves torch for DEVICE; empty: the default index.
TORCH_INDEX ?=
PIP         := .venv/bin/python -m pip --disable-pip-version-check -q
INSTALLED   := .venv/.installed-$(DEVICE)
UV          := .venv/bin/uv pip compile -q --universal --python-version 3.11 --no-header --no-annotate

.PHONY: help install demo test test-fast test-faults test-image lint docs lock clean bench-train bench-checkpoint \
	bench-quality bench-plan bench-ingest bench-mappings bench-predict bench-partition bench-ssd bench-towers \
	bench-towers-quality bench-gate bench-nights bench-busy bench-defaults
