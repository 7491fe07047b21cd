"""What the site's pages need beyond their Markdown: links out of docs/ lead to the repository."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def on_config(config):
    """Show where the repository lies."""
    config.repo_url, config.repo_name = REPOSITORY, "torch-dflash"
    return config


def on_page_markdown(markdown: str, page, **_) -> str:
    """Turn each link out of docs/ into one to the repository."""
    up = "../" * (1 + page.file.src_uri.count("/"))
    return re.sub(rf"\]\({up}([^)]+)\)", rf"]({REPOSITORY}/blob/main/\1)", markdown)
