"""Medusa's heads draft by their formula from the last committed feature, and change no text."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.own_texts import OwnTexts
from support.refusals import refuses
from support.scripted import own_text, pad, run
from support.states import look
from support.tiny import VOCAB, randomise, small_pair

import torch_dflash as td
from torch_dflash.decode import draft
from torch_dflash.proposers.checkpoints import drafter_of, load_drafter_config
from torch_dflash.proposers.medusa.model import MedusaConfig, MedusaDraftModel
from torch_dflash.proposers.medusa.proposer import MedusaProposer
from torch_dflash.state import DraftRequest

PROMPTS = [[5, 17, 80, 33] * 2, [3, 1, 4], [9]]
NEW, HEADS = 20, 4
SAMPLED = {"do_sample": True, "temperature": [0.0, 0.3, 1.0], "top_k": 0, "seed": 3}
SIZES = {"max_length": 64, "batch_size": 3}


def config(**fields):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_target_layers": 2, "medusa_num_heads": HEADS}
    return MedusaConfig(**(sizes | {"medusa_num_layers": 2} | fields))


@cache
def pair():
    """Heads whose rows are the target's, so that half the drafts are right."""
    target, _ = small_pair("llama", agree=8.0)
    drafter = randomise(MedusaDraftModel(config()), 7)
    with torch.no_grad():
        for head in drafter.medusa_head:
            head[-1].weight.copy_(target.get_output_embeddings().weight)
    return target, drafter


TEXTS = OwnTexts(lambda: pair()[0], PROMPTS, NEW, SAMPLED, SIZES)
own, sampled, made = TEXTS.own, TEXTS.sampled, TEXTS.made


def check(engine):
    greedy, drawn = TEXTS.check(engine)
    return greedy.acceptance_lengths, drawn.acceptance_lengths


def begun(engine):
    return engine.start(*pad(PROMPTS), max_new_tokens=NEW, eos_token_id=None, do_sample=False)


def last_blocks(text):
    """The outputs [T, H] of the target's last block."""
    found = []
    hook = pair()[0].model.layers[-1].register_forward_hook(lambda module, args, out: found.append(out))
    pair()[0](torch.tensor([text]))
    hook.remove()
    return found[0].view(len(text), -1)


def by_formula(text):
    """Each head's logits [K, V] after ``text``, from the last block's output at its last token but one."""
    drafter, last = pair()[1], last_blocks(text[:-1])[-1]
    normed = last * torch.rsqrt(last.pow(2).mean() + 1e-6) * drafter.norm.weight
    logits, weights = [], drafter.state_dict()
    for head in range(HEADS):
        x = normed
        for block in range(2):
            name = f"medusa_head.{head}.{block}.linear."
            x = x + F.silu(weights[name + "weight"] @ x + weights[name + "bias"])
        logits.append(weights[f"medusa_head.{head}.2.weight"] @ x)
    return torch.stack(logits)


def nodes(pair, state):
    given = state.proposer, state.anchor, state.length, pair.target.embed, pair.target.head
    return pair.proposer.nodes(*given, DraftRequest(state.sampling, 16))[0]


@torch.no_grad()
def drafts_are_those_of_the_formula():
    engine = made(pair()[1])
    params, state = engine.runtime.refresh(engine.tensors()), begun(engine)
    for _ in range(3):
        drafted, _ = engine.pair.run(draft, params, state)
        scored = engine.pair.run(nodes, params, state)
        for row in range(3):
            text = state.tokens[row, : state.length[row] + 1].tolist()
            logs = by_formula(text).log_softmax(-1)
            assert drafted.tokens[row].tolist() == logs.argmax(-1).tolist()
            paths = [((), 0.0)]
            for token, above, score in zip(*(part[row].tolist() for part in scored), strict=True):
                path, before = paths[above + 1]
                paths.append(((*path, token), score))
                assert score == pytest.approx(before + float(logs[len(path), token]), abs=1e-4)
            assert len({path for path, _ in paths}) == len(paths) > 16
        state = engine.advance(state)


def test_each_head_drafts_its_own_position_by_the_formula():
    drafts_are_those_of_the_formula()


@torch.no_grad()
def test_logits_of_a_batch_of_features_are_those_of_the_formula():
    drafter, text = pair()[1], PROMPTS[0] + own(0)
    features = last_blocks(text).view(4, 7, -1)  # any axes in front
    logits = drafter.logits(drafter.states(features, HEADS))
    assert logits.shape == (4, 7, HEADS, VOCAB)
    for at in (3, 12):
        assert torch.allclose(logits.view(-1, HEADS, VOCAB)[at], by_formula(text[: at + 2]), atol=1e-4)


def head_of_the_next_depth(patch):
    right = MedusaDraftModel._head
    patch.setattr(MedusaDraftModel, "_head", lambda self, at: right(self, (at + 1) % HEADS))


def projection_of_the_next_depth(patch):
    right = MedusaDraftModel.logits
    patch.setattr(
        MedusaDraftModel, "logits", lambda self, hidden, head: right(self, hidden, head).roll(-1, -2)
    )


