"""Type-check the Python blocks of README and docs, and the examples: no error may name a public name of ours.

python make/blocks.py
"""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
from pathlib import Path

import jax_bridge
import torch_dflash

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build/typed"
OURS = {"torch_dflash", "jax_bridge", *torch_dflash.__all__, *vars(jax_bridge)} - {*dir(builtins)}
"""Words of an error that name a symbol of ours."""


def write_blocks() -> list[Path]:
    """Each page's blocks as one file."""
    OUT.mkdir(parents=True, exist_ok=True)
    files = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
        if blocks := re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M):
            files.append(OUT / f"{page.stem}.py")
            files[-1].write_text("\n".join(blocks))
    return files


def main() -> int:
    """1 if an error names a symbol of ours."""
    files = [*write_blocks(), *ROOT.glob("examples/*.py")]
    line = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(ROOT), *map(str, files)]
    found = json.loads(subprocess.run(line, capture_output=True, text=True).stdout)["generalDiagnostics"]
    errors = [one for one in found if one["severity"] == "error"]
    # An attribute that another library's class is said to lack may share its name with one of ours.
    named = [re.sub(r'attribute "\w+"', "", one["message"]).partition("\n")[0] for one in errors]
    ours = [one for one, words in zip(errors, named, strict=True) if OURS & {*re.findall(r"\w+", words)}]
    for one in ours:
        print(f"{one['file']}:{one['range']['start']['line'] + 1}: {one['message']}")
    print(f"{len(files)} files: {len(ours)} errors name a symbol of ours, {len(errors) - len(ours)} do not")
    return bool(ours)


if __name__ == "__main__":
    sys.exit(main())
