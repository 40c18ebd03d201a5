"""How the tests start several ranks on CPUs, and see that none is left."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# One thread each: two processes with a thread per core are slower than one.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"}


def torchrun(script, *arguments, count, restarts=0):
    flags = [
        "--nnodes", "1", "--nproc-per-node", str(count), "--max-restarts", str(restarts), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "--rdzv-id", uuid.uuid4().hex,
    ]  # fmt: skip
    return [sys.executable, "-m", "torch.distributed.run", *flags, str(script), *map(str, arguments)]


def run_jobs(folder, plan, *, count):
    """Run jobs on so many ranks; what jobs_worker.py says of each. plan: see there."""
    usual = {"resume": False, "stop": 0, "compiler": "works", "spread": False, "others": {}, "rooms": []}
    items = [{**usual, **item} for item in plan]
    file, results = folder / f"plan-{uuid.uuid4().hex}.json", folder / f"results-{uuid.uuid4().hex}.json"
    file.write_text(json.dumps(items, default=str))
    command = torchrun(HERE / "jobs_worker.py", file, results, count=count)
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-30000:]
    return json.loads(results.read_text())


def start_cli(*arguments, script=ROOT / "__main__.py"):
    """`devicebridge ARGUMENTS` in a process of its own; its output and errors are read from stdout."""
    command = [sys.executable, "-u", str(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)


def read_until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def _has(command, job_file):
    """Whether a command line names this file, or one in this folder."""
    return any(Path(part) == Path(job_file) or Path(job_file) in Path(part).parents for part in command)


def ranks_of(job_file):
    """The processes that train a job, by rank. job_file may be a folder that holds it."""
    found = {}
    for process in psutil.process_iter():
        try:
            environment, command = process.environ(), process.cmdline()
        except psutil.Error:
            continue
        if _has(command, job_file) and "LOCAL_RANK" in environment and process.status() != psutil.STATUS_ZOMBIE:
            found[int(environment["RANK"])] = process
    return found


def all_of(job_file):
    found = []
    for process in psutil.process_iter():
        try:
            if _has(process.cmdline(), job_file) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def none_left(job_file, seconds=30.0):
    end = time.monotonic() + seconds
    while all_of(job_file):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
