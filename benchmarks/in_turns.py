"""A step of training at two commits, in one run: benchmarks/train_step.py of both trees, whose steps take turns.

    git worktree add /tmp/before 797e7a26
    python benchmarks/in_turns.py /tmp/before [--out results.json] -- --subject flux2-512 --scheme fp8-compute
                                              --ways "pipeline 8" --rounds 20 --warm-up 2

What stands behind "--" goes to both, and names one way. While one tree computes a step, the other waits, so that both
meet the same state of cards and host. The ratio comes first: seconds before by seconds now, as the mean of neighbouring
steps with its standard error, and by medians. Less than 1 says that steps have become slower.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("before", "now")


def take_turns(side: str, tree: Path, folder: Path, arguments: list[str]) -> None:
    """In a process of its own: the steps of one tree. Files in folder say who is ready, whose turn it is, who ended."""
    (other,) = set(SIDES) - {side}
    sys.path.insert(0, str(tree / "benchmarks"))
    sys.argv = ["train_step.py", *arguments]
    train_step: Any = importlib.import_module("train_step")
    step = train_step.timed_step

    def in_turn(*values: Any) -> tuple[float, float]:
        (folder / f"{side} ready").touch()
        while not (folder / f"{other} ended").exists():
            if (folder / f"{other} ready").exists() and (folder / f"turn of {side}").exists():
                break
            time.sleep(0.002)
        found: tuple[float, float] = step(*values)
        with (folder / side).open("a", encoding="utf-8") as file:
            file.write(f"{found[0]:.4f}\n")
        (folder / f"turn of {side}").unlink(missing_ok=True)
        (folder / f"turn of {other}").touch()
        return found

    train_step.timed_step = in_turn
    train_step.main()


def ratios(before: list[float], now: list[float]) -> dict[str, float]:
    each = [one / other for one, other in zip(before, now, strict=True)]
    return {
        "neighbouring_steps": round(statistics.mean(each), 3),
        "standard_error": round(statistics.stdev(each) / len(each) ** 0.5, 3),
        "medians": round(statistics.median(before) / statistics.median(now), 3),
    }


def run_both(trees: dict[str, Path], arguments: list[str]) -> dict[str, list[float]]:
    """Seconds per sample of every step of both trees, in order. Raises: RuntimeError if one of them ends before."""
    with tempfile.TemporaryDirectory() as name:
        folder, running = Path(name), {}
        (folder / f"turn of {SIDES[0]}").touch()
        for side, tree in trees.items():
            command = [sys.executable, __file__, "--side", side, str(tree), str(folder), "--", *arguments]
            running[side] = subprocess.Popen(command, cwd=tree)
        while any(each.poll() is None for each in running.values()):
            time.sleep(0.1)
            for side, each in running.items():
                if each.poll() is not None:
                    (folder / f"{side} ended").touch()
        if failed := [side for side, each in running.items() if each.returncode]:
            raise RuntimeError(f"train_step.py ended with an error {' and '.join(failed)}; what it says is above")
        return {side: [float(line) for line in (folder / side).read_text().split()] for side in SIDES}


def main() -> None:
    cut = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the tree of the other commit")
    parser.add_argument("folder", type=Path, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--left-out", type=int, default=2, help="first steps of both, which are no part of the ratio")
    parser.add_argument("--out", type=Path)
    options, arguments = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if options.side:
        take_turns(options.side, options.before, options.folder, arguments)
        return
    found = run_both({"before": options.before.resolve(), "now": ROOT}, arguments)
    kept = {side: each[options.left_out :] for side, each in found.items()}
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()  # not in the processes, of which one has another tree's
    provenance: Any = importlib.import_module("provenance")
    report = {"times_faster_than_before": ratios(**kept), "arguments": arguments, "s_per_sample": found}
    provenance.print_or_write(report | provenance.describe_run("diffusers"), options.out)


if __name__ == "__main__":
    main()
