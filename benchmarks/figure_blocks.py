"""The blocks that `figures.py` writes between the markers of a page: a function for each, from its JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from family_tables import counts, tables, verdict
from figure_compare import (
    compare_bundled,
    compare_bytes,
    compare_checks,
    compare_dollars,
    compare_error,
    compare_fit_title,
    compare_fits,
    compare_law,
    compare_methods,
    compare_tau,
    compare_walls,
)
from figure_cpu import (
    cpu_distance,
    cpu_first_token,
    cpu_products,
    cpu_steps,
    draft_ids,
    int8_quality,
    latents_cpu,
    serve_cpu,
    slots_cpu,
)
from figure_demo import (
    demo,
    demo_chat,
    demo_forms,
    demo_line,
    demo_speeds,
    demo_time,
    demo_types,
    demo_unions,
)
from figure_hybrids import cached_forwards
from figure_kflat import kflat_bound, kflat_codes, kflat_rows, kflat_speed
from figure_published import published
from figure_slices import slices_aot, slices_hybrids, slices_needed
from figure_text import RESULTS, command, item, result, spread, table
from figure_train import embedded_fit, sampled_drafts, throughput, train_heads, train_heads_command
from figure_trees import tree_rows

from torch_dflash.published.rows import share
from torch_dflash.train.export import acceptance_table

STEPS = {
    "dflash round": "round of the demo pair, 8 rows",
    "dflash prompt": "its prompt of 25 tokens",
    "plain round": "step of plain decoding, 1 row",
    "plain prompt": "its prompt of 25 tokens, plain",
}
SCANS = {
    "unrolled": "unrolled, static caches",
    "scanned": "`lax.scan`, static caches in and out",
    "carried": "`lax.scan` that carries the stacked static caches",
    "paged_unrolled": "unrolled, pools of pages",
    "paged_sliced": "`lax.scan` that carries stacked pools, sliced for the kernel",
    "paged_flat": "`lax.scan` that carries one pool of all layers' pages",
}
VERSIONED = "torch", "jax", "torchax", "transformers"
ANSWERS = {
    "empty": "the first, no compiled program on disk",
    "full": "the first, with those of another process",
    "second": "the second",
}


def quickstart() -> str:
    """The output of the README's first block of Python, in a longer fence than an answer's code."""
    lines = result("quickstart_cpu")["output"].splitlines()
    return "\n".join(["````text", *(line.rstrip() for line in lines), "````"])


def commands(name: str) -> str:
    """The commands that made the acceptance lengths of a JSON."""
    sets = result(name)["sets"].values()
    return "\n\n".join(command(one) for one in dict.fromkeys(row["provenance"]["command"] for row in sets))


def hf_calls() -> str:
    """The outcome of each way to call transformers' ``generate``."""
    calls = result("hf_calls")["calls"]
    heads = ["call", *next(iter(calls.values()))]
    cells = ([name, *(said.replace("|", "\\|") for said in doors.values())] for name, doors in calls.items())
    return table(heads, *cells)


def hf_counts() -> str:
    """The numbers of calls of transformers' ``generate`` with the same text, and of refused calls."""
    calls = result("hf_calls")["calls"]
    says = Counter(doors["td.generate"].partition(":")[0] for doors in calls.values())
    through = Counter(doors["target.generate"].partition(":")[0] for doors in calls.values())
    same, sampled, refused = "same text", "runs, and by its seed again", "refused"
    rest = len(calls) - says[same] - says[sampled] - says[refused]
    assert rest == says["transformers' text of padding to the left"]
    return (
        f"Of {len(calls)} calls `td.generate` gives {says[same]} the same text, samples {says[sampled]}, "
        f"refuses {says[refused]} by name, and reads {rest} as padded to the left. `target.generate` gives "
        f"{through[same]} the same text and refuses {through[refused]}"
    )


def acceptance_control() -> str:
    """The acceptance length with another prompt's features."""
    return f"{result('acceptance_shuffled_cpu')['sets']['gsm8k']['acceptance_length']:.2f}"


def versions() -> str:
    """The sets of versions that the tests passed with."""
    rows = []
    for path in sorted(RESULTS.glob("versions_*.json")):
        found = result(path.stem)
        names = [found["versions"][name] for name in VERSIONED]
        lacks = ", ".join(found["not_run"])
        rows.append([found["provenance"]["python"], *names, sum(found["passed"].values()), lacks])
    return table(["Python", *VERSIONED, "tests passed", "folders of tests that were not run"], *rows)


