#!/bin/sh
# vLLM for TPU on a CPU, as `make test-vllm` needs it: sh make/vllm/install.sh FOLDER. Four minutes, 4 GB.
set -e
folder=$1
python=$(sh make/vllm/python.sh)
export UV_LINK_MODE=copy
python3 -m venv "$folder/uv"
"$folder/uv/bin/pip" --disable-pip-version-check install --quiet uv
uv="$folder/uv/bin/uv"
"$uv" venv --quiet --clear --python "$python" "$folder/env"
"$uv" pip install --quiet --python "$folder/env" --no-deps -r make/vllm/pinned.txt
"$uv" pip install --quiet --python "$folder/env" -r make/vllm/more.txt
"$folder/env/bin/python" make/vllm/stubs.py "$folder/stubs"
# The documented command, which must move no version.
"$uv" pip freeze --quiet --python "$folder/env" > "$folder/before.txt"
"$uv" pip install --quiet --python "$folder/env" --no-deps -e .
"$uv" pip freeze --quiet --python "$folder/env" --exclude-editable > "$folder/after.txt"
cmp "$folder/before.txt" "$folder/after.txt"
