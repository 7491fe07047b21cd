"""EAGLE-3 drafts what its definition says, token by token in both runtimes, and changes no text."""

import json
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.own_texts import OwnTexts
from support.refusals import refuses
from support.scripted import own_text, pad, run
from support.states import look
from support.tiny import VOCAB, randomise, small_pair

import torch_dflash as td
from torch_dflash.decode import draft
from torch_dflash.integrations.vllm.drafter import PagedDrafter
from torch_dflash.proposers.checkpoints import drafter_of, load_drafter_config
from torch_dflash.proposers.eagle3.model import Eagle3Config, Eagle3DraftModel
from torch_dflash.proposers.eagle3.proposer import Eagle3Proposer
from torch_dflash.proposers.eagle3.unrolled import unrolled_states

PROMPTS = [[5, 17, 80, 33] * 2, [3, 1, 4], [9]]
NEW, WIDTH = 20, 5
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
SAMPLED = {"do_sample": True, "temperature": [0.0, 0.3, 1.0], "top_k": 0, "seed": 3}
SIZES = {"max_length": 64, "batch_size": 3}


def config(**fields):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    sizes |= {"num_target_layers": 2, "target_layer_ids": [0, 1], "block_size": WIDTH}
    return Eagle3Config(**(sizes | fields))


@cache
def pair():
    """Target and drafter that mostly choose between the same two tokens: half the drafts are right."""
    target, _ = small_pair("llama", agree=12.0)
    return target, randomise(Eagle3DraftModel(config()), 21)


TEXTS = OwnTexts(lambda: pair()[0], PROMPTS, NEW, SAMPLED, SIZES)
own, sampled, made = TEXTS.own, TEXTS.sampled, TEXTS.made


@cache
def engine(runtime):
    return made(pair()[1], runtime)


def begun(engine, prompts=PROMPTS):
    return engine.start(*pad(prompts), **GREEDY)


def check(engine):
    greedy, drawn = TEXTS.check(engine)
    return greedy.acceptance_lengths, drawn.acceptance_lengths


# The definition, for one text: no cache, no batch, every row of every pass computed anew.


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turn(heads, theta):
    """Heads [Q, R, D] at positions 0 .. R-1."""
    half = heads.shape[-1] // 2
    angle = torch.arange(heads.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )


