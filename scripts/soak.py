"""What can happen to a run, many times over, on tiny models and no GPU: nothing may be lost beyond the last step.

    kills              SIGKILL at random moments and file operations, while one process caches, trains and saves
    kills of fillers   the same where two processes fill one cache (benchmarks/killed_caches.py)
    signals            Ctrl-C, SIGTERM and SIGHUP after a random step
    one folder         a second training is started in the folder of one that runs
    orphans            the process that started a pair's trainings is killed
    full disk          output and cache on a small tmpfs with a random number of bytes left; needs the right to mount
    read-only          output or cache may not be written, from the start or in mid-run
    prompts            a thousand prompts of plain and split models in one ComfyUI; needs a ComfyUI checkout
    clock              every file is dated in the future, or long ago, before a run is resumed and a cache made anew

In each, the LoRA after resuming must be byte-equal to that of a run that nobody disturbed, and so must every entry of
the cache. A checkpoint that was called saved must be there; no command may end with a traceback. Moments and operations
come from --seed. Prints a table, and ends with exit code 1 if anything was lost. Needs os.fork, so no Windows.

    scripts/soak.sh --kills 200 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from soak_lab import STEP, STEPS, TIMEOUT_S, Child, Lab, Row, entries, newest_step

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534


# ---- the checks ----


def kills(labs: Sequence[Lab], number: int, minutes: float) -> Row:
    """One process that caches, trains and saves; on one device, in a pipeline and data parallel on emulated cards."""
    row = Row("kills")
    turn, end = 0, time.monotonic() + 60 * minutes
    while row.kills < number and time.monotonic() < end:
        lab = labs[turn % len(labs)]
        turn += 1
        job = lab.new_job()
        while True:
            newest = newest_step(job)
            child = _start_and_kill(lab, job) if row.kills < number else lab.start(job)
            code = child.wait()
            first = STEP.findall(child.text())[:1]
            row.expect(not first or int(first[0]) == newest + 1, f"{child.log.stem}: went on at {first} after {newest}")
            if code != -signal.SIGKILL:
                break
            row.kills += 1
            lab.check_ended(job, child, row, -signal.SIGKILL)
        lab.check_finished(job, child, row)
        shutil.rmtree(Path(job.output.folder).parent)
    return row


def _start_and_kill(lab: Lab, job: Any) -> Child:
    if lab.chance.random() < 0.5:
        return lab.start(job, kill_at_write=lab.chance.randint(1, lab.num_writes))
    child = lab.start(job)
    end = time.monotonic() + lab.chance.uniform(0.0, 0.7 * lab.duration_s)
    while time.monotonic() < end and not child.is_over():
        time.sleep(0.001)
    if not child.is_over():
        os.kill(child.pid, signal.SIGKILL)
    return child


def kills_of_fillers(number: int, seed: int) -> Row:
    row = Row("kills of fillers")
    script = str(ROOT / "benchmarks" / "killed_caches.py")
    command = [sys.executable, script, "--kills", str(number), "--samples", "20", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        row.faults.append(done.stderr[-400:])
    else:
        found = json.loads(done.stdout.splitlines()[-1])
        row.kills, row.runs = found["kills"], found["folders_filled"]
    return row


def signals(lab: Lab) -> Row:
    row = Row("signals")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        job = lab.new_job(save_every_steps=1000)
        child = lab.start(job)
        step = lab.chance.randint(1, STEPS - 2)
        child.wait_for(rf"^step {step}/")
        os.kill(child.pid, number)
        lab.check_ended(job, child, row, 130, says="--resume")
        row.expect(newest_step(job) >= step, f"{number.name}: stopped after step {step}, saved {newest_step(job)}")
        lab.check_finished(job, lab.start(job), row)
    return row


def one_folder(lab: Lab) -> Row:
    """The first is held still while the second tries, so that it surely runs."""
    row = Row("one folder")
    for is_resumed, moment in ((False, "^== captions"), (True, "^step 1/")):
        job = lab.new_job(save_every_steps=1000)
        first = lab.start(job)
        first.wait_for(moment)
        os.kill(first.pid, signal.SIGSTOP)
        second = lab.start(job, is_resumed=is_resumed)
        second.wait(timeout_s=30.0)
        os.kill(first.pid, signal.SIGCONT)
        lab.check_ended(job, second, row, 2, says=str(first.pid))
        lab.check_finished(job, first, row)
    return row


def orphans(lab: Lab) -> Row:
    """Nothing is saved before the last of very many steps, so that a checkpoint proves that the worker was asked."""
    row = Row("orphans")
    pair = _pair_job(lab.folder / "pair")
    parent = lab.start(pair)
    row.expect(parent.wait_for(r"^\[high_noise\] step 2/"), f"the pair did not train: {parent.text()[-400:]}")
    os.kill(parent.pid, signal.SIGKILL)
    row.kills += 1
    row.runs += 1
    parent.wait()
    is_gone = _until(lambda: not _processes_naming(str(lab.folder / "pair")))
    row.expect(is_gone, "a worker lives on after the process that started it was killed")
    for pid in _processes_naming(str(lab.folder / "pair")):
        os.kill(pid, signal.SIGKILL)
    saved = list(Path(pair.output.folder).glob("high_noise/checkpoints/step-*"))
    row.expect(bool(saved), "an orphaned worker did not save")
    return row


def _pair_job(folder: Path) -> Any:
    from devicebridge.tests.tiny_pipeline import make_tiny_job
    from devicebridge.tests.toy import TINY

    make_tiny_job(folder, "wan")
    model, tiny = folder / "model", TINY["wan"]
    tiny.make_model(7, **tiny.encoder_widths).save_pretrained(model / "transformer_2")
    index = json.loads((model / "model_index.json").read_text())
    index |= {"transformer_2": index["transformer"], "boundary_ratio": 0.875}
    (model / "model_index.json").write_text(json.dumps(index))
    return make_tiny_job(
        folder,
        "wan",
        model={"path": str(model), "variant": "wan2.2-t2v-a14b-high", "second_expert": str(model)},
        train={"steps": 100_000, "batch_size": 1},
        evaluation={"folder": ""},
        output={"folder": str(folder / "run"), "name": "mine", "save_every_steps": 0},
        cache={"folder": ""},
    )


def _processes_naming(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text in entry.read_bytes().decode(errors="replace") and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return found


def _until(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end and not is_so():
        time.sleep(0.1)
    return is_so()


def full_disk(lab: Lab, number: int = 10) -> Row:
    row = Row("full disk")
    with _small_disk(lab.folder / "disk") as disk:
        if disk is None:
            row.skipped = "a tmpfs cannot be mounted here; that needs root"
            return row
        for _ in range(number):
            job = lab.new_job(disk)
            usage = shutil.disk_usage(disk)
            filler = disk / "filler"
            filler.write_bytes(bytes(max(0, usage.free - lab.chance.randint(0, 2_000_000))))
            child = lab.start(job)
            if child.wait() != 0:
                lab.check_ended(job, child, row, 2, says=str(disk))
            filler.unlink()
            lab.check_finished(job, lab.start(job), row)
            shutil.rmtree(Path(job.output.folder).parent)
    return row


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            try:
                yield folder
            finally:
                subprocess.run(["umount", str(folder)], capture_output=True, check=False)
            return
    yield None


def read_only(lab: Lab) -> Row:
    row = Row("read-only")
    for path in (lab.folder / "model").rglob("*"):  # safetensors writes files for its user alone
        path.chmod(0o755 if path.is_dir() else 0o644)
    for which in ("output", "cache"):
        job = lab.new_job()
        folder = Path(getattr(job, which).folder)
        _make_open(job)
        folder.chmod(0o555)
        lab.check_ended(job, lab.start(job, arrange=_be_nobody), row, 2, says=str(folder))
        folder.chmod(0o777)
        lab.check_finished(job, lab.start(job, arrange=_be_nobody), row)
    job = lab.new_job()
    _make_open(job)
    checkpoints = Path(job.output.folder) / "checkpoints"
    child = lab.start(job, arrange=_be_nobody)
    assert child.wait_for(r"^step 2/"), child.text()
    checkpoints.chmod(0o555)
    lab.check_ended(job, child, row, 2, says=str(checkpoints))
    checkpoints.chmod(0o777)
    lab.check_finished(job, lab.start(job, arrange=_be_nobody), row)
    return row


def _make_open(job: Any) -> None:
    """Folders that anybody may write to: root, who may write everywhere, becomes nobody for these runs."""
    for folder in (Path(job.output.folder), Path(job.cache.folder)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
    Path(job.output.folder).parent.chmod(0o777)


def _be_nobody() -> None:
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def clock(lab: Lab) -> Row:
    row = Row("clock")
    for year in (2100, 1980):
        job = lab.new_job()
        child = lab.start(job)
        child.wait_for(rf"^step {lab.chance.randint(2, STEPS - 2)}/")
        os.kill(child.pid, signal.SIGKILL)
        row.kills += 1
        lab.check_ended(job, child, row, -signal.SIGKILL)
        _date(job, year)
        lab.check_finished(job, lab.start(job), row)
        row.expect(entries(job) == lab.entries, f"{year}: the cache is another")
    return row


def _date(job: Any, year: int) -> None:
    moment = (year - 1970) * 365.25 * 24 * 3600
    for path in Path(job.output.folder).parent.rglob("*"):
        os.utime(path, (moment, moment))


def prompts(folder: Path, number: int, seed: int) -> Row:
    """Nothing may grow, and each output has the bits of the first of its kind (tests/comfy/split_prompts.py)."""
    from devicebridge.tests.comfy_host import comfy_python, find_comfyui

    row, comfyui = Row("prompts"), find_comfyui()
    python = comfy_python(comfyui) if comfyui is not None else None
    if python is None:
        row.skipped = "no ComfyUI was found; set COMFYUI_PATH to its folder"
        return row
    place = folder / "prompts"
    place.mkdir()
    command = [str(python), str(ROOT / "tests" / "comfy" / "split_worker.py"), str(comfyui), str(place)]
    asked = json.dumps({"case": f"prompts {number} {seed}"}) + "\n"
    with open(place / "log", "w", encoding="utf-8") as log:
        done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    if done.returncode or not done.stdout:
        row.faults.append(f"the worker ended with {done.returncode}: {(place / 'log').read_text()[-400:]}")
        return row
    row.runs, row.faults = number, json.loads(done.stdout)["faults"]
    return row


# ---- the table ----


def main() -> int:
    arguments = _read_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # threads do not survive a fork
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # a process killed with the lock of all would keep it for the others
    rows = []
    with tempfile.TemporaryDirectory(prefix="devicebridge-soak-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        os.environ["DEVICEBRIDGE_CACHE"] = str(folder / "user_cache")
        for row in _rows(folder, arguments):
            rows.append(row)
            print(_line(row), flush=True)
            for fault in row.faults[:5]:
                print(f"    LOST {fault}", flush=True)
    faults = sum(len(row.faults) for row in rows)
    print(f"{sum(row.runs for row in rows)} runs, {sum(row.kills for row in rows)} kills, {faults} losses")
    return 1 if faults else 0


def _rows(folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    _import_all(folder / "imports")
    lab = Lab(folder, "one", arguments.seed)
    labs = [lab, *(_lab_of_cards(folder, arguments.seed, strategy) for strategy in ("none", "pipeline", "data"))]
    of_fillers = arguments.kills // 4
    checks: dict[str, Callable[[], Row]] = {
        "kills": lambda: kills(labs, arguments.kills - of_fillers, arguments.minutes),
        "kills of fillers": lambda: kills_of_fillers(of_fillers, arguments.seed),
        "signals": lambda: signals(lab),
        "one folder": lambda: one_folder(lab),
        "orphans": lambda: orphans(lab),
        "full disk": lambda: full_disk(lab),
        "read-only": lambda: read_only(lab),
        "clock": lambda: clock(lab),
        "prompts": lambda: prompts(folder, arguments.prompts, arguments.seed),
    }
    print(f"{'check':<18}{'runs':>6}{'kills':>7}{'losses':>8}")
    for name in arguments.only or checks:
        try:
            yield checks[name]()
        except Exception:  # the others still say what they found
            yield Row(name, faults=[traceback.format_exc()])


def _lab_of_cards(folder: Path, seed: int, strategy: str) -> Lab:
    """A job on two emulated cards. Two microbatches per step, so that both are used."""
    train = {"steps": STEPS, "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3}
    cards = {"split": {"devices": ["lazy:0", "lazy:1"]}, "cache": {"vae_device": "cpu"}, "train": train}
    return Lab(folder, strategy, seed, **cards, parallel={"strategy": strategy})


def _line(row: Row) -> str:
    line = f"{row.check:<18}{row.runs:>6}{row.kills:>7}{len(row.faults):>8}"
    return f"{line}  skipped: {row.skipped}" if row.skipped else f"{line}  {row.note}".rstrip()


def _import_all(folder: Path) -> None:
    """All that a run imports, so that its forks need not. No gradients here: they start threads."""
    from devicebridge.events import EventLog
    from devicebridge.jobs.encode_job import cache_job
    from devicebridge.jobs.job import check_job, run_job  # noqa: F401
    from devicebridge.tests.tiny_pipeline import make_tiny_job

    job = make_tiny_job(folder, output={"folder": str(folder / "run")})
    with EventLog(folder / "events") as events:
        cache_job(check_job(job), events)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="a quarter of them of processes that fill one cache")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of kills, after which no other run begins")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="CHECK", help="one of the checks above; may be repeated")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
