#!/usr/bin/env bash
# The whole suite: formatter, linter, length of sentences, facts about the source, tests, these in TEST_PROCESSES (3)
# processes, each taking a file after the other (tests/conftest.py), and beside them the type checker, whose words come
# last. Sets up everything it needs.
# Arguments go to a pytest in one process.
. "$(dirname "$0")/environment.sh"
install_pack dev

ruff check .
ruff format --check .
python scripts/check_prose.py
python scripts/check_house.py
types="$(mktemp)" code=0
python scripts/check_types.py > "$types" 2>&1 & # one core for a minute, while tests wait for servers and browsers
checker=$!
trap 'kill "$checker" 2> /dev/null || true; rm -f "$types"' EXIT
if [ $# -eq 0 ]; then
    # In the order of the files: the longest, tests/comfy, comes first, and its server is one for all of it.
    # Three processes for two cores: one of them often waits for a server, a browser or a process of its own.
    set -- --numprocesses "${TEST_PROCESSES:-3}" --dist loadfile --no-loadscope-reorder
fi
python -m pytest "$@" || code=$?
wait "$checker" || code=1
cat "$types"
exit "$code"
