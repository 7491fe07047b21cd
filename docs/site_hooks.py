"""What the site's pages need beyond their Markdown: the API's names, and no links out of docs/."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
PACKAGE = re.compile(r"^<!-- every public name of (\w+) -->$", flags=re.M)


def public_names(package: str) -> list[str]:
    """The names that a package's ``__init__`` exports, as ``import name as name``."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return sorted(one.name for one in aliases if one.asname == one.name and not one.name.startswith("_"))


def on_page_markdown(markdown: str, **_) -> str:
    """Name what the API page documents; keep only the text of links out of docs/."""

    def documented(match: re.Match[str]) -> str:
        return "\n\n".join(f"::: {match[1]}.{name}" for name in public_names(match[1]))

    return OUTSIDE.sub(r"\1", PACKAGE.sub(documented, markdown))
