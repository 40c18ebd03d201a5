"""`python -m devicebridge` is the command line; so is this file by its path, where the pack is not installed."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not __package__:  # run by its path: this folder has taken the first place of sys.path, see bootstrap.py
        import runpy
        from pathlib import Path

        del sys.path[0]
        runpy.run_path(str(Path(__file__).resolve().parent / "bootstrap.py"))["load_pack"]()
    from devicebridge.cli.main import main

    sys.exit(main())