def features_of(text):
    """The outputs [T, nH] of the target's blocks, side by side."""
    found = []
    hooks = [
        layer.register_forward_hook(lambda module, args, out: found.append(out[0].reshape(len(text), -1)))
        for layer in pair()[0].model.layers
    ]
    pair()[0](torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return torch.cat(found, dim=-1)


class Definition:
    """The drafter's states after ``text``, whose last token is the anchor."""

    def __init__(self, drafter, text):
        self.config, self.weights = drafter.config, drafter.state_dict()
        parts = features_of(text[:-1])
        if self.config.fc_norm:
            norms = (self.weights[f"fc_norm.{at}.weight"] for at in range(2))
            parts = torch.cat(
                [rms(part, norm) for part, norm in zip(parts.chunk(2, -1), norms, strict=True)], -1
            )
        if self.config.norm_before_fc:
            parts = rms(parts, self.weights["input_norm.weight"])
        self.states = list(parts @ self.weights["fc.weight"].T)
        self.tokens = list(text[1:])

    def product(self, name, x):
        name = f"layers.0.{name}"
        bias = self.weights.get(f"{name}.bias")
        out = x @ self.weights[f"{name}.weight"].T
        return out if bias is None else out + bias

    def heads(self, name, x):
        found = self.product(f"self_attn.{name}_proj", x).view(len(x), -1, 16).transpose(0, 1)
        if name == "v":
            return found.repeat_interleave(2, 0)
        if self.config.qk_norm:
            found = rms(found, self.weights[f"layers.0.self_attn.{name}_norm.weight"])
        found = turn(found, self.config.rope_parameters["rope_theta"])
        return found if name == "q" else found.repeat_interleave(2, 0)

    def norm(self, name, x):
        return rms(x, self.weights[f"layers.0.{name}.weight"])

    def last(self):
        """The layer's output at the last row."""
        table = self.weights.get("embed_tokens.weight", pair()[0].get_input_embeddings().weight)
        states, embedded = torch.stack(self.states), table[torch.tensor(self.tokens)]
        normed = self.norm("hidden_norm", states)
        x = torch.cat([self.norm("input_layernorm", embedded), normed], -1)
        scores = self.heads("q", x) @ self.heads("k", x).transpose(1, 2) / 4
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        if "sliding_attention" in self.config.layer_types:
            seen = seen.triu(1 - self.config.sliding_window)
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ self.heads("v", x)
        out = self.product("self_attn.o_proj", out.transpose(0, 1).flatten(1))
        out = out + (normed if self.config.norm_before_residual else states)
        y = self.norm("post_attention_layernorm", out)
        gated = F.silu(self.product("mlp.gate_proj", y)) * self.product("mlp.up_proj", y)
        return (out + self.product("mlp.down_proj", gated))[-1]

    def passes(self, count, said=()):
        """``count`` (normed state, token); the passes read the tokens ``said``, or those drafted."""
        head = self.weights.get("lm_head.weight", pair()[0].get_output_embeddings().weight)
        found = []
        for trip in range(count):
            state = self.last()
            normed = rms(state, self.weights["norm.weight"])
            token = int((head @ normed).argmax())
            token += int(self.weights["d2t"][token]) if "d2t" in self.weights else 0
            found.append((normed, token))
            self.states.append(normed if self.config.norm_output else state)
            self.tokens.append(said[trip] if said else token)
        return found


VARIANTS = {
    "plain": {},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "each tap": {"fc_norm": True, "qk_norm": True, "attention_bias": True},
    "window": {"layer_types": ["sliding_attention"], "sliding_window": 3},
    "own tables": {"own_embedding": True, "own_head": True, "draft_vocab_size": 40},
}


@torch.no_grad()
def variant(name):
    drafter = pair()[1] if name == "plain" else randomise(Eagle3DraftModel(config(**VARIANTS[name])), 21)
    if drafter.d2t is not None:
        head = pair()[0].get_output_embeddings().weight
        usual = head.norm(dim=1).topk(2).indices.tolist()
        even = [token for token in range(0, VOCAB, 2) if token not in usual]
        ids = torch.tensor(sorted(usual + even[:38]))
        drafter.d2t.copy_(ids - torch.arange(40))
        drafter.lm_head.weight.copy_(head[ids])
    return drafter


@torch.no_grad()
def replay_of(drafter, texts, anchors):
    ids = torch.tensor([text + [0] * (max(map(len, texts)) - len(text)) for text in texts])
    features = torch.stack([F.pad(features_of(text), (0, 0, 0, ids.shape[1] - len(text))) for text in texts])
    embedding = pair()[0].get_input_embeddings().weight
    return unrolled_states(drafter, ids, features, torch.tensor(anchors), embedding, WIDTH - 1)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_unrolled_states_are_those_of_the_definition(name):
    drafter = variant(name)
    texts, anchors = [PROMPTS[row] + own(row) for row in (0, 1)], [[2, 6, 22, -1], [2, 3, 9, 21]]
    states = replay_of(drafter, texts, anchors)
    assert states.shape == (2, 4, WIDTH - 1, 32)
    for row, text in enumerate(texts):
        for number, at in enumerate(anchors[row]):
            if at < 1:
                continue  # no anchor
            count = min(WIDTH - 1, len(text) - at)
            said = (text + [0] * WIDTH)[at + 1 :]
            wanted = [state for state, _ in Definition(drafter, text[: at + 1]).passes(count, said)]
            for depth, state in enumerate(wanted):
                assert torch.allclose(states[row, number, depth], state, atol=1e-5)


@torch.no_grad()
def test_unrolled_passes_have_gradients_of_all_weights():
    drafter = variant("normed")
    with torch.enable_grad():
        ids = torch.tensor([PROMPTS[0]])
        states = unrolled_states(
            drafter, ids, torch.randn(1, 8, 64), torch.tensor([[3, 5]]), torch.randn(VOCAB, 32), 3
        )
        drafter.logits(states, partial(F.linear, weight=torch.randn(VOCAB, 32))).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())


