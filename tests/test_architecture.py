"""Modules import along the floors, sizes have limits, and shape annotations are true."""

import ast
import io
import os
import re
import tokenize
import tomllib
from graphlib import TopologicalSorter

import torch
from support import ROOT
from support.heavy import PATTERNS
from support.shell import python

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("torch_dflash", "jax_bridge")
    for path in sorted((ROOT / package).rglob("*.py"))
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ONE_DOOR = "torch_dflash.engine.bridge"

# The rooms of each package, from the ground up: a room may import those above its own line.
FLOORS = {
    "torch_dflash": [
        "_version ops progress pytrees runtime_kinds storage",
        "checks guards state",
        "grammars",
        "processors sampling",
        "plan",
        "accept cache record",
        "targets",
        "proposers",
        "decode demo published",
        "rows verify",
        "runtime",
        "eager requests",
        "engine",
        "generation",
        "integrations pieces selftest train",
        "bench chat doctor",
        "server",
        "cli",
        "__main__",
    ],
    "jax_bridge": [
        "_torchax arrays compilations device_memory offline reference tails vllm",
        "state weights",
        "kernels",
        "mesh",
        "devices hosts ops",
        "checkpoints programs",
        "runtime train",
        "aot selftest",
    ],
}


def imports(path):
    """(module imported, whether inside a function) for every import of a file, names included."""
    tree, found = ast.parse(path.read_text()), []
    inner = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inner) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(node.module, id(node) in inner)]
            found += [(f"{node.module}.{alias.name}", id(node) in inner) for alias in node.names]
    return found


def roots(name):
    return {module.split(".")[0] for module, _ in imports(MODULES[name])}


def ours(name):
    """Modules of the same package that a module imports, without the package's name."""
    package = name.split(".")[0] + "."
    return {
        module.removeprefix(package)
        for module, _ in imports(MODULES[name])
        if module in MODULES and module.startswith(package)
    }


def test_the_scan_sees_imports():
    assert ("jax_bridge.runtime", True) in imports(MODULES[ONE_DOOR])
    assert ("torch", False) in imports(MODULES["torch_dflash.decode"])
    assert "state" in ours("torch_dflash.decode")
    assert len(MODULES) > 30


def test_torch_dflash_never_imports_jax():
    for name in MODULES:
        if name.startswith("torch_dflash"):
            assert not roots(name) & {"jax", "jaxlib", "torchax", "flax"}, name


def test_no_module_needs_a_system_that_has_fcntl():
    for name in [name for name in MODULES if name.startswith("torch_dflash")]:
        assert not roots(name) & {"fcntl", "grp", "pwd", "resource", "termios"}, name


def test_one_lazy_door_from_torch_dflash_to_the_bridge():
    doors = {
        (name, module, lazy)
        for name, path in MODULES.items()
        if name.startswith("torch_dflash") and not name.startswith("torch_dflash.cli")
        for module, lazy in imports(path)
        if module.split(".")[0] == "jax_bridge"
    }
    assert doors == {
        (ONE_DOOR, "jax_bridge.hosts.hosts", True),
        (ONE_DOOR, "jax_bridge.hosts.hosts.spanning", True),
        (ONE_DOOR, "jax_bridge.runtime", True),
        (ONE_DOOR, "jax_bridge.runtime.XlaRuntime", True),
    }


def test_the_command_line_opens_the_bridge_only_when_asked():
    # An engine's runtime is behind the one door; these use what exists on the other side alone.
    doors = {
        (name, module, lazy)
        for name, path in MODULES.items()
        if name.startswith("torch_dflash.cli")
        for module, lazy in imports(path)
        if module in MODULES and module.split(".")[0] == "jax_bridge"
    }
    assert doors == {
        ("torch_dflash.cli.aot", "jax_bridge.aot.compile", True),
        ("torch_dflash.cli.aot", "jax_bridge.aot.report", True),
        ("torch_dflash.cli.aot", "jax_bridge.aot.kflat", True),
        ("torch_dflash.cli.bench", "jax_bridge.aot.methods", True),
        ("torch_dflash.cli.env", "jax_bridge", True),
        ("torch_dflash.cli.fit_memory", "jax_bridge.aot.memory", True),
        ("torch_dflash.cli.selftest", "jax_bridge.selftest", True),
        ("torch_dflash.cli.tpu", "jax_bridge.aot.report", True),
        ("torch_dflash.cli.tpu", "jax_bridge.offline", True),
        ("torch_dflash.cli.train.fit", "jax_bridge.train.trainer", True),
    }


