"""``python -m torch_dflash``: the command line, where its script is not on the path."""

import sys

from torch_dflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
