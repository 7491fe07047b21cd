"""Who may import whom, how large things may grow, and that shape annotations are true."""

import ast
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("torch_dflash", "jax_bridge")
    for path in sorted((ROOT / package).rglob("*.py"))
}
ONE_DOOR = "torch_dflash.engine"

# What each module of torch_dflash may import of torch_dflash, by the order of the design:
# config <- drafter, target, cache <- accept, sampling <- decode <- generation <- cli.
LAYERS = [
    {"checks"},
    {"weight_files", "drafter_fields"},
    {"config_fields"},
    {"control", "state", "rows", "attention", "experts", "stats", "files", "checksums"},
    {"code", "agreement"},
    {"tested"},
    {"masks", "twin", "unmodified", "streaming", "inplace"},
    {"loaded", "progress"},
    {"config", "paged", "pages", "ring", "block_attention"},
    {"drafter_files"},
    {"skeleton", "cache", "sampling", "accept", "drafts", "drafter", "admission"},
    {"tracing"},
    {"target", "proposers.base", "demo_model"},
    {"demo_pair"},
    {"decode", "proposers", "proposers.dflash", "proposers.ngram", "proposers.plain"},
    {"runtime", "checkpoints", "verify"},
    {"refusals", "seeds", "special_ids", "prepared", "prompts", "state_checks"},
    {"options", "arguments", "capacity"},
    {"outputs", "calls"},
    {"engine"},
    {"engine_cache", "state_io"},
    {"generation"},
    {"train", "train.files", "train.blocks", "train.options"},
    {"train.stages", "train.tensorfiles", "train.marks"},
    {"train.data", "train.log", "train.checkpoint"},
    {"train.conversations", "train.controls", "train.mixture"},
    {"train.card"},
    {
        "train.features",
        "train.objective",
        "train.regenerate",
        "train.evaluate",
        "train.export",
    },
    {"train.architecture", "train.sequences", "train.student"},
    {"train.schedule"},
    {"train.loop"},
    {"train.fit"},
    {"selftest", "selftest.pairs", "selftest.checks"},
    {"selftest.side"},
    {"selftest.parity", "selftest.costs", "selftest.timing", "selftest.kernels"},
    {"selftest.texts"},
]


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
    """Modules of torch_dflash that a module of torch_dflash imports, without the package's name."""
    known = {module.removeprefix("torch_dflash.") for module in MODULES if module.startswith("torch_dflash.")}
    return {module.removeprefix("torch_dflash.") for module, _ in imports(MODULES[name])} & known


