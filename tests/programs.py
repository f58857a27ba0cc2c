"""Programs that tests start in processes of their own, with the package that is tested and the helpers of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file")


def run_program(*words: object, timeout: float = 300, **environment: str) -> str:
    """Standard output of ``python WORDS``, which must succeed: in the repository's root, on one thread, in no process group."""
    inherited = {name: value for name, value in os.environ.items() if "RANK" not in name and name != "WORLD_SIZE"}
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    fixed = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command, env = [sys.executable, *map(str, words)], {**inherited, **fixed, **environment}
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
