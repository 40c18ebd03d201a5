"""Plays random histories of nodes on a split MODEL and on an unsplit one, in a real ComfyUI on emulated cards.

    python scripts/fuzz_split.py [--histories 1000] [--first 0] [--processes 2] [--tokens]

Needs a ComfyUI checkout, found as the tests find it; no GPU. `--gpus` plays on this machine's GPUs. Prints every
history that differed, was refused or could not be compared, then a table. Exits with 1 if any differed, or a process
died. A seed is one history: `--first 57 --histories 1` plays it again. `--tokens` plays those with way tokens.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, PIPE

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

from devicebridge.tests.comfy.server import ENVIRONMENT  # noqa: E402
from devicebridge.tests.comfy_host import comfy_python, find_comfyui  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first history")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--tokens", action="store_true", help="histories with way tokens")
    options = parser.parse_args()
    comfyui = find_comfyui()
    python = comfy_python(comfyui) if comfyui is not None else None
    if comfyui is None or python is None:
        print("no ComfyUI was found: set COMFYUI_PATH to its folder")
        return 2
    worker = ROOT / "tests" / "comfy" / "split_worker.py"
    what, cards = "tokens" if options.tokens else "history", ["--gpus"] * options.gpus

    def play(first: int) -> collections.Counter[str]:
        """Every history of a process, each told when it is over; "not played" for those that it died before."""
        verdicts: collections.Counter[str] = collections.Counter()
        seeds = range(first, options.first + options.histories, options.processes)
        with tempfile.TemporaryDirectory() as folder:
            command = [str(python), str(worker), str(comfyui), folder, *cards]
            for seed, history in zip(seeds, _answers(command, [f"{what} {seed}" for seed in seeds]), strict=False):
                kind = history["verdict"].partition(":")[0].partition(",")[0]
                verdicts[kind] += 1
                steps = history["steps"] if kind == "different" else []
                if kind != "equal":
                    print("\n    ".join([f"{what} {seed}: {history['verdict'][:400]}", *steps]), flush=True)
        verdicts["not played"] += len(seeds) - verdicts.total()
        return +verdicts

    with ThreadPoolExecutor(options.processes) as pool:
        verdicts = sum(pool.map(play, range(options.first, options.first + options.processes)), collections.Counter())
    print("  ".join(f"{name} {count}" for name, count in verdicts.most_common()))
    return 1 if verdicts["different"] or verdicts["not played"] else 0


def _answers(command: list[str], cases: list[str]) -> Iterator[dict[str, list[str] | str]]:
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        for case in cases:
            process.stdin.write(json.dumps({"case": case}) + "\n")
            process.stdin.flush()
            if not (line := process.stdout.readline()):
                return
            yield json.loads(line)
        process.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
