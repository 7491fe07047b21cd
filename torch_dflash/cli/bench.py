"""``torch-dflash bench``: every drafting method on one target."""

from __future__ import annotations

import json
import zlib
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from torch_dflash.bench.options import BenchOptions
from torch_dflash.cli.arguments import DEVICE, DTYPES, TEMPLATE, check_device, target_option, template_options
from torch_dflash.cli.command import COUNT, PATH, command, option, options_of, read_options
from torch_dflash.cli.errors import INTERRUPTED, UserError, fail, refusing
from torch_dflash.cli.outputs import check_writable, provenance
from torch_dflash.progress import print_status

if TYPE_CHECKING:
    from torch_dflash.bench.run import Bench

TOPOLOGIES = {"v5p": "v5p:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}
METHODS = "plain,lookup,lookahead,hf,hf-lookup"
CHANGED, CONTEXT = 1, 4096
NEW = "settings_checksum"
"""The one option that files of earlier releases lack."""


def _check(arguments: SimpleNamespace) -> None:
    check_device(arguments)
    check_writable(json=arguments.json, texts=arguments.texts)
    if arguments.price is not None and not isfinite(arguments.price):
        raise UserError(f"--price {arguments.price}: must be a number of dollars.")
    if arguments.price is not None and not (arguments.walls or arguments.json):
        raise UserError("--price: is for --walls or a --json with times; add one, or leave this out.")
    if arguments.context is not None and arguments.chip is None:
        raise UserError(f"--context {arguments.context}: is for --chip; add it, or leave this out.")
    if arguments.chip is not None and arguments.chip not in TOPOLOGIES and ":" not in arguments.chip:
        known = ", ".join(TOPOLOGIES)
        raise UserError(f"--chip {arguments.chip}: is none of {known}, and no topology as v5p:2x2x1 is.")
    if arguments.chips is not None and arguments.price is None:
        raise UserError(f"--chips {arguments.chips}: is for --price; add it, or leave this out.")
    if arguments.chip is not None and arguments.json is None:
        raise UserError(f"--chip {arguments.chip}: derives from the counts of --json; name that file, too.")
    with refusing(ValueError):
        read_options(BenchOptions, arguments)


@command(
    "bench",
    [
        target_option(),
        option("--methods", default=METHODS, metavar="LIST",
               help="Also hf-dflash, hf-assistant=DIR, lookup:W, eagle3=DIR, medusa=DIR, dflash=DIR, "
                    "dflash2=DIR, tree:ROWS, union:ROWS; DIR may be demo."),
        option("--prompts", many=True, type=PATH, required=True, metavar="FILE",
               help='JSON lines of {"turns": [...]}, or folders of them; the nine sets by their names.'),
        option("--json", type=PATH, metavar="FILE", help="Figures; those already in it are kept."),
        option("--texts", type=PATH, metavar="FILE", help="Plain answers; those already in it are kept."),
        *options_of(BenchOptions),
        option("--chip", metavar="CHIP",
               help="Decode nothing: compile each method's round for a TPU, and derive bounds of its speed."),
        option("--context", type=COUNT, metavar="N", help=f"Tokens a row, for --chip ({CONTEXT})."),
        option("--price", type=click.FloatRange(min=0, min_open=True), metavar="P",
               help="Dollars a chip-hour: adds dollars a million tokens."),
        option("--chips", type=COUNT, metavar="N", help="Chips that are paid for (1)."),
        TEMPLATE,
        option("--dtype", type=click.Choice(DTYPES), default="auto", help="Of weights; auto: as stored."),
        option("--device", help=DEVICE),
    ],
    "Compare drafting methods on one target: counts, walls, bytes, dollars.",
    "Plain texts are decoded once. Drafters are replayed on them, and some answers are decoded to check the "
    "replay. Ctrl-C keeps what is done. Exit status: 0, 1 if a method changes a text (no mere tie), 2 wrong "
    "usage.",
    check=_check,
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Fill the files with what they lack, print the tables; returns the exit status."""
    from torch_dflash.bench.report import add_dollars, bounds, tables
    from torch_dflash.bench.run import run as run_bench
    from torch_dflash.bench.sets import read_sets
    from torch_dflash.storage.files import StageError, write_json

    with refusing(StageError, before="--prompts: "):
        sets, left_out = read_sets(arguments.prompts)
    for reason in left_out.values():
        print_status(f"left out: {reason}")
    bench = _bench(arguments)
    options, identity = bench.options, _identity(arguments, bench)
    texts = _kept(arguments.texts, identity)
    figures = _kept(arguments.json, identity | {"decoded": options.decoded, "repeats": options.repeats})
    figures["sets_left_out"] = left_out

    def keep() -> None:
        for path, content in ((arguments.texts, texts), (arguments.json, figures)):
            if path is not None:
                write_json(path, content)

    try:
        with refusing(StageError, ValueError):
            if arguments.chip is None:
                run_bench(bench, sets, texts.setdefault("sets", {}), figures, keep, provenance)
            else:
                _derive(arguments, bench, figures)
    except KeyboardInterrupt:
        fail("bench", "interrupted; run the same command again to go on from here.")
        return INTERRUPTED
    if "derived" in figures:
        figures["bounds"] = bounds(figures)
    figures.pop("dollars", None)  # an earlier run's price is not this one's
    if arguments.price is not None:
        add_dollars(figures, arguments.price, arguments.chips or 1)
    keep()
    print(tables(figures))
    rows = [row for counted in figures["counts"].values() for row in counted["methods"].values()]
    return CHANGED if any(row["parted"] > row["ties"] for row in rows) else 0


def _bench(arguments: SimpleNamespace) -> Bench:
    from transformers import GenerationConfig

    from torch_dflash.bench.methods import make_methods, read_words
    from torch_dflash.bench.run import Bench
    from torch_dflash.cli.loading import load_named, load_named_drafter

    place = {"dtype": arguments.dtype, "device": arguments.device}
    with refusing(ValueError, before="--methods "):
        words = read_words(arguments.methods)
    loaded = load_named(arguments.target, None, **place)
    # Penalties, bans and beams of the target's own are another comparison: ids alone are kept.
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    own = {name: getattr(loaded.target.generation_config, name) for name in ids}
    loaded.target.generation_config = GenerationConfig(**own)

    def load(source: str, causal: bool) -> Any:
        if causal:
            return load_named(source, None, **place).target
        return load_named_drafter(source, **place, offered=["demo"])

    with refusing(ValueError, TypeError, before="--methods "):
        methods = make_methods(words, load)
    options, template = read_options(BenchOptions, arguments), template_options(arguments)
    return Bench(loaded.target, loaded.tokenizer, methods, options, template)


def _identity(arguments: SimpleNamespace, bench: Bench) -> dict[str, Any]:
    """The options that all figures and texts of one file share."""
    from torch_dflash.bench.methods import settings_of
    from torch_dflash.cli.train.stage import target_name
    from torch_dflash.storage.files import checksum_of

    # A fine-tuned target may have the embedding of its base.
    some = {name: weight.detach().flatten()[:64].cpu() for name, weight in bench.target.named_parameters()}
    settings = settings_of(bench.target.config), bench.tokenizer.chat_template, bench.stops
    names = ("limit", "max_new_tokens", "max_prompt_tokens", "batch_size", "runtime")
    return {
        "target": target_name(arguments.target),
        "dtype": str(bench.target.dtype).removeprefix("torch."),
        "target_checksum": checksum_of(some),
        NEW: zlib.crc32("\n".join(map(str, settings)).encode()),
        "chat_template_kwargs": bench.template,
        **{name: getattr(bench.options, name) for name in names},
    }


def _kept(path: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """The content of a file of an earlier run, or an empty one; raises `UserError` for other options."""
    if path is None or not path.exists():
        return {"options": options}
    field = f"{path}: "
    try:
        content = json.loads(path.read_text())
        before = dict(content["options"])
        counted = [one["methods"] for one in content.get("counts", {}).values()]
        if not all(isinstance(row, dict) for rows in counted for row in dict(rows).values()):
            raise TypeError(path)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{field}holds no figures of this command; name another file.") from error
    for name, value in options.items():
        if before.get(name) != value and (name in before or name != NEW):
            raise UserError(f"{field}is with {name}={before.get(name)!r}, now {value!r}; name another file.")
    return content


def _derive(arguments: SimpleNamespace, bench: Bench, figures: dict[str, Any]) -> None:
    """Compile every method's own round and put its bytes and bounds into ``figures``."""
    from torch_dflash.cli import tpu

    if not figures.get("counts"):
        raise UserError(
            f"--chip {arguments.chip}: {arguments.json} holds no counts yet; run without it first."
        )
    topology = TOPOLOGIES.get(arguments.chip, arguments.chip)
    with tpu.offline("Lower --context."):
        from jax_bridge.aot.methods import derive_rounds

        drafters = {method.name: method.drafter for method in bench.methods if method.theirs is None}
        context = arguments.context or CONTEXT
        sizes = {"context": context, "topology": topology, "status": print_status}
        rounds = derive_rounds(bench.target.config, drafters, **sizes)
    of = {"topology": topology, "context": context, "batch": 1}
    kept = figures.get("derived", {})
    before = kept["methods"] if kept.items() >= of.items() else {}  # of another chip they make place
    figures["derived"] = of | {"methods": before | rounds}
    figures["derived"]["provenance"] = provenance()
