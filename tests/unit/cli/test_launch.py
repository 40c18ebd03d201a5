"""What a process of several does when it ends."""

import argparse
import os
from pathlib import Path
from unittest import mock

import pytest
from devicebridge.cli import jobs
from devicebridge.cli.jobs import again
from devicebridge.cli.launch import as_rank, torchrun_command
from devicebridge.config.model import ParallelConfig
from devicebridge.parallel.ranks.group import RankFailed, RankLost
from devicebridge.parallel.ranks.place import RankPlace
from devicebridge.system.stopping import STOPPED, Launch, Stopped
from torch import OutOfMemoryError


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Of which this process is one."""
    launch = Launch(tmp_path)
    for name, value in launch.environment.items():
        monkeypatch.setenv(name, value)
    return launch


def _exit_code(rank: int, error: Exception) -> int:
    """With which a rank of two ends whose training raises this."""

    with mock.patch.object(os, "_exit", side_effect=SystemExit) as ended:
        try:
            return as_rank(RankPlace(rank, 2, rank, 2), mock.Mock(side_effect=error))
        except SystemExit:
            return int(ended.call_args.args[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_before_all_have_come_is_no_failure(rank, launch, capsys):
    """torchrun would start all anew; the command ends as after any stop."""
    assert _exit_code(rank, Stopped("stopped before all had begun")) == 0
    assert launch.code() == (0 if rank else STOPPED)
    assert ("stopped before all had begun" in capsys.readouterr().out) == (rank == 0)


def test_ranks_that_are_stopped_while_they_encode_part_in_order() -> None:
    with mock.patch.multiple(jobs, open_ranks=mock.DEFAULT, encoded=mock.Mock(side_effect=Stopped)) as ranks:
        assert jobs._train(argparse.Namespace(resume=True), mock.Mock(), RankPlace(0, 2, 0, 2), bool) == STOPPED
    ranks["open_ranks"]().__exit__.assert_called_once_with(None, None, None)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ValueError("no such file"), ValueError("no such file")),  # all look for it
        (ValueError("no such file"), RankFailed("rank 0: no such file", is_refusal=True)),
        (RankFailed("rank 1: no such file", is_refusal=True), ValueError("no such file")),
    ],
)
def test_a_refusal_is_said_once_and_ends_the_command_as_it_would_alone(first, second, launch, capsys):
    assert (_exit_code(0, first), _exit_code(1, second), launch.code()) == (0, 0, 2)
    assert capsys.readouterr().err == "devicebridge: no such file\n"


def test_what_breaks_is_no_refusal(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert (_exit_code(0, RankLost("rank 1 has ended")), _exit_code(1, OutOfMemoryError("no room"))) == (2, 2)
    assert launch.code() == 0
    assert capsys.readouterr().err == "devicebridge: rank 0: rank 1 has ended\ndevicebridge: rank 1: no room\n"


def test_torchrun_that_somebody_else_has_started_hears_of_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(1, ValueError("no such file")) == 2
    assert capsys.readouterr().err == "devicebridge: rank 1: no such file\n"


@pytest.mark.parametrize(("processes", "flag"), [(1, " --nproc 2"), (2, "")], ids=["by the flag", "by the job file"])
def test_what_continues_a_training_starts_as_many_processes(processes: int, flag: str, launch: Launch) -> None:
    job, options = mock.Mock(parallel=ParallelConfig(processes=processes)), argparse.Namespace(job=Path("job.toml"))
    assert again(options, job, RankPlace(0, 2, 0, 2)) == f"devicebridge train job.toml{flag} --resume"
    assert again(options, job, None) == "devicebridge train job.toml --resume"
    for resume, last in ((False, "job.toml"), (True, "--resume"), ("continue", "--continue")):
        assert torchrun_command(2, Path("job.toml"), resume=resume)[-1] == last
    with mock.patch.dict(os.environ, dict.fromkeys(launch.environment, "")):
        assert again(options, job, RankPlace(0, 2, 0, 2)).startswith("the same torchrun command with train job.toml")