def families_counts() -> str:
    """The number of families that decode to transformers' own text."""
    found = result("families")
    counts = Counter(verdict(one) for one in found["families"].values())
    version = found["provenance"]["packages"]["transformers"].rpartition(".")[0]
    rest = len(found["families"]) - counts["equal"] - counts["refused"]
    return (
        f"Of {len(found['families'])} tiny random models of transformers {version}'s causal LM classes, "
        f"{counts['equal']} decode to transformers' own text, {counts['refused']} are refused by name, and "
        f"{rest} do not run in transformers itself"
    )


def aot() -> str:
    """Bytes of the published pairs' passes, from the TPU compiler."""
    head = ["figures"]
    head += [cell for step in ("verify", "draft", "round") for cell in (f"{step} GB", "of its floor")]
    rows = []
    for path in sorted((RESULTS / "aot").glob("*.json")):
        found, cells = json.loads(path.read_text()), [f"[{path.stem}](../results/aot/{path.name})"]
        for step in ("verify", "draft", "round"):
            moved, floor = found[f"{step}_hbm_bytes"], found[f"{step}_floor_bytes"]
            cells += ["", ""] if moved is None else [f"{moved / 1e9:.2f}", f"{moved / floor:.3f}"]
        rows.append([*cells, f"{found['roofline_ms']:.2f}"])
    return table([*head, "roofline ms"], *rows)


def aot_rounds() -> str:
    """Bytes of a round on a v5p: the published pairs that were compiled whole, on pages."""
    rows = []
    for path in sorted((RESULTS / "aot").glob("*-paged-[0-9]*.json")):
        found = json.loads(path.read_text())
        moved, whole = found["round_hbm_bytes"], "-layers-" not in path.stem
        if whole and moved is not None and found["topology"].startswith("v5p"):
            pair, _, count = path.stem.rpartition("-paged-")
            ratio = moved / found["round_floor_bytes"]
            rows.append([pair, count, f"{moved / 1e9:.2f}", f"{ratio:.3f}", f"{found['roofline_ms']:.2f}"])
    return table(["pair", "rows", "round GB", "of its floor", "roofline ms"], *rows)


def aot_flatness() -> str:
    """Bytes of verifying 64 rows, against one."""
    paged, static = (
        result(f"aot/qwen3-4b-{cache}-64")["verify_hbm_bytes"]
        / result(f"aot/qwen3-4b-{cache}-1")["verify_hbm_bytes"]
        for cache in ("paged", "static")
    )
    return item(
        f"Verifying 64 rows instead of one moves {paged:.2f} times the bytes on pages, {static:.2f} times ",
        "on the static cache.",
    )


def aot_context() -> str:
    """Bytes of a round with a few tokens in a large static cache."""
    found = result("context_aot")
    lines = {line["context"]: line for line in found["results"]}
    short, whole = lines[160], lines[found["capacity"]]
    return item(
        f"A static cache costs what its context is: with room for {found['capacity']:,} tokens a round ",
        f"moves {short['hbm_bytes'] / 1e9:.2f} GB at 160 tokens and {whole['hbm_bytes'] / 1e9:.2f} GB when ",
        f"it is full, {short['ratio']:.3f} and {whole['ratio']:.3f} of the floor ",
        "([figures](results/context_aot.json), `benchmarks/context_aot.py`).",
    )


def aot_ragged() -> str:
    """The paged kernel against jax's own."""
    lines = result("ragged_aot")["results"]
    ratio = {(line["kernel"], line["rows"]): f"{line['ratio']:.3f}" for line in lines}
    theirs, ours = (
        [ratio[kernel, rows] for rows in (16, 64)]
        for kernel in ("jax ragged_paged_attention", "paged_attention")
    )
    return item(
        "jax's own `ragged_paged_attention` in the place of our kernel, which also writes the new rows, in ",
        f"a verify pass of four layers: {theirs[0]} and {theirs[1]} of the floor at 16 and 64 rows, ours ",
        f"{ours[0]} and {ours[1]} ([figures](results/ragged_aot.json), ",
        "`benchmarks/ragged_aot.py --layers 4`).",
    )


