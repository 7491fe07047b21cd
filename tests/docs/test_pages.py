"""README and docs: every block of Python runs, every command parses, every link and file named is there."""

import ast
import re
import runpy
import shlex
from types import SimpleNamespace

import jax
import pytest
import torch
import transformers
from support import ROOT
from support.tiny import VOCAB, make_drafter, make_target
from support.tokenizers import TEMPLATE, NumberTokenizer, byte_tokenizer

import jax_bridge as jb
import torch_dflash as td
from torch_dflash.cli import parse
from torch_dflash.cli.command import Invocation

PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
CARD = "torch_dflash/assets/smollm2-135m-instruct-dflash/README.md"
TEXT = {page: (ROOT / page).read_text() for page in [*PAGES, CARD]}
# Longer fences hold answers, and the code of answers is not the project's.
OURS = {page: re.sub(r"^````.*?^````$", "", TEXT[page], flags=re.S | re.M) for page in TEXT}
BLOCKS = {page: re.findall(r"^```python\n(.*?)^```", OURS[page], flags=re.S | re.M) for page in PAGES}
WITH_CODE = [page for page in PAGES if BLOCKS[page]]


def anchors(page: str) -> set[str]:
    """The anchors of a page: its headings as they are written in addresses."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", OURS[page], flags=re.S | re.M), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.fixture
def hub(monkeypatch, tmp_path, request):
    """Tiny models in the place of the hub's and of the bundled pair; lists the requested names in order."""
    spells = "grammar" in request.node.name  # that page needs a tokenizer of text, and a way to end
    tokenizer = byte_tokenizer(TEMPLATE) if spells else NumberTokenizer(VOCAB)
    own = {"vocab_size": 257, "eos_token_id": 0} if spells else {}
    target = make_target("qwen3", num_hidden_layers=2, max_position_embeddings=4096, **own)
    drafter = make_drafter(target, num_hidden_layers=1, target_layer_ids=[0, 1], max_position_embeddings=4096)
    target.save_pretrained(tmp_path)  # this directory stands for the id; the loading is real
    asked: list[str] = []

    def stand_in(owner, name, made):
        def loads(*args, **options):
            asked.append(f"{owner.__name__}.{name} {' '.join(args)}".strip())
            return made(*args, **options)

        monkeypatch.setattr(owner, name, loads)

    whole = jb.load
    stand_in(td, "load_demo_pair", lambda: (target, drafter, tokenizer))
    stand_in(td.DFlashDraftModel, "from_pretrained", lambda name, **options: drafter)
    stand_in(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, **options: target)
    stand_in(transformers.AutoTokenizer, "from_pretrained", lambda name, **options: tokenizer)
    stand_in(jax.distributed, "initialize", lambda: None)  # the tests are one process
    stand_in(jb, "load", lambda name, **options: whole(tmp_path, **options))
    monkeypatch.chdir(tmp_path)  # pages may write files
    return asked


def run(page: str) -> dict:
    """Runs the page's blocks in order, in one scope, as a reader would."""
    scope: dict = {}
    for block in BLOCKS[page]:
        exec(compile(block, page, "exec"), scope)
    return scope


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in WITH_CODE if page != "README.md"])
def test_every_block_of_a_page_runs_in_order(page, hub):
    run(page)


def test_every_block_of_the_readme_runs_in_order(hub, monkeypatch, capsys):
    bundled = td.load_demo_pair()[0]
    scope = run("README.md")
    assert hub[1:] == [
        "torch_dflash.load_demo_pair",
        "jax_bridge.load Qwen/Qwen3-4B",
        "DFlashDraftModel.from_pretrained z-lab/Qwen3-4B-DFlash-b16",
    ]
    plain = bundled.generate(**scope["inputs"], max_new_tokens=128, do_sample=False)
    assert torch.equal(scope["out"].sequences, plain) and torch.equal(scope["ids"], plain)
    said = capsys.readouterr().out.splitlines()
    numbers = " ".join(map(str, plain[0, 4:].tolist()))
    assert said[:2] == [numbers, "same text: True"] and said[2].startswith("target passes: ")
    assert said[3] == numbers  # streamed


def test_the_readme_is_short():
    text = TEXT["README.md"]
    assert len(text.splitlines()) <= 150 and len(re.sub(r"<!--.*?-->", "", text).split()) <= 1300


