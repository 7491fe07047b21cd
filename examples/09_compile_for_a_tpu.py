"""Prints the bytes of a round on a TPU that is not there. Needs libtpu: pip install 'jax[tpu]'."""

import jax_bridge as jb
import torch_dflash as td

target, drafter, _ = td.load_demo_pair(progress=False)
for rows in (1, 16):
    pair = jb.aot.abstract_pair(target.config, drafter.config, capacity=2048, batch_size=rows)
    compiled = jb.aot.compile_round(pair, topology="v5p:2x2x1")
    moved = {context: compiled.traffic_at(context) / 1e9 for context in (128, 2048)}
    print(
        f"{rows} rows: compiled in {compiled.compile_seconds:.0f} s; {compiled.hbm_bytes / 1e9:.2f} GB of HBM"
    )
    print("   a round moves", ", ".join(f"{gb:.3f} GB at {n} tokens" for n, gb in moved.items()))
