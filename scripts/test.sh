#!/usr/bin/env bash
# The whole suite: formatter, linter, type checker, tests. Sets up everything it needs; arguments go to pytest.
. "$(dirname "$0")/environment.sh"
install_pack dev

ruff check .
ruff format --check .
python scripts/check_types.py
python -m pytest "$@"
