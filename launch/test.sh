#!/bin/sh
# Every check of this repository: installs into .venv, then style, types and tests.
# Arguments go on to pytest: sh launch/test.sh tests/rules_test.py -k nearest
. "$(dirname -- "$0")/_venv.sh"

set -e
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
.venv/bin/python -m mypy finetune launch
# Two processes; an argument `-n 0` runs everything in one, for a debugger.
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
