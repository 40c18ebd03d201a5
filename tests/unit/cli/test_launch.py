"""What a process of several does when it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from devicebridge.cli.launch import as_rank
from devicebridge.parallel.ranks.place import RankPlace
from devicebridge.system.launched import Launch
from devicebridge.system.stopping import STOPPED, Stopped


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_before_all_have_come_is_no_failure(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun would start all anew; the command ends as after any stop."""
    launch = Launch(tmp_path)
    for name, value in launch.environment.items():
        monkeypatch.setenv(name, value)

    def train(should_stop: Callable[[], bool]) -> int:
        raise Stopped("stopped before all had begun")

    assert as_rank(RankPlace(rank, 2, rank, 2), train) == 0
    assert launch.code() == (0 if rank else STOPPED)
    assert ("stopped before all had begun" in capsys.readouterr().out) == (rank == 0)
