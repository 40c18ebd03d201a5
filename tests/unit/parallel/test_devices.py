"""What is known of this machine's memory."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from devicebridge.parallel import devices

GB = 10**9


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [(8 * GB, 3 * GB, 2 * GB, 7 * GB), ("max", 3 * GB, 0, None), (GB, 2 * GB, 0, 0), ("broken", 1, 1, None)],
)
def test_a_container_leaves_what_its_limit_leaves(tmp_path, limit, used, cached, expected):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")
    assert devices._cgroup_bytes(tmp_path) == expected


def test_without_a_container_the_system_says(tmp_path, monkeypatch):
    assert devices._cgroup_bytes(Path(tmp_path / "none")) is None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * GB, total=9 * GB))
    for left, expected in ((None, 5 * GB), (9 * GB, 5 * GB), (2 * GB, 2 * GB)):
        monkeypatch.setattr(devices, "_cgroup_bytes", lambda folder, left=left: left)
        assert devices.free_bytes(devices.CPU) == expected


@pytest.mark.parametrize("name", ["cpu:7", "cpu:1"])
def test_a_second_cpu_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' does not exist.*one CPU device, cpu"):
        devices.find_devices([name])
    assert devices.find_devices(["cpu:0"]) == devices.find_devices(["cpu"])


@pytest.mark.parametrize(
    ("system", "environment", "told"),
    [
        ("posix", {}, ""),
        ("posix", {"CUDA_VISIBLE_DEVICES": "1"}, "; CUDA_VISIBLE_DEVICES is '1' and hides all others"),
        ("nt", {"CUDA_VISIBLE_DEVICES": "0"}, f"; {devices.ONE_GPU_ON_WINDOWS}"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_may_hide_it(monkeypatch, system, environment, told):
    monkeypatch.setattr(devices, "os", SimpleNamespace(name=system, environ=environment))
    with pytest.raises(ValueError) as error:
        devices.find_device("cuda:99")
    assert str(error.value).endswith(told) and ("; " in str(error.value).partition("found here")[2]) is bool(told)
