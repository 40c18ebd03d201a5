"""A command of `devicebridge` with ComfyUI's Python; run by fork_host.py. Reads nothing of its first argument."""

import sys

from devicebridge.cli.main import main

sys.exit(main(sys.argv[2:]))
