"""Run the README's first block of Python and keep its output.

python benchmarks/quickstart.py --json docs/results/quickstart_cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path

from torch_dflash.cli.outputs import write_results

README = Path(__file__).parents[1] / "README.md"


def first_block() -> str:
    """The README's first block of Python."""
    found = re.search(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert found is not None
    return found[1]


def main() -> None:
    """Run it, show its output and write it with its provenance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    code, said = first_block(), io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "README.md", "exec"), {})
    print(said.getvalue(), end="")
    write_results(arguments.json, {"code": code, "output": said.getvalue()})


if __name__ == "__main__":
    main()