def python(code, **environment):
    """Run ``code`` in a fresh interpreter; warnings are errors there too."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")} | environment,
        timeout=120,
    )


def test_the_scan_sees_imports():
    assert ("jax_bridge.runtime", True) in imports(MODULES[ONE_DOOR])
    assert ("torch", False) in imports(MODULES["torch_dflash.decode"])
    assert "state" in ours("torch_dflash.decode")
    assert len(MODULES) > 30


def test_torch_dflash_never_imports_jax():
    for name in MODULES:
        if name.startswith("torch_dflash"):
            assert not roots(name) & {"jax", "jaxlib", "torchax", "flax"}, name


def test_one_lazy_door_from_torch_dflash_to_the_bridge():
    doors = {
        (name, module, lazy)
        for name, path in MODULES.items()
        if name.startswith("torch_dflash") and not name.startswith("torch_dflash.cli")
        for module, lazy in imports(path)
        if module.split(".")[0] == "jax_bridge"
    }
    assert doors == {
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
        ("torch_dflash.cli.aot", "jax_bridge.aot", True),
        ("torch_dflash.cli.aot", "jax_bridge.aot_report", True),
        ("torch_dflash.cli.aot", "jax_bridge.offline", True),
        ("torch_dflash.cli.selftest", "jax_bridge.selftest", True),
        ("torch_dflash.cli.train", "jax_bridge.train", True),
    }


def test_importing_torch_dflash_and_decoding_eagerly_loads_no_jax():
    done = python(
        "import sys, torch, models, torch_dflash as td\n"
        "ids = torch.ones(1, 3, dtype=torch.long)\n"
        "td.generate(*models.make_pair(), ids, max_new_tokens=3, runtime='eager')\n"
        "roots = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & {'jax', 'jaxlib', 'torchax', 'jax_bridge'}))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_reference_is_independent():
    names = [name for name in MODULES if name.startswith("jax_bridge.reference")]
    assert {f"jax_bridge.reference.{part}" for part in ("drafter", "target", "loop")} < set(names)
    for name in names:
        assert not roots(name) & {"torch", "torchax", "torch_dflash", "transformers"}, name
        inside = {module for module, _ in imports(MODULES[name]) if module.startswith("jax_bridge")}
        assert all(module.startswith("jax_bridge.reference") for module in inside), name


def test_the_order_of_layers():
    rank = {name: level for level, names in enumerate(LAYERS) for name in names}
    for name in rank:
        for other in ours(f"torch_dflash.{name}"):
            # Neighbours do not need each other; a package's __init__ needs its modules.
            ok = rank[other] < rank[name] or name == "proposers" and other.startswith("proposers.")
            assert ok, f"{name} imports {other}"
    above = {name.removeprefix("torch_dflash.") for name in MODULES if name.startswith("torch_dflash.")}
    loose = {name for name in above - rank.keys() if not name.startswith(("cli", "demo_model"))}
    assert not loose, f"{loose}: give every module its place in LAYERS"


def test_proposers_see_neither_the_loop_nor_the_target():
    for name in MODULES:
        if name.startswith("torch_dflash.proposers"):
            hidden = {"decode", "target", "runtime", "engine", "engine_cache", "generation", "checkpoints"}
            assert not ours(name) & hidden, name
            # The target's cache: its view and its commit. A proposer has layers of its own.
            used = {module for module, _ in imports(MODULES[name])}
            assert not used & {"torch_dflash.cache.CacheView", "torch_dflash.tracing.RecordingCache"}, name


def test_the_round_names_no_proposer():
    for name in ("decode", "runtime", "accept", "target", "cache", "state"):
        assert {module for module in ours(f"torch_dflash.{name}") if "proposers" in module} <= {
            "proposers.base",
            "proposers",
        }, name
    text = MODULES["torch_dflash.decode"].read_text()
    assert not [word for word in ("DFlashProposer", "NGram", "PlainProposer", "isinstance") if word in text]
    assert {module for module, _ in imports(MODULES["torch_dflash.decode"]) if "proposers" in module} == {
        "torch_dflash.proposers.base",
        "torch_dflash.proposers.base.Proposer",
    }


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_sizes():
    sizes = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert max(sizes.values()) <= 400, max(sizes, key=sizes.get)
    assert statistics.median(sizes.values()) < 150
    long = {(name, function): size for name, path in MODULES.items() for function, size in functions(path)}
    over = {where: size for where, size in long.items() if size >= 80}
    assert not over
    assert 20 < long["torch_dflash.decode", "_decode_round"] < 50


def test_no_remote_code_and_no_environment_options():
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                keywords = {word.arg for word in node.keywords}
                assert "trust_remote_code" not in keywords, f"{name}:{node.lineno}"
            if isinstance(node, ast.Attribute) and name.startswith("torch_dflash"):
                read = node.attr in ("environ", "getenv")
                assert not read or name == "torch_dflash.demo_model", (
                    f"{name}:{node.lineno} reads {node.attr}"
                )


def test_a_torchax_that_does_not_import_says_which_one_does(tmp_path):
    # As 0.0.13 fails on torch 2.13: not with an ImportError.
    (tmp_path / "torchax.py").write_text("raise AttributeError('no attribute _C._x')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    done = python(
        "import torch, models, torch_dflash as td\n"
        "td.generate(*models.make_pair(), torch.ones(1, 3, dtype=torch.long), runtime='xla')",
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
import torch, models, pytest
from torch_dflash.accept import trim_at_stop
ids, mask = models.ragged_prompts(3)
for family in ("qwen3", "gpt_oss"):
    target, drafter = models.make_pair(family)
    for given in (drafter, None, td.NGramProposer(4)):
        options = {"max_new_tokens": 6, "runtime": "eager"}
        td.generate(target, given, ids, mask, **options)
        td.generate(target, given, ids, mask, **options, do_sample=True, top_p=0.9, eos_token_id=[1, 2])
target, drafter = models.make_pair()
block = td.dflash(drafter, runtime="eager")
target.generate(ids, attention_mask=mask, max_new_tokens=5, custom_generate=block)
row = ids[:1]
target.generate(row, max_new_tokens=9, do_sample=False, assistant_model=drafter, speculation_type="dflash")
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
