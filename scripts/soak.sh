#!/usr/bin/env bash
# Kills, full disks, closed terminals and clocks that jump, many times over (scripts/soak.py says what must hold). Takes
# about ten minutes with its 200 kills, and is no part of the suite. Arguments: --kills, --seed, --only.
. "$(dirname "$0")/environment.sh"
install_pack dev
python scripts/soak.py "$@"