def test_every_command_that_is_shown_is_one(tmp_path, monkeypatch):
    text = "\n".join(TEXT.values()).replace("\\\n", " ")
    for name, value in ((" ID", " 16"), ('-id ID"', '-id 16"'), ("$layers", "2"), ("$block", "8")):
        text = text.replace(name, value)
    lines = re.findall(r"^ *(?:accelerate .*)?torch-dflash (.*)$", text, flags=re.M)
    assert len(lines) > 15
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs/results").mkdir(parents=True)
    for line in lines:
        assert isinstance(parse(shlex.split(line, comments=True)), Invocation), line


@pytest.mark.parametrize("page", [*PAGES, CARD])
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT[page]):
        name, _, anchor = link.partition("#")
        found = (ROOT / page).parent.joinpath(name).resolve() if name else ROOT / page
        assert found.exists(), link
        if anchor:
            assert anchor in anchors(str(found.relative_to(ROOT))), link


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_is_there(page):
    """Paths of the repository, tests and make targets in code font exist; `a/*.py` is a pattern."""
    named = r"`((?:tests|benchmarks|torch_dflash|jax_bridge|examples|data)/[\w./*-]+)`"
    for name in re.findall(named, TEXT[page]):
        assert list(ROOT.glob(name)), name
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for name in re.findall(r"`make ([a-z-]+)", TEXT[page]):
        assert name in targets, name


def test_no_page_says_where_it_was_written():
    for page, text in TEXT.items():
        assert not re.search(r"/(?:home|opt|root|tmp)/", text), page  # no path of one machine


def test_every_page_is_on_the_site():
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("exclude_docs:")[0]
    assert sorted(re.findall(r": ([\w/-]+\.md)$", nav, flags=re.M)) == sorted(
        page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")
    )


def test_the_api_page_names_what_is_public():
    listed = re.findall(r"^::: (\w+)\.(\w+)$", TEXT["docs/api.md"], flags=re.M)
    public = {("torch_dflash", name) for name in td.__all__ if name != "__version__"}
    tree = ast.parse((ROOT / "jax_bridge/__init__.py").read_text())
    names = [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    public |= {("jax_bridge", name) for name in names if name and not name.startswith("_")}
    assert len(listed) == len({*listed}) and {*listed} == public


def test_a_link_out_of_the_site_leads_to_the_repository():
    hooks = runpy.run_path(str(ROOT / "docs/site_hooks.py"))

    def on_site(text, name):
        return hooks["on_page_markdown"](text, page=SimpleNamespace(file=SimpleNamespace(src_uri=name)))

    for page in PAGES:
        if page.startswith("docs/"):
            name = page.removeprefix("docs/")
            assert f"]({'../' * (1 + name.count('/'))}" not in on_site(TEXT[page], name), page
    for name, up in (("tpu.md", "../"), ("tables/tpu.md", "../../")):
        link = on_site(f"[kernels]({up}jax_bridge/kernels/halves.py)", name)
        assert link == f"[kernels]({hooks['REPOSITORY']}/blob/main/jax_bridge/kernels/halves.py)"
    assert on_site("[limits](../limits.md)", "tables/tpu.md") == "[limits](../limits.md)"


def test_examples_of_docstrings_are_code():
    for package in (td, jb):
        for path in (ROOT / package.__name__).rglob("*.py"):
            assert ">>> #" not in path.read_text(), path  # Markdown shows a heading


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/doctor.md", CARD, "examples/dflash.ipynb"]
)
def test_a_text_is_the_targets_own_up_to_ties(page):
    text = " ".join(re.sub(r'\\n|[",]', " ", (ROOT / page).read_text()).split())
    assert "up to ties in half precision" in text


def test_what_is_printed_after_a_stream_begins_a_line():
    """Pieces end no line: a reader would take a number after them for a part of the answer."""
    code = [*sum(BLOCKS.values(), []), *(path.read_text() for path in (ROOT / "examples").glob("*.py"))]
    after = [
        re.search(r"^print\(.*", text.partition('end=""')[2], flags=re.M) for text in code if 'end=""' in text
    ]
    assert len(after) > 2 and all(line and re.search(r'"\\n|final=True', line[0]) for line in after)


def test_every_line_of_a_docstrings_section_names_something_or_is_indented():
    """Otherwise the API page cannot be built: a second line needs four spaces more than the first."""
    section = r"^(?:Args|Attributes|Raises):\n((?:(?:    .*)?\n?)+)"
    for package in (td, jb):
        for path in (ROOT / package.__name__).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                    continue
                for lines in re.findall(section, ast.get_docstring(node) or "", flags=re.M):
                    for line in re.findall(r"^    \S.*", lines, flags=re.M):
                        assert re.match(r"    [\w*., ()-]+:", line), f"{path.name}, {node.name}: {line}"