def aot_chunk() -> str:
    """Bytes of a prompt chunk."""
    found = result("prefill_aot")
    lines = {(line["cache"], line["topology"][:3]): line for line in found["results"]}
    rows, layers = ({line[name] for line in found["results"]} for name in ("rows", "layers"))
    assert (rows, layers, found["context"]) == ({512}, {4}, 4096)
    paged, static = (
        [f"{lines[cache, chip]['ratio']:.3f}" for chip in ("v5p", "v5e", "v6e")]
        for cache in ("paged", "static")
    )
    v5p = lines["paged", "v5p"]
    return item(
        "A prompt chunk of 512 rows that ends at 4,096 tokens, four layers: on pages ",
        f"{paged[0]} of its floor on v5p, {paged[1]} on v5e and {paged[2]} on v6e, on the static cache ",
        f"{static[0]}, {static[1]} and {static[2]} ([figures](results/prefill_aot.json), ",
        "`benchmarks/prefill_aot.py`). v5p, with half of their VMEM, writes more activations out, but the ",
        f"chunk's FLOPs take it longer ({v5p['flop_ms']:.2f} ms) than its bytes ({v5p['memory_ms']:.2f} ms).",
    )


def exchanged(rounds: list[dict[str, Any]]) -> str:
    """A sentence: no round with a tree has more collectives than one with a chain, if that is true."""
    pairs = zip(rounds[::2], rounds[1::2], strict=True)
    more = [
        kind
        for chain, tree in pairs
        for kind, count in tree["collectives"].items()
        if count > chain["collectives"].get(kind, 0)
    ]
    assert not more, more
    return ", and no collective more"


def aot_trees() -> str:
    """Rounds with trees against rounds with chains of as many rows."""
    found, slices = result("trees_aot"), result("trees_slices_aot")
    alone, sliced = (
        ", ".join(
            f"{one['ratio']:.3f} ({one['rows']} rows, {one['topology'].partition(':')[0]})"
            for one in made["rounds"]
            if one["draft"] == "tree"
        )
        for made in (found, slices)
    )
    return item(
        "A round with a [tree](proposers.md#trees) beside one with a chain of as many rows, on pages at ",
        f"{found['context']:,} tokens, Qwen3-4B: {alone} ",
        "times the bytes. A chain of 64 rows drafts 64, a tree the drafter's 16. Every buffer is updated in ",
        "place, and there is no scatter ([figures](results/trees_aot.json), `benchmarks/trees_aot.py`). On ",
        f"four chips, {slices['layers']} layers: {sliced}{exchanged(slices['rounds'])} ",
        "([figures](results/trees_slices_aot.json), `benchmarks/trees_aot.py --layers 5 --chips 4`).",
    )


def quantised_aot() -> str:
    """Rounds with weights in 8 and 4 bits, against bfloat16's on the same chip."""
    rows = []
    for path in sorted((RESULTS / "quantised").glob("*.json")):
        found, (pair, _, count) = json.loads(path.read_text()), path.stem.rpartition("-paged-")
        count, _, other = count.partition("-")
        chips = found["chips"]
        wide = RESULTS / ("aot" if chips == 1 else "quantised/bfloat16")
        wide /= f"{pair.removesuffix('-' + found['quantize'])}-paged-{count}{'-' * bool(other)}{other}.json"
        than = json.loads(wide.read_text()) if wide.exists() else None
        held = [each and each["argument_bytes"] - each["aliased_bytes"] for each in (found, than)]
        moved = [each and each["round_hbm_bytes"] for each in (found, than)]
        chip = found["topology"].partition(":")[0] + (f", one of {chips}" if chips > 1 else "")
        cells = [f"[{pair}](results/quantised/{path.name})", count, chip]
        for own, whole in (held, moved):
            cells += [f"{own / 1e9:.2f}", f"{own / whole:.3f}" if whole else ""]
        cells += [f"{found['round_hbm_bytes'] / found['round_floor_bytes']:.3f}"]
        rows.append([*cells, f"{found['peak_temp_bytes'] / 1e6:.0f}", f"{found['roofline_ms']:.2f}"])
    head = [
        "pair",
        "rows",
        "chip",
        "weights GB",
        "of bfloat16's",
        "round GB",
        "of bfloat16's",
        "of its floor",
    ]
    return table([*head, "temporary MB", "roofline ms"], *rows)


GLM = "GLM-5.2"