@torch.no_grad()
def decoding_is_the_definition(drafter, runtime="eager", prompts=PROMPTS):
    """Drafts of all rounds, against the definition and against the replay of the texts."""
    decoded = made(drafter, runtime, prefill_chunk_size=16)
    params, state, rounds = decoded.runtime.refresh(decoded.tensors()), begun(decoded, prompts), []
    while not state.done.all():
        drafted, _ = decoded.pair.run(draft, params, state)
        for row in range(3):
            text = state.tokens[row, : state.length[row] + 1].tolist()
            passes = Definition(drafter, text).passes(WIDTH - 1)
            assert drafted.tokens[row].tolist() == [token for _, token in passes]
            assert torch.allclose(drafter.norm(state.proposer.state[row]), passes[0][0], atol=1e-5)
            rounds.append((row, len(text) - 1, drafted.tokens[row].tolist()))
        state = decoded.advance(state)
    texts = [state.tokens[row, : state.length[row] + 1].tolist() for row in range(3)]
    head, longest = pair()[0].get_output_embeddings(), max(map(len, texts))
    every = [[*range(1, len(text)), *[-1] * (longest - len(text))] for text in texts]
    replayed = drafter.choose(replay_of(drafter, texts, every).flatten(0, 1), None, head)
    replayed = replayed.unflatten(0, (3, -1)).tolist()
    right = 0
    for row, at, tokens in rounds:
        for depth, token in enumerate(tokens):  # as far as the text that was decoded is the text that is read
            assert token == replayed[row][at - 1][depth]
            if texts[row][at + 1 + depth : at + 2 + depth] != [token]:
                break
            right += 1
    assert right > 10


@pytest.mark.parametrize("name", ["plain", "normed", "window", "own tables"])
def test_decoding_drafts_what_definition_and_replay_draft(name):
    decoding_is_the_definition(variant(name))


LONG = [[5, 17, 80, 33] * 5 + [2], [3, 1, 4], [9, 7] * 16 + [1]]
"""Of two and three chunks."""


def test_a_chunks_last_row_reads_the_token_that_comes_with_the_next_chunk(monkeypatch):
    decoding_is_the_definition(pair()[1], prompts=LONG)
    right = Eagle3Proposer.ingest

    def same_at_the_end(self, pstate, features, ids, next_ids, count, embed):
        inner = torch.arange(ids.shape[1]) < 15
        return right(self, pstate, features, ids, torch.where(inner, next_ids, ids), count, embed)

    monkeypatch.setattr(Eagle3Proposer, "ingest", same_at_the_end)
    decoding_is_the_definition(pair()[1])  # shorter prompts do not tell
    with pytest.raises(AssertionError):
        decoding_is_the_definition(pair()[1], prompts=LONG)


def same_token(patch):
    right = Eagle3Proposer.observe
    patch.setattr(
        Eagle3Proposer,
        "observe",
        lambda self, pstate, features, ids, next_ids, count, embed: right(
            self, pstate, features, ids, ids, count, embed
        ),
    )


def drafts_count_as_committed(patch):
    right = Eagle3Proposer._read

    def wrong(self, layer, start, *given):
        return right(self, layer, start + (0 if len(given) == 3 else self.width - 2), *given)

    patch.setattr(Eagle3Proposer, "_read", wrong)


def a_rejected_rows_feature(patch):
    right = Eagle3Proposer.observe

    def wrong(self, pstate, features, ids, next_ids, count, embed):
        state = right(self, pstate, features, ids, next_ids, (count + 1).clamp(max=ids.shape[1]), embed)
        return type(state)(state.layer, pstate.length + count, state.state)

    patch.setattr(Eagle3Proposer, "observe", wrong)


