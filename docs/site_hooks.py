"""What the site's pages need beyond their Markdown: links out of docs/ lead to the repository."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)]+)\)")
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def on_config(config):
    """Show where the repository lies."""
    config.repo_url, config.repo_name = REPOSITORY, "torch-dflash"
    return config


def on_page_markdown(markdown: str, **_) -> str:
    """Turn each link out of docs/ into one to the repository."""
    return OUTSIDE.sub(rf"]({REPOSITORY}/blob/main/\1)", markdown)
