#!/bin/sh
# The quick start: a small model before training, the training, and the model afterwards. Run by `make demo`.
# PYTHON: the interpreter that has LayerFerry installed (default: the repository's .venv).
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" recipes/quickstart/demo.py
