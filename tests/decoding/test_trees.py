"""Each committed token is the target's own for any tree of drafts."""

import random
from functools import cache

import pytest
import torch
from support.families import MORE
from support.scripted import Scripted, assert_same_text, own_text, run
from support.tabled import Tabled, with_path
from support.tiny import BASE, VOCAB, make_target

import torch_dflash as td
from torch_dflash.accept import accept_tree
from torch_dflash.cache import spec as fresh
from torch_dflash.cache import view
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.trees import Tree, read_tree
from torch_dflash.ops.windows import positions
from torch_dflash.targets.adapter import Target

NEW, ROWS, DEPTH = 24, 8, 4
PROMPTS = [[(7 * i + 3) % 89 for i in range(21)], [3, 1, 4], [9, 2, 6, 40, 41, 42, 9, 2, 6]]
SIZES = {"max_length": 64, "batch_size": 3, "prefill_chunk_size": 32}
KINDS = {"eager static": ("eager", "static", "qwen3"), "eager paged": ("eager", "paged", "gpt_oss")}
KINDS |= {"xla static": ("xla", "static", "gpt_oss"), "xla paged": ("xla", "paged", "qwen3")}
SAMPLED = {"do_sample": True, "temperature": [0.0, 1.0, 4.0], "top_k": 0, "seed": 3}


@cache
def target(family):
    return make_target(family)


@cache
def own(family, row, eos=()):
    return own_text(target(family), PROMPTS[row], NEW, eos)


@cache
def sampled(family):
    plain = td.compile(target(family), None, runtime="eager", **SIZES)
    return run(plain, PROMPTS, max_new_tokens=NEW, **SAMPLED)[0]


@pytest.fixture(scope="module", params=KINDS)
def tabled(request):
    """(engine, its proposer, the target's family)."""
    runtime, kind, family = KINDS[request.param]
    proposer = Tabled(3, 128, ROWS, DEPTH)
    engine = td.compile(target(family), proposer, runtime=runtime, cache=kind, page_size=16, **SIZES)
    return engine, proposer, family


def check(tabled, tree, **options):
    engine, proposer, family = tabled
    proposer.fill([p + own(family, row) for row, p in enumerate(PROMPTS)], tree)
    texts, stats = run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False, **options)
    for row, text in enumerate(texts):
        assert_same_text(engine, PROMPTS[row], own(family, row), text, stats.acceptance_lengths[row])
    return stats


def test_the_continuation_in_a_random_branch_is_accepted_whole(tabled):
    stats = check(tabled, with_path(ROWS - 1, DEPTH))
    deep = [count for row in stats.acceptance_lengths for count in row[:-1]]
    assert set(deep) <= {3, 4, 5} and max(deep) == DEPTH + 1 and stats.mean_acceptance_length > 3


def test_wrong_branches_cost_rounds_and_nothing_else(tabled):
    stats = check(tabled, with_path(ROWS - 1, DEPTH, right=False))
    assert stats.mean_acceptance_length == 1


def test_a_tree_that_is_none_ends_where_it_ceases_to_be_one(tabled):
    draw = random.Random(1)

    def malformed(ahead, _):
        tokens, parent = with_path(ROWS - 1, DEPTH)(ahead, draw)
        for node in range(len(parent)):
            if draw.random() < 0.3:
                parent[node] = draw.randint(-3, ROWS)
        return tokens, parent

    assert check(tabled, malformed).mean_acceptance_length > 1


def test_sampled_text_is_that_of_plain_decoding(tabled):
    engine, proposer, family = tabled
    texts = sampled(family)
    proposer.fill([p + text for p, text in zip(PROMPTS, texts, strict=True)], with_path(ROWS - 1, DEPTH))
    said, stats = run(engine, PROMPTS, max_new_tokens=NEW, **SAMPLED)
    assert said == texts and stats.mean_acceptance_length > 3


