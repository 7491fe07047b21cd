"""`benchmarks/large_pairs.py`: targets that do not fit on a chip, cut to two layers."""

import runpy
from collections.abc import Callable
from typing import Any

from support import ROOT

large_pair: Callable[..., tuple[Any, Any]] = runpy.run_path(str(ROOT / "benchmarks/large_pairs.py"))[
    "large_pair"
]
