"""Python processes of their own, as a user starts them, and what this one uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(
    *arguments: str, cwd: Path = ROOT, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A Python process to its end; it finds the clone from any folder."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, timeout=timeout, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip


def resident_mib() -> float:
    """The memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