def test_stop_ids_and_limits_in_mid_path(tabled):
    engine, proposer, family = tabled
    proposer.fill([p + own(family, row) for row, p in enumerate(PROMPTS)], with_path(ROWS - 1, DEPTH))
    stops = [(own(family, row)[4 + 3 * row],) for row in range(3)]
    texts, stats = run(engine, PROMPTS, max_new_tokens=NEW, eos_token_id=[list(one) for one in stops])
    for row, text in enumerate(texts):
        wanted = own(family, row, stops[row])
        assert text == wanted + [0] * (len(text) - len(wanted))
        assert sum(stats.acceptance_lengths[row]) == len(wanted) - 1
    texts, _ = run(engine, PROMPTS, max_new_tokens=[2, 7, 12], do_sample=False)
    for row, count in enumerate((2, 7, 12)):
        assert texts[row] == own(family, row)[:count] + [0] * (12 - count)


def test_a_round_that_gains_nothing_keeps_no_branch(tabled):
    """A wide tree of depth 1 finds the pick among all siblings."""

    def siblings(ahead, draw):
        tokens = draw.sample(range(VOCAB - 1), ROWS - 1)
        tokens[draw.randrange(ROWS - 1)] = ahead[0]
        return tokens, [-1] * (ROWS - 1)

    stats = check(tabled, siblings)
    assert stats.mean_acceptance_length > 1.9


class Short(Scripted):  # a chain of a proposer that may draft trees
    depth = 5


def test_a_chain_is_a_tree_without_branches():
    proposer = Short(3, 128, 6)
    engine = td.compile(target("qwen3"), proposer, runtime="eager", **SIZES)
    proposer.say([p + own("qwen3", row) for row, p in enumerate(PROMPTS)])
    texts, stats = run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert texts == [own("qwen3", row) for row in range(3)]
    assert stats.acceptance_lengths == [[6, 6, 6, 5]] * 3


def test_expanded_latents_and_more_rows_than_the_kernels_take_are_refused():
    cls, config, extra = MORE["deepseek_v3"]
    latent = cls(config(**(BASE | extra)))
    latent.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(ValueError, match="a tree of drafts with layers of kind 'latent'"):
        td.compile(latent, Tabled(1, 128, ROWS, DEPTH), runtime="eager", max_length=64, verify=False)
    with pytest.raises(ValueError, match="verify_width=65, depth=4: a tree of drafts has at most 64 rows"):
        td.compile(target("qwen3"), Tabled(1, 128, 65, DEPTH), runtime="eager", max_length=64)


def test_a_tree_of_a_proposer_without_depth_is_refused():
    proposer = Tabled(1, 128, ROWS, DEPTH)
    proposer.depth = None
    engine = td.compile(target("qwen3"), proposer, runtime="eager", max_length=64)
    with pytest.raises(ValueError, match=r"Draft\.parent is set: .* has no depth"):
        run(engine, PROMPTS[:1], max_new_tokens=4)


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_a_branch_that_overflows_changes_no_other(kind, monkeypatch):
    """The values of the id 96 are NaN; each node off the right path has this id."""
    model = make_target("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = torch.inf
    texts = [own_text(model, prompt, NEW) for prompt in PROMPTS]
    assert all(0 < max(text) < 96 for text in texts)
    proposer = Tabled(3, 128, ROWS, DEPTH)
    engine = td.compile(model, proposer, runtime="eager", cache=kind, page_size=16, **SIZES)

    def beside(ahead, draw):
        tokens, parent = with_path(ROWS - 1, DEPTH)(ahead, draw)
        return [token if token in ahead[:DEPTH] else 96 for token in tokens], parent

    proposer.fill([p + text for p, text in zip(PROMPTS, texts, strict=True)], beside)
    said, stats = run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert said == texts and stats.mean_acceptance_length > 3
    monkeypatch.setattr(view, "finite_values", lambda key, value: (key, value))
    assert run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False)[0] != texts


# --- the tree and the walk, against loops -------------------------------------------------------------------


