"""``torch-dflash serve``: OpenAI's clients talk to a pair."""

from __future__ import annotations

from types import SimpleNamespace

import click

from torch_dflash.checks import check_mesh
from torch_dflash.cli.arguments import check_device, decoding, template_options
from torch_dflash.cli.command import COUNT, command, option
from torch_dflash.cli.errors import refusing
from torch_dflash.progress import print_status

PAIR = "target drafter chat_template_kwargs dtype runtime mesh cache verify device block_size verify_width"
PAIR += " union rows"
ENGINE = ("runtime", "batch_size", "replicas", "verify_width", "rounds_per_chunk", "mesh", "cache", "verify")
PARTS = {
    "penalties": ("repetition_penalty", "presence_penalty"),
    "logit-bias": ("sequence_bias",),
    "min-tokens": ("min_new_tokens",),
    "formats": ("grammar",),
}
"""Parts that may be left out, besides filters and log-probabilities, and the processors of each."""


def _check(arguments: SimpleNamespace) -> None:
    check_device(arguments)
    with refusing(ValueError, before="--"):
        check_mesh(arguments.mesh, arguments.runtime, arguments.replicas)
    template_options(arguments)


@command(
    "serve",
    [
        *(one for one in decoding() if one.name in PAIR.split()),
        option("--max-length", type=COUNT, metavar="N",
               help="Positions of a prompt and its answer (4096, or the target's context)."),
        option("--batch-size", type=COUNT, default=8, metavar="B", help="Requests beside each other."),
        option("--replicas", type=COUNT, default=1, metavar="N", help="Copies, each on its part of --mesh."),
        option("--rounds-per-chunk", type=COUNT, default=4, metavar="N", help="Of each piece of a stream."),
        option("--without", multiple=True, type=click.Choice([*PARTS, "filters", "logprobs"]),
               help="Compile without this part, which is refused then; may be repeated."),
        option("--queue", type=COUNT, default=256, metavar="N", help="Most requests that wait."),
        option("--host", default="127.0.0.1", metavar="ADDRESS"),
        option("--port", type=click.IntRange(0, 65535), default=8000),
        option("--api-key", multiple=True, metavar="KEY", help="Opens /v1; may be repeated (nobody asks)."),
        option("--served-model-name", metavar="NAME", help="Of the model in requests (--model's)."),
        option("--metrics-prefix", default="torch_dflash", metavar="P", help="Of the names at /metrics."),
    ],
    "Serve a pair to OpenAI's clients.",
    "Loopback unless --host says otherwise. SIGTERM ends it when the requests under way have ended. Exit "
    "status: 0 done, 1 it could not start, 2 wrong usage.",
    check=_check,
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Serve until a signal; returns the exit status."""
    with refusing(ImportError):
        from torch_dflash.server.app import asgi_app, bound, serve
    import torch_dflash as td
    from torch_dflash.checks import context_of
    from torch_dflash.cli.job import composed
    from torch_dflash.cli.loading import load_named
    from torch_dflash.requests.rules import of_the_model

    with refusing(OSError, before=f"--host {arguments.host} --port {arguments.port}: "):
        at = bound(arguments.host, arguments.port)
    pair = {name: getattr(arguments, name) for name in ("dtype", "device", "block_size")}
    loaded = load_named(arguments.target, arguments.drafter, **pair)
    target, left_out = loaded.target, arguments.without
    rules = [name for part, names in PARTS.items() if part not in left_out for name in names]
    rules += of_the_model(target.generation_config, 8, target.get_input_embeddings().weight.shape[0])
    options = {name: getattr(arguments, name) for name in ENGINE}
    if "logprobs" not in left_out:
        options |= {"outputs": ("output_logprobs",), "top_logprobs": 5}
    options["block_size"] = None if arguments.drafter == "ngram" else arguments.block_size
    options["max_length"] = arguments.max_length or min(4096, context_of(target))
    options |= {"processors": tuple(rules), "filters": "filters" not in left_out}
    served = {name: getattr(arguments, name) for name in ("queue", "metrics_prefix")}
    served |= {"api_keys": arguments.api_key, "name": arguments.served_model_name or arguments.target}
    with refusing(TypeError, ValueError):
        engine = td.compile(target, composed(arguments, loaded.drafter), **options)
        served["template_options"] = template_options(arguments)
        app = asgi_app(engine, loaded.tokenizer, **served)
    print_status(f"torch-dflash serve: http://{arguments.host}:{at.getsockname()[1]}/v1")
    return serve(app, at)
