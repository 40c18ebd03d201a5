"""Windows' way to let a process end with us: a job object.

The system ends all that is in one when its last handle closes, and closes ours when we end, however we end. Processes
in it are ended at once: Windows has no signal to ask them first.

https://learn.microsoft.com/windows/win32/procthread/job-objects
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

_KILL_ON_JOB_CLOSE = 0x2000
_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation


class _BasicLimits(ctypes.Structure):
    _fields_ = [
        ("per_process_user_time", ctypes.c_int64),
        ("per_job_user_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("minimum_working_set", ctypes.c_size_t),
        ("maximum_working_set", ctypes.c_size_t),
        ("active_processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority_class", ctypes.c_uint32),
        ("scheduling_class", ctypes.c_uint32),
    ]


class _ExtendedLimits(ctypes.Structure):
    _fields_ = [
        ("basic", _BasicLimits),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    ]


def end_with_us(process: int) -> Callable[[], None]:
    """Put a process, and what it will start, into a job of its own; the returned function ends them all.

    Where the system refuses, a warning says so, and the function does nothing.

    Args:
        process: handle.
    """
    kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.CreateJobObjectW.restype = ctypes.c_void_p
    kernel.CreateJobObjectW.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p)
    kernel.SetInformationJobObject.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
    kernel.AssignProcessToJobObject.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    kernel.CloseHandle.argtypes = (ctypes.c_void_p,)
    limits = _ExtendedLimits()
    limits.basic.flags = _KILL_ON_JOB_CLOSE
    job = kernel.CreateJobObjectW(None, None)
    is_in_job = (
        job
        and kernel.SetInformationJobObject(job, _EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits))
        and kernel.AssignProcessToJobObject(job, process)
    )
    if not is_in_job:
        _log.warning("Windows gave no job object; a process started here goes on if this one is killed")
    return lambda: kernel.CloseHandle(job) if job else None
