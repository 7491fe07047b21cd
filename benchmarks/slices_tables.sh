#!/usr/bin/env bash
# The figures of docs/slices.md: which slice a whole pair needs, from libtpu and from shapes. An hour on two cores.
# From the repository's root:  PYTHONPATH=.venv/libtpu PATH=.venv/bin:$PATH benchmarks/slices_tables.sh
# A figure whose JSON exists is not made again.
set -euo pipefail
configs=benchmarks/configs results=docs/results/slices
mkdir -p "$results"

figure() { # pair, topology, chips of it
    local out="$results/$1.json"
    [[ -e "$out" ]] || torch-dflash fit-memory --target "$configs/$1" --drafter "$configs/$1-dflash" \
        --topology "$2" --mesh "$3" --cache paged --matmul-precision default --context 8192 --largest --json "$out"
}

figure qwen3-4b v5e:2x2 1
figure qwen3-8b v5e:2x2 4
figure llama-3.1-8b v5e:2x2 4
figure qwen3-32b v5e:2x4 8
figure llama-3.3-70b v5e:4x4 16
figure qwen3-coder-30b-a3b v5e:2x4 8
figure gpt-oss-20b v5e:2x2 4
figure gpt-oss-120b v5e:4x8 32