@pytest.mark.parametrize("mutate", [same_token, drafts_count_as_committed, a_rejected_rows_feature])
def test_a_wrong_token_row_or_feature_is_seen(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        decoding_is_the_definition(pair()[1])


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_text_is_the_targets_own(runtime):
    greedy, drawn = check(engine(runtime))
    assert drawn[0] == greedy[0]  # a greedy row beside sampled ones
    assert all(max(row) > 3 for row in greedy) and max(map(max, drawn[1:])) > 3
    assert (greedy, drawn) == check(engine("eager"))


def test_a_round_is_one_program():
    check(engine("xla"))
    before = engine("xla").runtime.compilations
    run(engine("xla"), [[7, 7], [8] * 9, [1, 2, 3]], max_new_tokens=9, **SAMPLED)
    assert engine("xla").runtime.compilations == before


@pytest.mark.parametrize("kind", ["narrow", "auto", "paged", "union", "tree of a union"])
def test_text_is_the_targets_own_whatever_stands_around(kind):
    drafter, lookup = pair()[1], td.NGramProposer(4)
    options = {"narrow": {"block_size": 3, "verify_width": 2}, "auto": {"verify_width": "auto"}}
    options["paged"] = {"cache": "paged"}
    unions = {"union": td.Union(lookup, drafter), "tree of a union": td.Union(lookup, drafter, rows=8)}
    accepted = check(made(unions.get(kind, drafter), **options.get(kind, {})))
    assert max(map(max, accepted[0])) > (1 if kind in ("narrow", "auto") else 2)
    if kind == "paged":
        assert accepted == check(engine("eager"))


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_streamed_and_saved_texts_go_on(runtime, tmp_path):
    used, streamed = engine(runtime), [[], [], []]
    for gained in used.stream(*pad(PROMPTS), **GREEDY):
        for row, tokens in enumerate(gained):
            streamed[row] += tokens
    assert streamed == [own(row) for row in range(3)]
    wanted = run(engine("eager"), PROMPTS, max_new_tokens=NEW, do_sample=False)[1].acceptance_lengths
    other = engine({"eager": "xla", "xla": "eager"}[runtime])
    td.save_state(used.advance(begun(used)), tmp_path / "state", used)
    state = td.load_state(tmp_path / "state", other)
    while not look(other.runtime, state).done.all():
        state = other.advance(state)
    seen = look(other.runtime, state)
    for row, prompt in enumerate(PROMPTS):
        assert seen.tokens[row, len(prompt) :][:NEW].tolist() == own(row)
        # The last round may have gained more than the limit allows.
        assert seen.accepted[row, : seen.rounds[row] - 1].tolist() == wanted[row][:-1]


def chats_go_back(**options):
    engine = made(pair()[1], batch_size=1, **options)
    session, text = engine.session(), PROMPTS[0]
    asked = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    for kept, more in ((99, [7, 8]), (12, [40]), (9, [80, 3]), (3, [])):
        text = text[:kept] + more
        got = [token for gain in session.gains(text, 0, **asked) for token in gain.tokens]
        alone, stats = run(engine, [text], max_new_tokens=8, do_sample=False)
        assert got == alone[0] == own_text(pair()[0], text, 8)
        assert session.stats.acceptance_lengths == stats.acceptance_lengths
        assert session.stats.prefilled < len(text) or kept == 99
        text = text + got
    return session


def test_a_chat_goes_back_and_drafts_as_a_fresh_row():
    chats_go_back()


def test_a_row_keeps_no_embedding_of_a_token_that_was_taken_back():
    """A row holds the embedding of the token behind, so a chat that parts there reads the row again."""
    drafter = pair()[1]
    engine = made(drafter, batch_size=1)
    session, asked = engine.session(), {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    for text in ([5, 17, 80, 33], [5, 17, 3, 9]):
        list(session.gains(text, 0, **asked))
    assert session.stats.prefilled == 3  # 17, whose row held the embedding of 80, and what is new
    fresh = engine.start(torch.tensor([[5, 17, 3, 9]]), **asked)
    assert torch.allclose(
        session._state.proposer.layer.key[:, :, :4], fresh.proposer.layer.key[:, :, :4], atol=1e-6
    )


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_row_that_ended_is_given_to_the_next_prompt(runtime):
    prompts = [*PROMPTS, [8, 8], [40, 2, 6, 1, 1], [77]]
    counts = [{"max_new_tokens": count} for count in (3, 12, 7, 9, 4, 10)]
    found = engine(runtime).map(prompts, counts, do_sample=False, eos_token_id=None)
    for one, prompt, count in zip(found, prompts, counts, strict=True):
        assert one.new_tokens[0] == own_text(pair()[0], prompt, count["max_new_tokens"])


# Checkpoints.


def test_a_checkpoint_is_written_in_speculators_layout_and_read_whole(tmp_path):
    target = pair()[0]
    for number, name in enumerate(VARIANTS):
        drafter, folder = variant(name), tmp_path / str(number)
        drafter.save_pretrained(folder)
        loaded = td.load_drafter(folder, target)
        assert type(loaded) is Eagle3DraftModel
        assert loaded.config.to_diff_dict() == drafter.config.to_diff_dict()
        for field in (*VARIANTS[name], "target_layer_ids", "block_size", "num_target_layers"):
            assert getattr(loaded.config, field) == getattr(drafter.config, field)
        assert loaded.state_dict().keys() == drafter.state_dict().keys()
        for tensor, kept in drafter.state_dict().items():
            assert loaded.state_dict()[tensor].equal(kept), tensor
        assert type(drafter_of(load_drafter_config(folder))) is Eagle3DraftModel
        read = json.loads((folder / "config.json").read_text())
        assert read["eagle_aux_hidden_state_layer_ids"] == [1, 2]
        assert read["transformer_layer_config"]["model_type"] == ("qwen3" if name == "each tap" else "llama")


PUBLISHED = {
    "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 40, "has_no_defaults_at_init": False, "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 2], "embed_requires_grad": False, "target_hidden_size": None,
    "speculators_model_type": "eagle3", "speculators_version": "0.2.0", "torch_dtype": "float32",
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
    },
    "transformer_layer_config": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": VOCAB,
        "mlp_bias": False,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "pretraining_tp": 1,
    },
}  # fmt: skip
"""A config.json as the library writes them, at reduced size."""


