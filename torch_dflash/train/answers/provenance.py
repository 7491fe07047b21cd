"""Provenance of the answers: sources, counts and settings, stored with the features."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch_dflash.storage.files import StageError, write_json
from torch_dflash.train.answers.data import Answer
from torch_dflash.train.stages import MANIFEST

DATA = "data.json"
TEMPLATE = "chat_template_kwargs"
ANSWERED = ("target", "sampled", "max_new_tokens", "max_prompt_tokens", "seed")  # of stage.json


def agree(given: dict[str, Any] | None, recorded: list[dict[str, Any]], where: str) -> None:
    """Raise `StageError` if the template variables ``given`` are not among those ``recorded``."""
    if given is not None and recorded and given not in recorded:
        other = f"{where} with {json.dumps(recorded[0])}"
        raise StageError(f"{TEMPLATE}={json.dumps(given)}, but {other}; leave the option out to use that.")


def with_template(answers: list[Answer], given: dict[str, Any] | None) -> list[Answer]:
    """``answers``; those without recorded template variables get the ``given`` ones.

    Raises:
        StageError: an answer records other variables than the given ones.
    """
    for one in answers:
        recorded = one.chat_template_kwargs
        agree(given, [] if recorded is None else [recorded], "there are answers made")
    return [
        one if one.chat_template_kwargs is not None else dataclasses.replace(one, chat_template_kwargs=given)
        for one in answers
    ]


def describe(answers: list[Answer], paths: list[Path]) -> dict[str, Any]:
    """Counts by source, and the template and settings recorded in the answers or their ``stage.json``."""
    sources: dict[str, dict[str, int]] = {}
    templates: list[dict[str, Any]] = []
    for one in answers:
        source = sources.setdefault(one.source, {"answers": 0, "tokens": 0})
        source["answers"] += 1
        source["tokens"] += len(one.response_ids)
        if one.chat_template_kwargs is not None and one.chat_template_kwargs not in templates:
            templates.append(one.chat_template_kwargs)
    answered: list[dict[str, Any]] = []
    for path in paths:
        settings = _settings(path / MANIFEST if path.is_dir() else path.with_name(MANIFEST))
        if settings and settings not in answered:
            answered.append(settings)
    return {"sources": dict(sorted(sources.items())), TEMPLATE: templates, "answered": answered}


def _settings(manifest: Path) -> dict[str, Any]:
    try:
        found = json.loads(manifest.read_text())
    except (OSError, ValueError):  # answers without a stage: the card names them as unknown
        return {}
    if not isinstance(found, dict) or found.get("stage") != "regenerate":
        return {}
    settings = {name: found[name] for name in ANSWERED if name in found}
    return settings | {"target": Path(str(settings.get("target", ""))).name}  # nobody's home directory


def write_data(directory: Path, data: dict[str, Any]) -> None:
    """Store the description with the features of these answers."""
    write_json(directory / DATA, data)


def read_data(directories: list[Path]) -> dict[str, Any] | None:
    """The joined descriptions of several features; None unless all have one.

    Raises:
        StageError: a description cannot be read.
    """
    paths = [directory / DATA for directory in directories]
    if not all(path.exists() for path in paths):
        return None
    found = []
    for path in paths:
        try:
            data = json.loads(path.read_text())
            found.append({name: data[name] for name in ("sources", TEMPLATE, "answered")})
        except (ValueError, KeyError, TypeError) as error:
            raise StageError(f"{path} is damaged; run the features stage again.") from error
    sources: dict[str, dict[str, int]] = {}
    for data in found:
        for name, counts in data["sources"].items():
            before = sources.setdefault(name, {"answers": 0, "tokens": 0})
            sources[name] = {kind: before[kind] + counts[kind] for kind in before}
    joined = {
        key: [item for number, item in enumerate(rows) if item not in rows[:number]]
        for key in (TEMPLATE, "answered")
        for rows in [[item for data in found for item in data[key]]]
    }
    return {"sources": dict(sorted(sources.items())), **joined}


def data_section(data: dict[str, Any] | None) -> str:
    """The card's paragraph and table on the data."""
    if data is None:
        return "What the features were made of is not recorded beside them."
    sources = data["sources"]
    answers = sum(counts["answers"] for counts in sources.values())
    tokens = sum(counts["tokens"] for counts in sources.values())
    rows = "\n".join(
        f"| {name} | {counts['answers']:,} | {counts['tokens']:,} |" for name, counts in sources.items()
    )
    how = "; ".join(_how(settings) for settings in data["answered"]) or "How they were made is not recorded"
    template = " or ".join(f"`{json.dumps(one)}`" for one in data[TEMPLATE] if one)
    template_note = f" Chat template with {template}." if template else ""
    return f"""{answers:,} answers, {tokens:,} tokens. {how}.{template_note}

| source of the prompts | answers | tokens |
| --- | --- | --- |
{rows}"""


def _how(settings: dict[str, Any]) -> str:
    kind = "sampled with the model's own settings" if settings.get("sampled") else "greedily"
    limits = ", ".join(
        f"{name}={settings[name]}"
        for name in ("max_new_tokens", "max_prompt_tokens", "seed")
        if name in settings
    )
    return f"{settings['target'] or 'The target'} answered {kind} ({limits})"
