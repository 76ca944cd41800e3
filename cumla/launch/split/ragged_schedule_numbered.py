# SPDX-License-Identifier: Apache-2.0
"""Entry point of cuda/split/ragged_schedule_numbered.cu, which ragged_schedule.py launches."""

from __future__ import annotations

from dataclasses import replace

from cumla.launch.layouts import constant
from cumla.launch.source import KernelSpec

_NAMES = "split", "ragged_schedule", "RaggedScheduleParams"
_THREADS = constant("split/ragged_schedule", "kScheduleThreads")
_SPEC = KernelSpec.of(*_NAMES, name="attention_schedule_numbered", threads=_THREADS)
SPEC = replace(_SPEC, stem="ragged_schedule_numbered")  # the file, whose function is the other's
SPECS = (SPEC,)