def latents_aot() -> str:
    """Bytes of latent attention over their floor, by model, context and chip."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for one in result("latents_aot")["attention"]:
        chip = one["topology"].partition(":")[0]
        found.setdefault((one["model"], one["context"]), {})[chip] = f"{one['of_floor']:.2f}"
    chips = sorted({chip for one in found.values() for chip in one}, reverse=True)
    rows = [[name, f"{at:,}", *(one.get(chip, "") for chip in chips)] for (name, at), one in found.items()]
    return table(["16 rows", "context", *chips], *rows)


def index_aot() -> str:
    """The MB that GLM-5.2's indexer, its top-k and the marks move: layers with them less those without."""
    found = result("latents_aot")["attention"]
    moved = {(one["model"], one["context"], one["topology"]): one["hbm_bytes"] for one in found}
    own = [one for one in found if one["model"] == GLM]
    costs: dict[int, list[str]] = {}
    for one in own:
        at, chip = one["context"], one["topology"]
        cost = (one["hbm_bytes"] - moved[f"{GLM} without its indexer", at, chip]) / 1e6
        costs.setdefault(at, []).append(f"{cost:.1f} on {chip.partition(':')[0]}")
    contexts = "; ".join(f"behind {at:,} positions {', '.join(each)}" for at, each in costs.items())
    kept = any(one["scores_kept"] for one in own)
    scores = max(one["score_bytes"] for one in own) / 1e6
    return (
        f"{contexts}; the scores of all index heads ({scores:.0f} MB in float32 behind {max(costs):,}) "
        f"{'reach HBM on some chip' if kept else 'stay on the chip'}"
    )


def aot_experts() -> str:
    """Bytes of experts, by implementation."""
    found = result("experts_aot")
    verify = {line["experts"]: f"{line['ratio']:.3f}" for line in found["verify"] if line["rows"] == 16}
    ragged = {line["stored"]: f"{line['ratio']:.3f}" for line in found["ragged_dot"] if line["rows"] == 16}
    return item(
        "Experts: those that rows hit are read once and applied to all rows, without a copy, by one Pallas ",
        "call that fetches the next one while one is multiplied; those with biases or stacks [in, out] ",
        "(gpt-oss) by a loop, which fetches nothing ahead. Those count that are expected if every choice is ",
        "as likely. With transformers' `batched_mm` XLA gathers `[rows x k, ...]` copies of expert weights ",
        "in HBM: two layers of Qwen3-Coder-30B-A3B at 16 ",
        f"rows move {verify['batched_mm']} times their floor so, {verify['static_experts']} with ours. ",
        "`ragged_dot` becomes a kernel that reads experts once if they are stored [experts, in, out] ",
        f"({ragged['[experts, in, out]']}), but copies them all first from transformers' ",
        f"[experts, out, in] ({ragged['[experts, out, in]']}) ([figures](results/experts_aot.json), ",
        "`benchmarks/experts_aot.py`).",
    )


def weight_layout() -> str:
    """Steps with weights as torch keeps them, and transposed."""
    rows = [[STEPS[one["step"]], *spread(one)] for one in result("weight_layout_cpu")["steps"]]
    return table(["float32 on two EPYC cores", "ratio", "quartiles"], *rows)


def weight_layout_products() -> str:
    """Single products in both layouts."""
    products = [one for one in result("weight_layout_cpu")["products"] if one["dtype"] == "float32"]
    many = [one["ratio"] for one in products if one["rows"] > 1]
    *usual, odd = sorted((one for one in products if one["rows"] == 1), key=lambda one: one["ratio"])
    return item(
        f"Single products: {min(many):.2f} to {max(many):.2f} at 2 to 16 rows, and {usual[0]['ratio']:.2f} ",
        f"to {usual[-1]['ratio']:.2f} at one row (but {odd['ratio']:.2f} for one shape, ",
        f"{odd['in']} x {odd['out']}).",
    )


def scan_aot() -> str:
    """Layers scanned and unrolled, from the TPU compiler."""
    rows = [
        [
            SCANS[name],
            one["compile_seconds"],
            f"{one['hbm_bytes'] / 1e9:.3f}",
            f"{one['ratio']:.3f}",
            f"{one['peak_temp_bytes'] / 1e6:.1f}",
        ]
        for name, one in result("scan_aot")["forms"].items()
    ]
    return table(["form", "compile s", "GB", "of its floor", "MB of temporaries"], *rows)


