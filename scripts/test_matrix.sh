#!/usr/bin/env bash
# The tests on the oldest and on the newest of every package the pack claims to work with, each in an environment of its
# own, and a table of both. Takes gigabytes and hours, so it is for nights, not part of scripts/test.sh.
#
#     bash scripts/test_matrix.sh FOLDER [pytest arguments]
#
# The environments are FOLDER/oldest and FOLDER/newest; FOLDER/*.txt say what was installed and how the tests ended. One
# that is there is used again, the newest brought up to date. PYTHON_OLDEST and PYTHON_NEWEST name other interpreters.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$1"
FOLDER="$(cd "$1" && pwd)"
shift
[ $# -gt 0 ] || set -- tests
cd "$ROOT"
export HF_HUB_OFFLINE=1 # nothing here may reach for a hub

make_environment() { # make_environment oldest|newest
    local which="$1" python="$FOLDER/$1/bin/python" override
    override="PYTHON_${which^^}"
    if [ ! -x "$python" ]; then
        "${!override:-$(python3 scripts/test_versions.py --python "$which")}" -m venv "$FOLDER/$which"
    fi
    python3 scripts/test_versions.py "$which" > "$FOLDER/$which-asked.txt"
    "$python" -m pip install --quiet --upgrade --requirement "$FOLDER/$which-asked.txt"
    "$python" -m pip install --quiet --no-deps --editable .
    "$python" -m pip check
    "$python" -m pip list --format freeze > "$FOLDER/$which-installed.txt"
}

failed=0
for which in oldest newest; do
    echo "$which: setting up $FOLDER/$which"
    make_environment "$which"
    "$FOLDER/$which/bin/python" -m pytest --junit-xml "$FOLDER/$which.xml" "$@" > "$FOLDER/$which.txt" 2>&1 || failed=1
done
python3 scripts/test_versions.py --table "$FOLDER"
exit "$failed"
