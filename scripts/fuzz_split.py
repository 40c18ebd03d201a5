"""Plays random histories of nodes on a split MODEL and on an unsplit one, in a real ComfyUI on emulated cards.

    python scripts/fuzz_split.py [--histories 1000] [--first 0] [--processes 2] [--tokens] [--out histories.json]

Needs a ComfyUI checkout, found as the tests find it; no GPU. `--gpus` plays on this machine's GPUs. Prints every
history that differed, was refused or could not be compared, then a table. Exits with 1 if any differed. A seed is one
history: `--first 57 --histories 1` plays it again. `--tokens` plays those with way tokens.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

from devicebridge.tests.comfy_host import comfy_python, find_comfyui  # noqa: E402

WORKER = ROOT / "tests" / "comfy" / "split_worker.py"
Command = tuple[list[str], list[str]]  # what comes before the worker's folder, and behind it
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first history")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write all histories as JSON")
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--tokens", action="store_true", help="histories with way tokens")
    options = parser.parse_args()
    comfyui = find_comfyui()
    python = comfy_python(comfyui) if comfyui is not None else None
    if comfyui is None or python is None:
        print("no ComfyUI was found: set COMFYUI_PATH to its folder")
        return 2
    seeds = range(options.first, options.first + options.histories)
    command = [str(python), str(WORKER), str(comfyui)], ["--gpus"] if options.gpus else []
    what = "tokens" if options.tokens else "history"
    found = play(command, [f"{what} {seed}" for seed in seeds], options.processes)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    verdicts = collections.Counter(kind(history) for history in found.values())
    print("  ".join(f"{name} {count}" for name, count in verdicts.most_common()))
    return 1 if verdicts["different"] else 0


def play(command: Command, seeds: list[str], processes: int) -> dict[str, dict[str, Any]]:
    """Each seed's history as the worker tells it, or {"error": text} if it died."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for seed in seeds:
        waiting.put(seed)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(command, Path(folder) / str(number), waiting, found) for number in range(processes)]
        threads = [threading.Thread(target=work, args=each) for each in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {seed: found[seed] for seed in seeds}


def work(command: Command, folder: Path, waiting: queue.SimpleQueue[str], found: dict[str, dict[str, Any]]) -> None:
    """Ask one worker process for history after history; a new one where it died."""
    folder.mkdir()
    process = None
    while True:
        try:
            seed = waiting.get_nowait()
        except queue.Empty:
            break
        if process is None or process.poll() is not None:
            process = start(command, folder)
        found[seed] = ask(process, seed, folder)
        report(seed, found[seed])
    if process is not None and process.stdin is not None:
        process.stdin.close()
        process.wait(timeout=60)


def start(command: Command, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command[0], str(folder), *command[1]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "worker.log").open("w", encoding="utf-8"),
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )


def ask(process: subprocess.Popen[str], seed: str, folder: Path) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"case": seed}) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if line:
        return json.loads(line)
    process.wait(timeout=60)
    return {"error": (folder / "worker.log").read_text(encoding="utf-8")[-2000:], "verdict": "different: it died"}


def kind(history: dict[str, Any]) -> str:
    return history["verdict"].partition(":")[0].partition(",")[0]


def report(seed: str, history: dict[str, Any]) -> None:
    if history["verdict"] != "equal":
        steps = history.get("steps", [history.get("error", "")]) if kind(history) == "different" else []
        print("\n    ".join([f"{seed}: {history['verdict'][:400]}", *steps]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