def scan_cpu() -> str:
    """The same on a CPU."""
    rows = [[one["rows"], *spread(one)] for one in result("scan_cpu")["steps"]]
    return table(["rows", "ratio", "quartiles"], *rows)


def first_answer() -> str:
    """The times of a process's first and second answers."""
    found = result("first_answer_cpu")
    return table(
        ["call of a process", "s"], *([row, f"{found[name]['median']:.1f}"] for name, row in ANSWERS.items())
    )


def first_call() -> str:
    """The time of a first call, in a sentence."""
    found = result("first_answer_cpu")
    empty, full, second = (f"{found[name]['median']:.1f} s" for name in ("empty", "full", "second"))
    return (
        f"A process's first answer took {empty}, {full} with its programs in the cache on disk, and a second "
        f"call {second}"
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "quickstart": quickstart,
    "demo": demo,
    "versions": versions,
    "demo-time": demo_time,
    "demo-line": demo_line,
    "demo-speeds": demo_speeds,
    "demo-types": demo_types,
    "demo-unions": demo_unions,
    "demo-forms": demo_forms,
    "demo-chat": demo_chat,
    "demo-int8": lambda: demo("demo_cpu_int8"),
    "demo-avx2": lambda: demo("demo_cpu_avx2"),
    "demo-vnni": lambda: demo("demo_cpu_vnni"),
    "demo-vnni-int8": lambda: demo("demo_cpu_vnni_int8"),
    "demo-xeon": lambda: demo("demo_cpu_xeon"),
    "demo-xeon-int8": lambda: demo("demo_cpu_xeon_int8"),
    "acceptance": lambda: acceptance_table(result("acceptance_cpu")["sets"]),
    "acceptance-commands": lambda: commands("acceptance_cpu"),
    "control-commands": lambda: commands("acceptance_shuffled_cpu"),
    "acceptance-control": acceptance_control,
    "families": lambda: tables(result("families")["families"]),
    "families-counts": families_counts,
    "multimodal-counts": lambda: counts(result("multimodal")["families"]),
    "multimodal": lambda: tables(result("multimodal")["families"]),
    "cached-forwards": cached_forwards,
    "aot": aot,
    "aot-rounds": aot_rounds,
    "quantised-aot": quantised_aot,
    "latents-aot": latents_aot,
    "index-aot": index_aot,
    "aot-notes": lambda: "\n".join(
        [aot_flatness(), aot_context(), aot_ragged(), aot_chunk(), aot_experts(), aot_trees()]
    ),
    "throughput": throughput,
    "embedded-fit": embedded_fit,
    "train-heads": train_heads,
    "train-heads-command": train_heads_command,
    "sampled-drafts": sampled_drafts,
    "tree-rows": tree_rows,
    "kflat-bound": kflat_bound,
    "kflat-codes": kflat_codes,
    "kflat-rows": kflat_rows,
    "kflat-speed": kflat_speed,
    "published": published,
    "published-counts": lambda: str(share()),
    "hf-calls": hf_calls,
    "hf-counts": hf_counts,
    "cpu-distance": cpu_distance,
    "draft-ids": draft_ids,
    "slots-cpu": slots_cpu,
    "serve-cpu": serve_cpu,
    "int8-quality": int8_quality,
    "latents-cpu": latents_cpu,
    "cpu-products": cpu_products,
    "cpu-steps": cpu_steps,
    "cpu-first-token": cpu_first_token,
    "cpu-first-token-vnni": lambda: cpu_first_token("cpu_steps_vnni"),
    "weight-layout": weight_layout,
    "weight-layout-products": weight_layout_products,
    "scan-aot": scan_aot,
    "scan-cpu": scan_cpu,
    "first-answer": first_answer,
    "first-call": first_call,
    "slices-aot": slices_aot,
    "slices-hybrids": slices_hybrids,
    "slices-needed": slices_needed,
    "slices-in-codes": lambda: slices_needed("slices_in_codes"),
    "compare-tau": compare_tau,
    "compare-error": compare_error,
    "compare-checks": compare_checks,
    "compare-law": compare_law,
    "compare-walls": compare_walls,
    "compare-bytes": compare_bytes,
    "compare-dollars": compare_dollars,
    "compare-methods": compare_methods,
    "compare-fit-title": compare_fit_title,
    "compare-fits": compare_fits,
    "compare-bundled": compare_bundled,
}
