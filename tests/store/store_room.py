"""Where stores of tests are made: in memory where that is possible, since each commit waits for the disk otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = str(MEMORY) if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30 else None
