"""Code run in a fresh interpreter."""

import os
import subprocess
import sys

from support import ROOT


def python(code, **environment):
    """Run ``code`` in a fresh interpreter; warnings are errors there too."""
    options = {"capture_output": True, "text": True, "cwd": ROOT}
    options |= {"env": os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")} | environment}
    options |= {"timeout": 120}
    return subprocess.run([sys.executable, "-W", "error", "-c", code], **options)
