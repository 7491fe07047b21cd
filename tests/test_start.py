"""``import torch_dflash`` imports little, and each public name stays the same object."""

import ast
import importlib
import os
import pkgutil
import re
import types

from support import ROOT
from support.shell import python

import torch_dflash as td

HEAVY = {"torch", "transformers", "jax", "numpy"}


def test_the_import_is_lazy():
    done = python(
        "import sys, torch_dflash\n"
        f"print(sorted({HEAVY} & set(sys.modules)), 'load_pair' in dir(torch_dflash))\n"
        "print(torch_dflash.checkpoints[0].name, sorted({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert done.stdout.splitlines() == ["[] True", "qwen3-4b []"], done.stderr


def test_a_drafter_has_its_method_whichever_name_comes_first():
    code = "import torch_dflash as td\nprint(callable(td.{}.spec_generate))"
    assert python(code.format("DFlashDraftModel")).stdout == "True\n"


def spent(code):
    found = []
    for _ in range(3):
        before = os.times()
        assert python(code).returncode == 0
        after = os.times()
        found.append(sum(after[2:4]) - sum(before[2:4]))
    return min(found)


def test_the_import_and_help_take_little_cpu():
    idle = spent("pass")
    assert spent("import torch_dflash") - idle <= 0.3
    for line in ("--help", "generate --help", "train fit --help", "list", "generate --promt hi"):
        code = f"from torch_dflash.cli import main\nmain({line.split()!r})"
        assert spent(code) - idle <= 0.2, line


def test_one_list_names_what_is_public():
    tree = ast.parse((ROOT / "torch_dflash/__init__.py").read_text())
    checked = [node for node in tree.body if isinstance(node, ast.If)]
    assert [ast.unparse(node.test) for node in checked] == ["TYPE_CHECKING"]
    imports = {
        alias.name: node.module
        for node in ast.walk(checked[0])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert imports == td._MODULES | dict.fromkeys(td._ROOMS, "torch_dflash")
    assert not [
        node for node in tree.body if getattr(node, "name", "") == "__getattr__"
    ]  # pyright would trust it
    assert set(td.__all__) == {"__version__", *td._MODULES} and {*td.__all__, *imports} <= set(dir(td))


def test_no_submodule_takes_the_place_of_a_public_name():
    for module in pkgutil.walk_packages(td.__path__, "torch_dflash."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in td.__all__:
        value = getattr(td, name)
        assert value is getattr(td, name) and not isinstance(value, types.ModuleType), name
        if name in td._MODULES:
            assert value is getattr(importlib.import_module(td._MODULES[name]), name), name


def test_what_docs_and_messages_name_is_reachable():
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("torch_dflash/**/*.py")]
    named = {one for page in pages for one in re.findall(r"\btd\.([a-z]\w*)\.", page.read_text())}
    assert "processors" in named
    code = f"import torch_dflash as td\nprint([name for name in {sorted(named)} if not hasattr(td, name)])"
    assert python(code).stdout == "[]\n"


def test_a_name_that_is_not_there():
    done = python("import torch_dflash as td\ntry:\n    td.generat\nexcept AttributeError as e: print(e)")
    assert done.stdout.strip() == "module 'torch_dflash' has no attribute 'generat'"
