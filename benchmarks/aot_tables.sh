#!/usr/bin/env bash
# The figures of docs/tpu.md: what libtpu compiles for chips that are not here. An hour on two cores.
# From the repository's root:  PYTHONPATH=.venv/libtpu PATH=.venv/bin:$PATH benchmarks/aot_tables.sh
# A figure whose JSON exists is not made again.
set -euo pipefail
configs=benchmarks/configs results=docs/results/aot
mkdir -p "$results"

figure() { # name, pair, options of torch-dflash aot
    local out="$results/$1.json" pair="$2"
    shift 2
    [[ -e "$out" ]] || torch-dflash aot --target "$configs/$pair" --drafter "$configs/$pair-dflash" "$@" --json "$out"
}

for cache in paged static; do
    figure "qwen3-4b-$cache-16" qwen3-4b --cache "$cache"
    figure "qwen3-4b-$cache-64" qwen3-4b --cache "$cache" --block 64 --verify 64
    figure "qwen3-4b-$cache-1" qwen3-4b --cache "$cache" --verify 1 --passes verify
done
figure qwen3-8b-paged-16 qwen3-8b --cache paged
figure llama-3.1-8b-paged-10 llama-3.1-8b --cache paged
figure qwen3-coder-30b-a3b-paged-16 qwen3-coder-30b-a3b --cache paged
figure gpt-oss-20b-paged-8 gpt-oss-20b --cache paged
figure qwen3-4b-paged-16-v5e qwen3-4b --cache paged --topology v5e:2x2
figure qwen3-4b-paged-16-v6e qwen3-4b --cache paged --topology v6e:2x2
mkdir -p docs/results/kflat
for pair in qwen3-4b qwen3-coder-30b-a3b; do
    results=docs/results/kflat figure "$pair" "$pair" --kflat
done
results=docs/results/kflat figure gpt-oss-20b gpt-oss-20b --kflat
results=docs/results/kflat figure gpt-oss-20b-mxfp4 gpt-oss-20b --kflat --quantize mxfp4
results=docs/results/kflat figure qwen3-4b-int8 qwen3-4b --kflat --quantize int8
results=docs/results/kflat figure qwen3-32b-fp8 qwen3-32b --kflat --quantize fp8
second=(--cache paged --drafter "$configs/qwen3-4b-dflash2")
figure qwen3-4b-dflash2-paged-16 qwen3-4b "${second[@]}"
figure qwen3-4b-dflash2-paged-16-v5e qwen3-4b "${second[@]}" --topology v5e:2x2
figure qwen3-4b-dflash2-paged-16-v6e qwen3-4b "${second[@]}" --topology v6e:2x2
hybrid=(qwen3.5-4b --cache paged)
figure qwen3.5-4b-paged-16 "${hybrid[@]}"
figure qwen3.5-4b-paged-16-v5e "${hybrid[@]}" --topology v5e:2x2
figure qwen3.5-4b-paged-16-v6e "${hybrid[@]}" --topology v6e:2x2
eight=(--cache paged --drafter ngram --block 16 --layers 8 --passes verify --passes round)
figure qwen3.5-35b-a3b-8-layers-paged-16 qwen3.5-35b-a3b "${eight[@]}"
figure qwen3-next-80b-a3b-8-layers-paged-16 qwen3-next-80b-a3b "${eight[@]}"
figure qwen3.5-27b-8-layers-paged-16 qwen3.5-27b "${eight[@]}"
results=docs/results/slices_hybrids
mkdir -p "$results"
figure qwen3.5-27b qwen3.5-27b "${eight[@]}" --topology v6e:2x2 --mesh 4
figure qwen3.5-35b-a3b qwen3.5-35b-a3b "${eight[@]}" --topology v6e:2x2 --mesh 4
figure qwen3-next-80b-a3b qwen3-next-80b-a3b "${eight[@]}" --topology v6e:2x4 --mesh 8
# GLM-5.2 and DeepSeek-V3 with 16 of their 256 experts: the first layers, with every kind among them.
latent=(--cache paged --drafter ngram --block 16 --passes verify --passes round)
glm=(glm-5.2-16-experts "${latent[@]}" --layers 6) name=glm-5.2-16-experts-6-layers
for chip in v5p:2x2x1 v6e:2x2 v5e:2x2; do
    results=docs/results/aot figure "$name-paged-16-${chip%%:*}" "${glm[@]}" --topology "$chip"
    results=docs/results/aot figure "$name-32k-paged-16-${chip%%:*}" "${glm[@]}" --topology "$chip" --context 32768