def test_without_jax_eager_decodes_and_xla_names_the_command():
    done = python(
        "import sys, torch, torch_dflash as td\nfrom support import tiny\n"
        "sys.modules |= {'jax': None, 'jaxlib': None}\n"  # each import of them fails
        "pair, ids = tiny.make_pair(), torch.ones(1, 3, dtype=torch.long)\n"
        "td.generate(*pair, ids, max_new_tokens=3, runtime='eager')\n"
        "roots = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & {'torchax', 'jax_bridge'}))\n"
        "td.generate(*pair, ids, max_new_tokens=3)"
    )
    assert done.stdout.strip() == "[]", done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert "ImportError: runtime='xla' needs jax and torchax" in message and "pass runtime='eager'" in message
    torchax = next(line for line in PROJECT["dependencies"] if line.startswith("torchax"))
    assert f'pip install jax "torchax=={torchax.partition("<=")[2]}"' in message


def test_the_reference_is_independent():
    names = [name for name in MODULES if name.startswith("jax_bridge.reference")]
    assert {f"jax_bridge.reference.{part}" for part in ("drafter", "target", "loop")} < set(names)
    for name in names:
        assert not roots(name) & {"torch", "torchax", "torch_dflash", "transformers"}, name
        inside = {module for module, _ in imports(MODULES[name]) if module.startswith("jax_bridge")}
        assert all(module.startswith("jax_bridge.reference") for module in inside), name


def test_a_room_imports_only_rooms_below_it():
    for package, floors in FLOORS.items():
        floor = {room: level for level, rooms in enumerate(floors) for room in rooms.split()}
        for name in MODULES:
            if name.startswith(f"{package}."):
                room = name.split(".")[1]
                for other in ours(name):
                    other = other.partition(".")[0]
                    assert other == room or floor[other] < floor[room], f"{name} imports {other}"


def test_concepts_names_every_room():
    text = (ROOT / "docs" / "concepts.md").read_text()
    for package in ("torch_dflash", "jax_bridge"):
        table = text.partition(f"| `{package}` |")[2].partition("\n\n")[0]
        named = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
        rooms = {name.split(".")[1] for name in MODULES if name.startswith(f"{package}.")}
        assert named == {room for room in rooms if not room.startswith("_")}, package


