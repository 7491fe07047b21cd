#!/bin/sh
# Prints a Python 3.12 that starts: VLLM_PYTHON; or one on the path, of pyenv or of uv, in this order.
is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2> /dev/null; }
python=$VLLM_PYTHON
for found in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
    "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python; do
    if [ -z "$python" ] && is_312 "$found"; then python=$found; fi
done
if ! is_312 "$python"; then
    echo "VLLM_PYTHON=$python: vLLM for TPU needs Python 3.12; name one, as in" \
        "make test-vllm VLLM_PYTHON=/usr/bin/python3.12" >&2
    exit 1
fi
echo "$python"