def by_hand(parent, valid, deepest):
    """(Nodes before the first that breaks the tree, the path of each)."""
    path, paths = [], []
    for node, above in enumerate(parent[:valid]):
        if above != -1 and above not in path:
            break
        path = [] if above == -1 else path[: path.index(above) + 1]
        if len(path) == deepest:
            break
        path = [*path, node]
        paths.append(path)
    return paths


def walked(tokens, paths, picks):
    """Rows of the deepest path on which each token is the pick of the row before."""
    best = [0]
    for path in paths:
        rows = [0, *(node + 1 for node in path)]
        right = all(tokens[node - 1] == picks[before] for before, node in zip(rows, rows[1:], strict=False))
        best = rows if right and len(rows) > len(best) else best
    return best


def test_trees_and_walks_are_those_by_hand():
    draw = random.Random(0)
    for _ in range(300):
        nodes, deepest = draw.randint(1, 12), draw.randint(1, 6)
        parent = [draw.randint(-2, nodes) for _ in range(nodes)]
        if draw.random() < 0.7:
            parent = with_path(nodes, deepest + draw.randint(0, 1))([1] * 9, draw)[1]
        valid = draw.randint(0, nodes)
        tree = read_tree(ints([parent]), ints([valid]), deepest)
        paths = by_hand(parent, valid, deepest)
        assert tree.valid.tolist() == [len(paths)]
        assert tree.depth[0, 1 : len(paths) + 1].tolist() == list(map(len, paths))
        for row, seen in enumerate(tree.seen()[0]):
            path = paths[row - 1] if 0 < row <= len(paths) else [row - 1] * bool(row)
            assert seen.nonzero()[:, 0].tolist() == sorted({0, *(node + 1 for node in path)})
        tokens, picks = ([draw.randint(0, 2) for _ in range(count)] for count in (nodes, nodes + 1))
        path, count = accept_tree(ints([tokens]), tree, ints([picks]), deepest)
        wanted = walked(tokens, paths, picks)
        assert int(count) == len(wanted) and path.shape == (1, min(deepest, nodes) + 1)
        assert path[0].tolist() == wanted + wanted[-1:] * (path.shape[1] - len(wanted))


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


# --- broken on purpose --------------------------------------------------------------------------------------


def broken(monkeypatch, kind):
    forward, take = Target.forward, fresh.take_rows

    def in_order(self, *args, tree=None, **more):
        if tree is not None:
            row = torch.arange(tree.depth.shape[1], dtype=torch.int32)
            tree = tree._replace(depth=row.expand_as(tree.depth))
        return forward(self, *args, tree=tree, **more)

    owner, name, change = {
        "a visible sibling": (Tree, "seen", lambda self: torch.ones_like(whole(self)).tril()),
        "position by row": (Target, "forward", in_order),
        "a path moved off by one": (
            fresh,
            "take_rows",
            lambda rows, path, dim: take(rows, (path - 1).clamp(min=0), dim),
        ),
        "window by row": (AttentionInputs, "at", property(lambda self: positions(self.start, ROWS))),
        "two parents": (Tree, "seen", lambda self: whole(self) | torch.roll(whole(self), 1, dims=1)),
    }[kind]
    monkeypatch.setattr(owner, name, change)


whole = Tree.seen


@pytest.mark.parametrize(
    "kind",
    ["a visible sibling", "position by row", "a path moved off by one", "window by row", "two parents"],
)
def test_a_broken_convention_changes_the_text(kind, monkeypatch):
    family = "gpt_oss" if kind == "window by row" else "qwen3"
    proposer = Tabled(3, 128, ROWS, DEPTH)
    engine = td.compile(target(family), proposer, runtime="eager", **SIZES)
    proposer.fill([p + own(family, row) for row, p in enumerate(PROMPTS)], with_path(ROWS - 1, DEPTH))
    right = run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert right[0] == [own(family, row) for row in range(3)]
    broken(monkeypatch, kind)
    wrong = run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert wrong[0] != right[0] or wrong[1].mean_acceptance_length < right[1].mean_acceptance_length - 0.5