def a_rejected_rows_feature(patch):
    right = MedusaProposer.observe

    def wrong(self, pstate, features, ids, next_ids, count):
        last = right(self, pstate, features, ids, next_ids, (count + 1).clamp(max=ids.shape[1])).last
        return type(pstate)(last, pstate.length + count)

    patch.setattr(MedusaProposer, "observe", wrong)


def no_norm(patch):
    patch.setattr(pair()[1].norm.__class__, "forward", lambda self, x: x)


@pytest.mark.parametrize(
    "mutate", [head_of_the_next_depth, projection_of_the_next_depth, a_rejected_rows_feature, no_norm]
)
def test_a_wrong_head_or_feature_is_seen(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        drafts_are_those_of_the_formula()


@pytest.mark.parametrize("kind", ["chain", "narrow", "union", "union of chains"])
def test_text_is_the_targets_own(kind):
    drafter = pair()[1]
    options = {"block_size": 3, "verify_width": 2, "cache": "paged"} if kind == "narrow" else {}
    lookup = td.NGramProposer(4)
    unions = {"union": td.Union(lookup, drafter, rows=8), "union of chains": td.Union(lookup, drafter)}
    accepted = check(made(unions.get(kind, drafter), **options))
    assert max(map(max, accepted[0])) > (1 if options else 2)


def test_heads_without_projections_draft_through_the_targets_head(tmp_path):
    own = pair()[1]  # whose projections are copies of the target's head
    shared = MedusaDraftModel(config(original_lm_head=True))
    weights = {name: weight for name, weight in own.state_dict().items() if ".2.weight" not in name}
    shared.load_state_dict(weights)
    shared.save_pretrained(tmp_path)
    loaded = td.load_drafter(tmp_path, pair()[0])
    for wrapped in (lambda one: one, lambda one: td.TreeProposer(one, rows=8)):
        assert check(made(wrapped(loaded))) == check(made(wrapped(own)))


def test_a_tree_says_the_same_in_both_runtimes(tmp_path):
    tree = td.TreeProposer(pair()[1], rows=8)
    eager, lowered = made(tree), made(tree, "xla")
    accepted = check(eager)
    assert check(lowered) == accepted
    state = eager.advance(begun(eager))
    td.save_state(state, tmp_path / "state", eager)
    for engine in (eager, lowered):
        state = td.load_state(tmp_path / "state", engine)
        while not look(engine.runtime, state).done.all():
            state = engine.advance(state)
        seen = look(engine.runtime, state)
        for row, prompt in enumerate(PROMPTS):
            assert seen.tokens[row, len(prompt) :][:NEW].tolist() == own(row)
            assert seen.accepted[row, : seen.rounds[row]].tolist() == accepted[0][row]


def test_a_chat_goes_back_and_drafts_as_a_fresh_row():
    engine = made(pair()[1], batch_size=1)
    session, text = engine.session(), PROMPTS[0]
    asked = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    for kept, more in ((99, [7, 8]), (12, [40]), (3, [])):
        text = text[:kept] + more
        got = [token for gain in session.gains(text, 0, **asked) for token in gain.tokens]
        alone, stats = run(engine, [text], max_new_tokens=8, do_sample=False)
        assert got == alone[0] == own_text(pair()[0], text, 8)
        assert session.stats.acceptance_lengths == stats.acceptance_lengths
        text = text + got


def test_a_checkpoint_is_loaded_whole_or_refused(tmp_path):
    target, drafter = pair()
    drafter.save_pretrained(tmp_path)
    loaded = td.load_drafter(tmp_path, target)
    assert type(loaded) is MedusaDraftModel and loaded.config.target_layer_ids == [1]
    for name, tensor in drafter.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor), name
    assert type(drafter_of(load_drafter_config(tmp_path))) is MedusaDraftModel
    other = target.config.to_dict() | {"num_hidden_layers": 4}
    with refuses(ValueError, "num_target_layers=2 in the drafter", "the target has 4 layers"):
        td.load_drafter(tmp_path, type(target.config)(**other))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["medusa_head.1.2.weight"]
    save_file(tensors, file, {"format": "pt"})
    with refuses(ValueError, "missing_keys=['medusa_head.1.2.weight']", "a Medusa drafter"):
        td.load_drafter(tmp_path)


def test_an_untrained_head_begins_with_blocks_that_add_nothing():
    drafter = MedusaDraftModel(config())
    features = torch.randn(2, 32)
    assert drafter.states(features, 2)[:, 1].equal(drafter.norm(features))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": None}, "hidden_size=None: set the one"),
        ({"medusa_num_heads": 0}, "medusa_num_heads=0"),
        ({"target_layer_ids": [0, 1]}, r"target_layer_ids=[0, 1]: Medusa taps one layer"),
    ],
)
def test_configs_without_a_network_are_named(fields, words):
    with refuses(ValueError, words):
        MedusaDraftModel(config(**fields))


def test_more_rows_than_heads_are_refused():
    with refuses(ValueError, "block_size=6: the drafter has 4 heads; set at most 5"):
        made(pair()[1], block_size=6)
