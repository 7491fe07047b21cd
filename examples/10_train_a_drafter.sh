#!/usr/bin/env bash
# A drafter for your model, from prompts to figures. Run it again after any interruption: each stage goes on.
#
#   examples/10_train_a_drafter.sh TARGET MASK_TOKEN_ID OUT [DEVICE [PROMPTS [small]]]
#
# TARGET: directory, hub id or demo. MASK_TOKEN_ID: an id that no text holds (docs/training.md). DEVICE: cuda
# (default) or cpu. PROMPTS: how many of data/train/prompts to answer (default: all). small: tiny settings.
set -euo pipefail
target=$1 mask=$2 out=$3 device=${4:-cuda} prompts=${5:-1000000} size=${6:-full}
here=$(cd "$(dirname "$0")/.." && pwd)
answering="--max-new-tokens 512 --batch-size 128 --shard-size 512"
# The paper's recipe, but for D-PACE.
fitting="--layers 5 --block-size 16 --epochs 6 --batch-size 8 --anchors 128 --learning-rate 6e-4 --held-out 64"
judging="--batch-size 16"
if [ "$size" = small ]; then
    answering="--max-new-tokens 48 --batch-size 8 --shard-size 8"
    fitting="--layers 1 --block-size 8 --epochs 2 --batch-size 2 --anchors 8 --learning-rate 1e-3 --held-out 4"
    fitting="$fitting --sampled-vocabulary 1024"
    judging="--batch-size 4 --limit 4 --max-new-tokens 24"
fi

# Greedy answers; the target stays in the loop of the fit (--online), so there are no features on disk. The
# eager runtime is for CUDA; on a TPU leave out --runtime and --device.
torch-dflash train all --target "$target" --target-dtype bfloat16 --device "$device" --out "$out" --online \
    --prompts "$here"/data/train/prompts/*.jsonl.gz --eval-prompts "$here"/data/eval/*.jsonl \
    --regenerate="--runtime eager $answering --limit $prompts" \
    --fit="--mask-token-id $mask --max-length 1024 --weighting dpace --mixed-precision bf16 $fitting" \
    --evaluate="--runtime eager $judging"
