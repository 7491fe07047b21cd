#!/usr/bin/env bash
# The figures of docs/slices.md: which slice a whole pair needs, by fit-memory. Minutes on two cores.
# From the repository's root:  PYTHONPATH=.venv/libtpu PATH=.venv/bin:$PATH benchmarks/slices_tables.sh
# A figure whose JSON exists is not made again.
set -euo pipefail
configs=benchmarks/configs results=docs/results/slices
mkdir -p "$results"

figure() { # pair, topology, chips of it, options of torch-dflash fit-memory
    local out="$results/$1.json" pair="$1" topology="$2" chips="$3"
    shift 3
    [[ -e "$out" ]] || torch-dflash fit-memory --target "$configs/$pair" --drafter "$configs/$pair-dflash" \
        --topology "$topology" --mesh "$chips" --cache paged --matmul-precision default --context 8192 --largest none "$@" \
        --json "$out"
}

figure qwen3-4b v5e:2x2 1
figure qwen3-8b v5e:2x2 4
figure llama-3.1-8b v5e:2x2 4
figure qwen3-32b v5e:2x4 8
figure llama-3.3-70b v5e:4x4 16
figure qwen3-coder-30b-a3b v5e:2x4 8
figure gpt-oss-20b v5e:2x2 4
figure gpt-oss-120b v5e:4x8 32

results=docs/results/slices_in_codes
mkdir -p "$results"
coded() { # pair, topology, chips of it, form
    local out="$results/$1-$4.json" drafter="$configs/$1-dflash"
    [[ -e "$drafter" ]] || drafter=none
    [[ -e "$out" ]] || torch-dflash fit-memory --target "$configs/$1" --drafter "$drafter" --topology "$2" --mesh "$3" \
        --quantize "$4" --cache paged --matmul-precision default --context 8192 --largest none --json "$out"
}

coded gpt-oss-120b v6e:2x2 4 mxfp4
coded minimax-m2.5 v6e:2x4 8 fp8
coded qwen3.5-27b v6e:2x2 1 int8
coded qwen3-32b v6e:2x2 4 fp8
