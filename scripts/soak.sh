#!/usr/bin/env bash
# What is for the night: kills, full disks, closed terminals and clocks that jump, many times over (scripts/soak.py says
# what must hold), and wrong inputs (scripts/bad_inputs.py). Takes about half an hour with its 200 kills, and is no part
# of the suite. Arguments are soak.py's: --kills, --prompts, --seed, --only; with any, bad_inputs.py does not run.
. "$(dirname "$0")/environment.sh"
install_pack dev
python scripts/soak.py "$@"
[ $# -gt 0 ] || python scripts/bad_inputs.py