done
results=docs/results/slices_latents
mkdir -p "$results"
figure "$name" "${glm[@]}" --topology v5p:2x2x1 --mesh 4
figure "$name-32k" "${glm[@]}" --topology v5p:2x2x1 --mesh 4 --context 32768
deep=(deepseek-v3-16-experts "${latent[@]}" --layers 4)
figure deepseek-v3-16-experts-4-layers "${deep[@]}" --topology v5p:2x2x1 --mesh 4
figure deepseek-v3-16-experts-4-layers-32k "${deep[@]}" --topology v5p:2x2x1 --mesh 4 --context 32768
figure kimi-k2.5-16-experts-2-layers kimi-k2.5-16-experts "${latent[@]}" --layers 2 --topology v6e:2x4 --mesh 8
for rows in 1 4; do
    for pair in qwen3-coder-30b-a3b qwen3.5-35b-a3b qwen3-next-80b-a3b; do
        results=docs/results/aot figure "$pair-8-layers-paged-$rows" "$pair" --cache paged --drafter ngram --block 16 \
            --layers 8 --verify "$rows" --passes verify
    done
done
results=docs/results/quantised
mkdir -p "$results"
figure qwen3-4b-int8-paged-16 qwen3-4b --cache paged --quantize int8
figure qwen3-4b-int8-paged-16-v6e qwen3-4b --cache paged --quantize int8 --topology v6e:2x2
figure qwen3-4b-int8-paged-16-v5e qwen3-4b --cache paged --quantize int8 --topology v5e:2x2
figure qwen3-32b-fp8-paged-16 qwen3-32b --cache paged --quantize fp8
figure qwen3-32b-fp8-8-layers-paged-16-v6e qwen3-32b --cache paged --quantize fp8 --topology v6e:2x2 --layers 8
figure qwen3-4b-int8-paged-16-v5p-4 qwen3-4b --cache paged --quantize int8 --mesh 4
figure qwen3-4b-int8-paged-16-v6e-4 qwen3-4b --cache paged --quantize int8 --topology v6e:2x2 --mesh 4
figure gpt-oss-20b-mxfp4-paged-8 gpt-oss-20b --cache paged --quantize mxfp4
figure gpt-oss-20b-mxfp4-paged-8-v6e gpt-oss-20b --cache paged --quantize mxfp4 --topology v6e:2x2
figure gpt-oss-20b-mxfp4-paged-8-v5e gpt-oss-20b --cache paged --quantize mxfp4 --topology v5e:2x2
# Kimi-K2.5's widths with 16 of its 384 experts, one dense layer and one of experts; beside it the same in bfloat16.
cut=(kimi-k2.5-16-experts --cache paged --drafter ngram --block 16 --layers 2 --passes verify --passes round)
name=kimi-k2.5-16-experts-2-layers
figure "$name-int4-paged-16" "${cut[@]}" --quantize int4
figure "$name-int4-paged-16-v6e" "${cut[@]}" --quantize int4 --topology v6e:2x2
results=docs/results/quantised/bfloat16
mkdir -p "$results"
figure qwen3-4b-paged-16-v5p-4 qwen3-4b --cache paged --mesh 4
figure qwen3-4b-paged-16-v6e-4 qwen3-4b --cache paged --topology v6e:2x2 --mesh 4
results=docs/results/aot
figure "$name-paged-16" "${cut[@]}"
figure "$name-paged-16-v6e" "${cut[@]}" --topology v6e:2x2