def test_every_shape_letter_is_in_the_glossary():
    table = (ROOT / "docs" / "glossary.md").read_text().partition("| letter | is |")[2].partition("\n\n")[0]
    letters = set(re.findall(r"[A-Za-z]+", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
    known = letters | {"S-1", "R+W"}
    for name, path in MODULES.items():
        for shape in re.findall(r'(?:Int|UInt8|Float|Bool|Shaped)\[[^"\]]*"([^"]*)"\]', path.read_text()):
            for axis in shape.split():
                single = re.fullmatch(r"[A-Z]\w?|n", axis)
                assert not single or axis in known or set(axis) <= letters, f"{name}: {shape}: {axis}"


def test_the_files_of_heavy_cases_are_there():
    # The cases themselves are looked for whenever their file is collected, in conftest.py.
    for pattern in PATTERNS:
        assert list((ROOT / "tests").glob(pattern.partition("::")[0])), pattern


def test_no_two_test_files_share_a_name():
    """pytest would leave one of them out."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_docstrings_begin_with_a_statement():
    """No docstring begins with a question word; "Whether" begins those of functions that return a bool."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for room in ("torch_dflash", "jax_bridge", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]:
                first = re.match(r"\w*", ast.get_docstring(node) or "")[0]
                where = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                assert first not in ("What", "Which", "How", "Where", "Who", "Whose", "Of"), where
                answer = ast.unparse(getattr(node, "returns", None) or ast.Constant(None))
                assert first != "Whether" or "bool" in answer.lower(), where


def test_no_circle():
    graph = {}
    for name, path in MODULES.items():
        found = {module for module, lazy in imports(path) if module in MODULES and module != name}
        # An import of a name from a package means the module named in it.
        packages = {module for module in found if any(other.startswith(module + ".") for other in found)}
        graph[name] = found - packages
    list(TopologicalSorter(graph).static_order())


def test_proposers_see_neither_the_loop_nor_the_target():
    for name in MODULES:
        if name.startswith("torch_dflash.proposers"):
            hidden = {"decode", "runtime", "engine", "generation", "targets.adapter", "targets.trace"}
            assert not any(other.startswith(tuple(hidden)) for other in ours(name)), name
            # The target's cache: its view and its commit. A proposer has layers of its own.
            used = {module for module, _ in imports(MODULES[name])}
            assert not used & {"torch_dflash.cache.view.CacheView", "torch_dflash.cache.dense.attend_densely"}


def test_the_round_names_no_proposer():
    for name in ("decode", "runtime", "accept", "targets.adapter", "cache.view", "state"):
        assert {module for module in ours(f"torch_dflash.{name}") if "proposers" in module} <= {
            "proposers.base",
            "proposers",
        }, name
    text = MODULES["torch_dflash.decode"].read_text()
    assert not [word for word in ("DFlashProposer", "NGram", "PlainProposer", "isinstance") if word in text]
    assert {module for module, _ in imports(MODULES["torch_dflash.decode"]) if "proposers" in module} == {
        "torch_dflash.proposers.base",
        "torch_dflash.proposers.base.Proposer",
        "torch_dflash.proposers.base.take_in",
    }


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


LINES = 31_814
"""Lines of code of both packages, comments and docstrings not counted. Rooms may trade among each other.

A change that adds a capability says by how much it raises this number; any other change keeps or lowers it.
"""


def lines_of_code(path):
    """The lines of a file that hold code: no comment, no docstring, no blank line."""
    text = path.read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in empty | {tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - docstrings)


def test_lines_of_code_are_those_that_run(tmp_path):
    (tmp_path / "some.py").write_text(
        '"""Says.\n\nMore.\n"""\n\n# why\nx = [\n    1,\n]  # here\n"""Of x."""\n'
    )
    assert lines_of_code(tmp_path / "some.py") == 3


def test_both_packages_keep_to_their_lines():
    assert sum(map(lines_of_code, MODULES.values())) <= LINES


# The names of mappings of a call's options below the one reader.
OPTION_NAMES = {*"options given requested named kwargs model_kwargs built own bound call made".split()}
READERS = ("torch_dflash.engine", "torch_dflash.requests", "torch_dflash.integrations")


def changes_of_options(tree):
    """Lines that remove an option from a mapping, or add one."""
    for node in ast.walk(tree):
        touched = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop":
            touched = [node.func.value]
        elif isinstance(node, ast.Delete | ast.Assign):
            touched = [one.value for one in node.targets if isinstance(one, ast.Subscript)]
        names = {one.id for one in touched if isinstance(one, ast.Name)}
        if names & OPTION_NAMES:
            yield node.lineno


def test_options_are_changed_nowhere_below_their_one_reader():
    below = [name for name in MODULES if name.startswith(READERS) and name != "torch_dflash.requests.read"]
    found = {name: [*changes_of_options(ast.parse(MODULES[name].read_text()))] for name in below}
    assert len(below) > 30 and not {name: lines for name, lines in found.items() if lines}
    assert sorted(changes_of_options(ast.parse("options.pop('seed')\ndel given[1]\nrequested['a'] = 2"))) == [
        1,
        2,
        3,
    ]


def test_the_engines_room_is_small():
    inside = [name for name in MODULES if name.startswith("torch_dflash.engine")]
    arrows = [other for name in inside for other in ours(name) if other.startswith("engine.")]
    modules = {other for other in arrows if f"torch_dflash.{other}" in MODULES}
    assert len(inside) - 1 <= 18 and modules
    assert sum(f"torch_dflash.{other}" in MODULES for other in arrows) < 40


def test_sizes():
    long = {(name, function): size for name, path in MODULES.items() for function, size in functions(path)}
    over = {where: size for where, size in long.items() if size >= 80}
    assert not over
    parts = ("draft", "verify", "commit", "_decode_round")
    assert sum(long["torch_dflash.decode", part] for part in parts) <= 60
    assert max(long["torch_dflash.decode", part] for part in parts) <= 30


def test_no_remote_code_and_no_environment_options():
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                keywords = {word.arg for word in node.keywords}
                assert "trust_remote_code" not in keywords, f"{name}:{node.lineno}"
            if isinstance(node, ast.Attribute) and name.startswith("torch_dflash"):
                read = node.attr in ("environ", "getenv")
                # Where caches lie, and NO_COLOR.
                allowed = ("torch_dflash.storage.folders", "torch_dflash.progress")
                assert not read or name in allowed, f"{name}:{node.lineno} reads {node.attr}"


def test_a_torchax_that_does_not_import_says_which_one_does(tmp_path):
    # The error of 0.0.13 on torch 2.13, which is no ImportError.
    (tmp_path / "torchax.py").write_text("raise AttributeError('no attribute _C._x')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    done = python(
        "import torch, torch_dflash as td\nfrom support import tiny\n"
        "td.generate(*tiny.make_pair(), torch.ones(1, 3, dtype=torch.long), runtime='xla')",
        PYTHONPATH=path,
    )
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    for part in (
        "ImportError: torchax does not import with torch",
        torch.__version__,
        "0.0.14.dev",
        "pip install",
    ):
        assert part in message, done.stderr


def test_the_bridge_starts_no_platform_until_it_is_used():
    done = python(
        "import jax_bridge as jb\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
        "print(jb.load, jb.aot.compile_round)\n"
    )
    assert done.returncode == 0, done.stderr


CHECKED = """
import warnings
from jaxtyping import install_import_hook
# beartype notes that jaxtyping's own string annotations are no forward references.
with install_import_hook(["torch_dflash"], "beartype.beartype"):
    import torch_dflash as td
    import torch_dflash.proposers
    [getattr(td, name) for name in td.__all__]
warnings.filterwarnings("ignore", "note: ")  # of odd pairs
import torch, pytest
from support import tiny
from torch_dflash.accept import trim_at_stop
from torch_dflash.proposers.checkpoint.extras import ends_in_blocks
ids, mask = tiny.ragged_prompts(3)
for family in ("qwen3", "gpt_oss"):
    target, drafter = tiny.make_pair(family)
    for given in (drafter, None, td.NGramProposer(4)):
        options = {"max_new_tokens": 6, "runtime": "eager"}
        td.generate(target, given, ids, mask, **options)
        td.generate(target, given, ids, mask, **options, do_sample=True, top_p=0.9, eos_token_id=[1, 2])
target, drafter = tiny.make_pair()
block = td.dflash(drafter, runtime="eager")
target.generate(ids, attention_mask=mask, max_new_tokens=5, custom_generate=block)
row = ids[:1]
if ends_in_blocks():
    native = {"assistant_model": drafter, "speculation_type": "dflash"}
    target.generate(row, max_new_tokens=9, do_sample=False, **native)
engine = td.compile(target, drafter, runtime="eager", max_length=64).warmup()
list(engine.stream(row, max_new_tokens=5))
try:
    trim_at_stop(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32))
except Exception as error:
    assert type(error).__name__ == "TypeCheckError", error
    print("checked")
"""


def test_shape_annotations_hold():
    done = python(CHECKED)
    assert done.stdout.strip().endswith("checked"), done.stderr[-4000:]