def publish(folder, network=(), tensors=(), **fields):
    changed = PUBLISHED | fields
    if network != () and isinstance(changed["transformer_layer_config"], dict):
        changed["transformer_layer_config"] = changed["transformer_layer_config"] | dict(network)
    changed = {name: value for name, value in changed.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(changed))
    drafter = variant("own tables")
    state = drafter.state_dict()
    state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.arange(40) + state["d2t"], True)
    state |= {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(40, 32)}
    state |= dict(tensors)
    save_file(
        {name: one.contiguous() for name, one in state.items() if one is not None},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return drafter


def test_a_published_drafter_is_read_by_its_fields(tmp_path, recwarn):
    drafter = publish(tmp_path)
    loaded = td.load_drafter(tmp_path)
    assert not [note for note in recwarn if "not known here" in str(note.message)]
    read = loaded.config
    assert (read.block_size, read.norm_before_residual, read.qk_norm) == (4, True, False)
    assert read.target_layer_ids == [0, 1] and read.own_embedding and read.own_head
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    drafter.layers[0].norms_residual = True
    ids, features = torch.tensor([PROMPTS[0]]), torch.randn(1, 8, 64)
    given = ids, features, torch.tensor([[3]]), torch.zeros(VOCAB, 32), 2
    assert unrolled_states(loaded, *given).equal(unrolled_states(drafter, *given))
    publish(tmp_path, tensors={"embed_tokens.weight": None})  # the target's, then
    assert not td.load_drafter(tmp_path, pair()[0]).config.own_embedding
    with pytest.warns(UserWarning, match="transformer_layer_config.odd=1, draft_depth=3 in"):
        publish(tmp_path, draft_depth=3, network={"odd": 1})
        td.load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network": {"num_hidden_layers": 2}}, "num_hidden_layers=2"),
        ({"network": {"mlp_bias": True}}, "mlp_bias=True"),
        ({"network": {"model_type": "gemma2"}}, "model_type='gemma2' in transformer_layer_config"),
        ({"network": {"num_attention_heads": 3}}, "number of attention heads (3)"),
        ({"transformer_layer_config": 3}, "transformer_layer_config=3"),
        ({"draft_vocab_size": ...}, "draft_vocab_size is missing"),
        ({"draft_vocab_size": 39}, "lm_head.weight"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids is missing"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, "eagle_aux_hidden_state_layer_ids=[0, 2]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "target_layer_ids=[0, 1, 2]"),
        ({"target_hidden_size": 48}, "target_hidden_size=48"),
        ({"norm_output": "yes"}, "norm_output='yes'"),
        ({"norm_before_fc": True}, "missing_keys=['input_norm.weight']"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm=True beside norm_before_fc=True"),
        ({"tensors": {"norm.bias": torch.zeros(32)}}, "unexpected_keys=['norm.bias']"),
        ({"tensors": {"d2t": torch.full((40,), 90)}}, "d2t in"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_honoured_are_named(tmp_path, changes, words):
    publish(tmp_path, **changes)
    with refuses(ValueError, words):
        td.load_drafter(tmp_path)


def test_other_kinds_of_drafters_are_told_apart(tmp_path):
    publish(tmp_path)
    with refuses(ValueError, "speculators_model_type='eagle3'", "torch_dflash.load_drafter"):
        td.DFlashDraftModel.from_pretrained(tmp_path)
    with refuses(ValueError, "a drafter of Eagle3Config: pass a DFlash, DFlash2 or DSpark drafter"):
        PagedDrafter(pair()[1], 2)
    target, drafter = small_pair("llama")
    drafter.save_pretrained(tmp_path)
    with refuses(ValueError, "not an EAGLE-3 drafter"):
        Eagle3DraftModel.from_pretrained(tmp_path)
    with refuses(TypeError, "drafter=Eagle3DraftModel", "a tree is made of a drafter's block"):
        td.TreeProposer(pair()[1])
    other = type(target.config)(**target.config.to_dict() | {"num_hidden_layers": 4})
    with refuses(ValueError, "num_target_layers=2 in the drafter", "4 layers"):
        td.compile(type(target)(other), pair()[1])
    with refuses(ValueError, "block_size=1"):
        made(pair()[1], block_size=1)


def test_default_taps_are_those_of_the_paper():
    assert config(num_target_layers=32, target_layer_ids=None).target_layer_ids == [1, 15, 28]
    assert config(num_target_layers=4, target_layer_ids=None).target_layer_ids == [1, 2, 3]
