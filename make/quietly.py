"""Run a command without its output: a line that counts the seconds, and all it said if it fails.

python make/quietly.py LABEL COMMAND [ARGUMENT ...]
"""

import subprocess
import sys
import tempfile
import time


def main() -> int:
    """The command's exit status."""
    label, command = sys.argv[1], sys.argv[2:]
    live, started = sys.stderr.isatty(), time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while (status := process.poll()) is None:
            if live:
                print(
                    f"\r{label} ... {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True
                )
            time.sleep(0.2)
        end = f"{label}: {time.monotonic() - started:.0f} s"
        print(f"\r{end}    " if live else end, file=sys.stderr)
        if status:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
    return status


if __name__ == "__main__":
    sys.exit(main())
