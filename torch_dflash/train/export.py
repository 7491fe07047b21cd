"""Exports a fitted drafter as a checkpoint in the layout of its kind, for DFlash z-lab's, with a card."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from torch_dflash.storage.files import naming_a_full_disk, write_atomically
from torch_dflash.train.answers.provenance import TEMPLATE, data_section
from torch_dflash.train.fit.heads import head_of
from torch_dflash.train.fit.kinds import kind_of
from torch_dflash.train.fit.log import read_log
from torch_dflash.train.stages import MANIFEST

WEIGHTS = "model.safetensors"


def export_drafter(
    drafter: Any,
    directory: Path,
    target: Any,
    fitted: Path,
    dtype: torch.dtype = torch.bfloat16,
    *,
    data: dict[str, Any] | None = None,
    name: str | None = None,
    command: str | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` (in ``dtype``) and ``README.md`` to ``directory``.

    Figures of `add_figures` in the card stay while the weights are equal.

    Args:
        fitted: the fit's directory, with settings and log for the card.
        data: of `train.answers.provenance`; None: not recorded.
        name: the target's, for the card; unset: its directory's.
        command: repeats the fit.
    """
    copied: Any = copy.deepcopy(drafter)
    copied = copied.to(dtype)
    copied.config.architectures = [type(drafter).__name__]
    if data is not None and data[TEMPLATE]:  # evaluations use the answers' variables
        _notes(copied.config)[TEMPLATE] = data[TEMPLATE]
    name = name or Path(target.config.name_or_path).name or type(target).__name__
    figures = acceptance_section(directory) if _same_weights(directory, copied) else ""
    card = model_card(drafter.config, drafter.num_parameters(), fitted, name, data, command)
    with naming_a_full_disk(directory):
        copied.save_pretrained(directory)
        for weights in directory.glob("*.safetensors"):  # safetensors writes for the owner alone
            shutil.copymode(directory / "config.json", weights)
        (directory / CARD).write_text(card + figures)


def trained_template(drafter: Any) -> list[dict[str, Any]]:
    """The chat template's variables of the drafter's answers; empty: not recorded."""
    return list(_notes(drafter.config).get(TEMPLATE) or [])


def _notes(config: Any) -> dict[str, Any]:
    return getattr(config, "dflash_config", vars(config))


def _same_weights(directory: Path, drafter: Any) -> bool:
    try:
        before = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError):
        return False
    now = drafter.state_dict()
    return before.keys() == now.keys() and all(torch.equal(before[key], now[key].cpu()) for key in now)


CARD = "README.md"
HEADING = "## Acceptance\n"


def model_card(
    config: Any, weights: int, fitted: Path, name: str, data: dict[str, Any] | None, command: str | None
) -> str:
    """The card: target, data, settings of the training, and figures on held-out sequences.

    Args:
        config: the drafter's. weights: their number. fitted: the fit's directory. name: the target's.
        data: of `train.answers.provenance`. command: repeats the fit.
    """
    kind = kind_of(config)
    said = kind.said(config, name, f"{weights / 1e6:.2f} M weights", f"`--head {head_of(config)}`")
    settings = json.loads((fitted / MANIFEST).read_text())
    held_out = [line for line in read_log(fitted / "log.jsonl") if line["kind"] == "held_out"]
    found = "The fit's log holds no figures of held-out answers."
    for last in held_out[-1:]:  # a crash may lose log lines that a checkpoint outlives
        rates = ", ".join(f"{rate:.3f}" for rate in last["accuracy"])
        found = f"""{last["step"]} steps in {last["seconds"] / 60:.0f} minutes.
On held-out answers, at random anchors: acceptance length {last["acceptance_length"]:.2f}; accuracy of
position 1 to {len(last["accuracy"])} (each alone): {rates}."""
    recipe = "\n".join(f"| {key} | {_shown(value)} |" for key, value in settings.items() if key != "target")
    again = f"```sh\n{command}\n```\n\n" if command else ""
    return f"""---
library_name: torch-dflash
tags: [{kind.title.lower()}, speculative-decoding]
---

# {kind.title} drafter for {name}

{said} It has no
embedding and no head: both are the target's. The output of speculative decoding is the target's own,
up to ties in half precision.

```python
import torch_dflash as td

drafter = td.load_drafter("path/to/this/directory", dtype=target.dtype)
out = td.generate(target, drafter, **inputs, max_new_tokens=256, return_dict_in_generate=True)
print(out.stats.mean_acceptance_length)
```

## Data

{data_section(data)}

## Training

On answers that the target itself wrote.

{again}| setting | value |
| --- | --- |
{recipe}

{found}
"""


def _shown(value: Any) -> Any:
    # Of a path the last part: a card names nobody's home directory.
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def acceptance_table(sets: dict[str, dict[str, Any]]) -> str:
    """`Evaluation.row` figures by set as Markdown: acceptance lengths and each position's rate.

    Below the table: the turns left out.
    """
    width = max(len(row["per_position"]) for row in sets.values())
    heads = ["set", "acceptance length", "n-gram lookup", *map(str, range(1, width + 1))]
    lines = [heads, ["---"] * len(heads)]
    for name, row in sets.items():
        rates = [f"{rate:.2f}" for rate in row["per_position"]]
        means = [row["acceptance_length"], row["ngram_acceptance_length"]]
        lines.append([name, *("-" if mean is None else f"{mean:.2f}" for mean in means), *rates])
    left_out = [f"{name} {row['left_out']}" for name, row in sets.items() if row.get("left_out")]
    note = f"\n\nTurns left out, beyond the target's context: {', '.join(left_out)}." if left_out else ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + note


def add_figures(directory: Path, figures: dict[str, Any]) -> None:
    """Put the figures of ``train evaluate --json`` at the end of the card in ``directory``."""
    card = directory / CARD
    before = card.read_text().partition(HEADING)[0].rstrip() if card.exists() else f"# {directory.name}"
    options, sets = figures["options"], figures["sets"]
    origins = [row["provenance"] for row in sets.values()]
    machines = list(dict.fromkeys(origin["hardware"] for origin in origins))
    commands = "\n".join(dict.fromkeys(origin["command"] for origin in origins))
    commands = commands.replace(str(Path.home()), "~")
    width = options.get("verify_width")
    template = options.get("chat_template_kwargs")
    template_note = f", chat template with `{json.dumps(template)}`" if template else ""
    verified = "the whole block" if width is None else f"{width} rows of each block"
    text = f"""{before}

{HEADING}
Greedy, first {options["limit"]} prompts of each set, {options["max_new_tokens"]} new tokens at most.
The target in {options["target_dtype"]}, {verified} verified{template_note}.
{"; ".join(machines)}. Numbered columns: share of rounds in which draft k and all before it were
accepted. N-gram lookup on the same texts.

{acceptance_table(sets)}

```sh
{commands}
```
"""
    write_atomically(card, lambda part: part.write_text(text))


def acceptance_section(directory: Path) -> str:
    """The figures at the end of the card in ``directory``; empty if there are none."""
    card = directory / CARD
    _, heading, rest = card.read_text().partition(HEADING) if card.exists() else ("", "", "")
    return f"\n{heading}{rest}" if heading else ""
