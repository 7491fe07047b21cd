"""The blocks of `figure_blocks.py` about products and steps on a CPU."""

from __future__ import annotations

from figure_text import result, table


def cpu_products() -> str:
    """One pass's products by type and layout, and what reading the weights takes, on three CPUs."""
    names = "cpu_products", "cpu_products_xeon", "cpu_products_avx2"
    return "\n\n".join(_products(result(name)) for name in names)


def _products(found: dict) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for one in found["products"]:
        rows.setdefault((one["form"], one["layout"]), []).append(f"{one['fastest_ms']:.1f}")
    counts = sorted({one["rows"] for one in found["products"]})
    head = ["type", "layout", *(f"{count} rows" if count > 1 else "1 row" for count in counts)]
    name = found["provenance"]["hardware"].removeprefix("CPU: ")
    said = f"On {name}, whose memory this process reads at {found['read_gb_per_s']:.0f} GB/s."
    return table(head, *([*key, *cells] for key, cells in rows.items())) + f"\n\n{said}"


def cpu_steps() -> str:
    """Steps and rounds by type and capacity, against transformers."""
    rows = []
    for one in result("cpu_steps")["rows"]:
        if "token_ms" in one:
            size = f"{one['size']:,}" if one["size"] else ""
            round_ms = f"{one['round_ms']:.1f}" if "round_ms" in one else ""
            rows.append([one["dtype"], one["method"], size, round_ms, f"{one['token_ms']:.1f}"])
    return table(["type", "method", "`max_length`", "step or round", "token"], *rows)


def cpu_first_token(name: str = "cpu_steps") -> str:
    """Time to the first token by length of the prompt."""
    cells: dict[tuple[str, str], list[str]] = {}
    sizes = []
    for one in result(name)["rows"]:
        if "first token" in one["method"]:
            whose = "transformers" if "transformers" in one["method"] else "torch-dflash"
            cells.setdefault((one["dtype"], whose), []).append(f"{one['first_token_ms']:.0f}")
            sizes += [one["size"]] if one["size"] not in sizes else []
    head = ["type", "by", *(f"{size:,} tokens" for size in sizes)]
    return table(head, *([*key, *values] for key, values in cells.items()))


def draft_ids() -> str:
    """The share of answers that a draft vocabulary of each size covers."""
    found = result("draft_ids")
    rows = [
        [f"{one['ids']:,}", f"{100 * one['covered']:.1f} %", f"{100 * one['covered held out']:.1f} %"]
        for one in found["rows"]
    ]
    head = [f"ids of {found['vocabulary']:,}", "of the same answers", "of other answers"]
    return table(head, *rows)


def slots_cpu() -> str:
    """Slots against closed batches: rounds, seconds and CPU seconds by mix."""
    found = result("slots_cpu")
    rows = [
        [
            name,
            f"{one['closed']['rounds']:.0f} -> {one['slots']['rounds']:.0f} ({one['rounds_ratio']:.2f})",
            f"{one['speedup']:.2f}",
            f"{one['cpu_speedup']:.2f}",
            f"{one['equal_texts']} of 32",
        ]
        for name, one in found["mixes"].items()
    ]
    ratios = " and ".join(
        f"{found[f'prompt of one row, {name}']['ratio']:.2f}" for name in ("plain", "dflash")
    )
    host = found["host_milliseconds_a_chunk"]
    return table(
        ["method, mix", "rounds closed -> slots", "speed-up", "in CPU seconds", "equal texts"], *rows
    ) + (
        f"\n\nOne prompt beside seven rows takes {ratios} of the batch's program (plain, DFlash). The "
        f"loop's own Python takes {host:.1f} ms a chunk of 16 rows, calls of the runtime left out."
    )


def serve_cpu() -> str:
    """The server by its clients, with the drafter and without; what is compiled in costs."""
    rows = []
    for found in (result("serve_one_cpu"), result("serve_cpu")):
        runs, shape = found["runs"], found["shape"]
        for name, one in runs.items():
            way, _, clients = name.partition(" ")
            if clients.isdigit():
                drafted = one["tokens_a_second"] / runs[f"plain {clients}"]["tokens_a_second"]
                spent = one["cpu_seconds"] / runs[f"{way} map {clients}"]["cpu_seconds"]
                shown = (one["tokens_a_second"], drafted, one["first_token"], one["gap"], spent)
                cells = [
                    f"{number:.{places}f}" for number, places in zip(shown, (1, 2, 2, 2, 2), strict=True)
                ]
                rows.append([clients, shape["rows"][clients], shape["new_tokens"], way, *cells])
    head = ["clients", "rows", "new tokens", "drafts", "tokens/s", "of plain", "first token s", "gap s"]
    full, lean = (runs[name]["cpu_seconds"] / runs[name]["rounds"] for name in ("full", "lean"))
    spent = [found["compiling"][name]["cpu_seconds"] for name in ("drafter 8", "lean")]
    return table([*head, "CPU s of map's"], *sorted(rows, key=lambda row: int(row[0]))) + (
        f"\n\nA greedy round takes {full / lean:.2f} times the CPU seconds with everything compiled "
        f"in, and compiling {spent[0]:.0f} CPU seconds instead of {spent[1]:.0f}."
    )


def int8_quality() -> str:
    """Int8 weights beside the weights as they are: perplexity, choices, acceptance."""
    found, rows = result("int8_quality"), []
    for name, one in found["target"].items():
        told, draft = one["perplexity"], found["drafter"][name]
        kinds = [f"{form} {part}" for part in ("question", "answer") for form in ("as_it_is", "int8")]
        cells = [*(f"{told[kind]:.2f}" for kind in kinds), f"{one['same_choice']:.3f}"]
        rows.append([name, *cells, f"{draft['as_it_is']:.2f}", f"{draft['int8']:.2f}"])
    head = ["questions", "in int8", "answers", "in int8", "same choice", "tokens a round", "drafter in int8"]
    return table(["perplexity of", *head], *rows)


def latents_cpu() -> str:
    """The speed of absorbed latents over expanded ones, and their errors in bfloat16."""
    found = result("latents_cpu")
    said = [
        f"{ratios['step']:.1f} times faster a step and {ratios['prompt']:.2f} times a prompt with {runtime}"
        for runtime in ("xla", "eager")
        for ratios in [found[runtime]["expanded_of_absorbed"]]
    ]
    error = found["bfloat16_error"]["absorbed_of_expanded"]
    return f"{'; '.join(said)}; the error in bfloat16 is {error:.2f} of the expanded form's"


def cpu_distance() -> str:
    """The distance of other arithmetics from float32."""
    rows = [
        [one["arithmetic"], f"{100 * one['agreement']:.1f} %", f"{one['perplexity']:.3f}"]
        for one in result("cpu_distance")["rows"]
    ]
    return table(["arithmetic", "same likeliest token", "perplexity"], *rows)
