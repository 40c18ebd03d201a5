"""Workflow files with inputs replaced, as `devicebridge run --set` does it."""

from __future__ import annotations

from devicebridge.headless.workflow import read_workflow as read_workflow
from devicebridge.headless.workflow import set_values as set_values
