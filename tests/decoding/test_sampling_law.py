"""The law of the sampled text is the target's own for any drafts, and the noise behind it is noise."""

import math
from functools import cache, partial

import jax
import pytest
import torch
from support.scripted import Scripted
from support.tiny import make_target
from transformers.generation import logits_process as theirs

import jax_bridge as jb
import torch_dflash as td
from jax_bridge._torchax import call_torch
from torch_dflash import decode
from torch_dflash.requests.rules import KINDS
from torch_dflash.sampling import gumbel, gumbel_of, mix, noise_bits

VOCAB = 7
ROWS, CALLS = 512, 12
SAMPLES = ROWS * CALLS
PROMPT = [3, 1, 4, 1, 5]
WIDTH = 3
# Seeds fix every statistic here; a right sampler lands beyond this bound once in 10^5.
LEVEL = 1e-5
HOT = {"temperature": 1.3, "top_k": 0}
# Options that change the law, a few at a time: among many at once most would have no effect.
RULES = {
    "nothing": {"temperature": 1.0, "top_k": 0},
    "top-k, top-p and a penalty": HOT | {"top_k": 4, "top_p": 0.95, "repetition_penalty": 0.7},
    "min-p and biases": HOT | {"min_p": 0.1, "sequence_bias": [[[2], 1.0], [[5, 2], 2.0]]},
    "typical-p and counts": HOT | {"typical_p": 0.9, "presence_penalty": -0.7, "frequency_penalty": 1.0},
    "epsilon and bans": HOT
    | {"epsilon_cutoff": 0.05, "bad_words_ids": [[3, 2], [1]], "begin_suppress_tokens": [2]},
    "eta and n-grams": HOT | {"eta_cutoff": 0.05, "no_repeat_ngram_size": 2},
}
CASES = [("none", "nothing"), ("all", "typical-p and counts"), *(("half", rules) for rules in RULES)]
# In transformers' order; the last ones see the scores after the temperature.
BEFORE = {
    "sequence_bias": theirs.SequenceBiasLogitsProcessor,
    "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
    "presence_penalty": lambda by: lambda ids, scores: scores - by * (new_counts(ids) > 0),
    "frequency_penalty": lambda by: lambda ids, scores: scores - by * new_counts(ids),
    "no_repeat_ngram_size": theirs.NoRepeatNGramLogitsProcessor,
    "bad_words_ids": theirs.NoBadWordsLogitsProcessor,
    "begin_suppress_tokens": lambda ids: theirs.SuppressTokensAtBeginLogitsProcessor(ids, len(PROMPT)),
}
AFTER = {"top_k": theirs.TopKLogitsWarper, "top_p": theirs.TopPLogitsWarper, "min_p": theirs.MinPLogitsWarper}
AFTER |= {"typical_p": theirs.TypicalLogitsWarper, "epsilon_cutoff": theirs.EpsilonLogitsWarper}
AFTER |= {"eta_cutoff": theirs.EtaLogitsWarper}


def new_counts(ids):
    return torch.nn.functional.one_hot(ids[:, len(PROMPT) :], VOCAB).sum(dim=1)


@cache
def target():
    """A target whose next token depends on the one before, with one id likely and one rare everywhere."""
    model = make_target("llama", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, seed=7)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.7, 1.3, 16))
        model.get_output_embeddings().weight *= 1.5
        model.get_input_embeddings().weight += 2.0  # the common part of all hidden states
    return model


def build(runtime):
    """(An engine whose drafts a test writes, its proposer)."""
    proposer = Scripted(ROWS, 48, WIDTH)
    options = {"max_length": 32, "batch_size": ROWS, "prefill_chunk_size": 16, "rounds_per_chunk": 4}
    options["processors"] = tuple({*KINDS} & {name for rules in RULES.values() for name in rules})
    return td.compile(target(), proposer, runtime=runtime, **options), proposer


@pytest.fixture(scope="module", params=["eager", "xla"])
def runtime(request):
    return request.param


@pytest.fixture(scope="module")
def engine(runtime):
    return build(runtime)


@cache
def law(rules: str, without: str = "") -> torch.Tensor:
    """P(token 2, 3, 4) [V^3] from the target's own forwards and transformers' own processors."""
    options = {name: value for name, value in RULES[rules].items() if name != without and value != 0}
    before, after = (
        [kinds[name](options[name]) for name in kinds if name in options] for kinds in (BEFORE, AFTER)
    )
    prefixes = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    ids = torch.cat([torch.tensor(PROMPT).expand(len(prefixes), -1), prefixes], dim=1)
    with torch.no_grad():
        logits = target()(ids).logits[:, len(PROMPT) - 1 :].double()

    def pick(i):
        text, scores = ids[:, : len(PROMPT) + i], logits[:, i]
        for change in before:
            scores = change(text, scores)
        scores = scores / options["temperature"]
        for change in after:
            scores = change(text, scores)
        return torch.softmax(scores, dim=-1)

    picks = [pick(i) for i in range(4)]
    joint = torch.ones(len(prefixes), dtype=torch.float64)
    for i in range(3):
        joint = joint * picks[i].gather(1, prefixes[:, i : i + 1])[:, 0]
    joint = (joint[:, None] * picks[3]).view(VOCAB, VOCAB, VOCAB, VOCAB)
    assert abs(float(joint.sum()) - 1) < 1e-9
    return joint.sum(dim=0).flatten()


def sample(engine, rules="nothing", first_seed=0, calls=CALLS):
    """Tokens 1 to 4 of many rows [rows, 4] that differ in their seed, and the share of accepted drafts."""
    ids = torch.tensor(PROMPT).expand(ROWS, -1).contiguous()
    texts, accepted, rounds = [], 0, 0
    for call in range(calls):
        options = {"max_new_tokens": 4, "do_sample": True, "eos_token_id": None}
        options |= {"seed": first_seed + call * ROWS, "return_dict_in_generate": True}
        out = engine.generate(ids, torch.ones_like(ids), **RULES[rules], **options)
        texts.append(out.sequences[:, len(PROMPT) :])
        first = [lengths[0] for lengths in out.stats.acceptance_lengths]
        accepted, rounds = accepted + sum(first) - ROWS, rounds + ROWS * (WIDTH - 1)
    return torch.cat(texts), accepted / rounds


def surprise(texts: torch.Tensor, joint: torch.Tensor) -> float:
    cells = (texts[:, 1] * VOCAB + texts[:, 2]) * VOCAB + texts[:, 3]
    return beyond(torch.bincount(cells, minlength=VOCAB**3).double(), joint * len(texts))


def beyond(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """The probability of a chi-square beyond that of these counts; cells expected below 5 times are one."""
    small = wanted < 5
    seen = torch.cat([seen[~small], seen[small].sum()[None]])
    wanted = torch.cat([wanted[~small], wanted[small].sum()[None]]).clamp(min=1e-9)
    assert len(wanted) > 40, "the law leaves too few cells to tell laws apart"
    return tail(float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1)


def tail(chi_square: float, freedom: int) -> float:
    """P(a chi-square variable of ``freedom`` degrees is larger)."""
    halves = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def likely_tokens(joint: torch.Tensor, best: bool) -> list[int]:
    """The ids that are most (or least) often right as tokens 2 and 3."""
    cube = joint.view(VOCAB, VOCAB, VOCAB)
    marginals = [cube.sum(dim=(1, 2)), cube.sum(dim=(0, 2))]
    return [int(m.argmax() if best else m.argmin()) for m in marginals]


@pytest.mark.parametrize(("share", "rules"), CASES)
def test_the_law_is_the_targets(engine, share, rules):
    engine, proposer = engine
    joint = law(rules)
    if share == "all":  # the drafter that knows the noise: the hardest case for a rule that trusts drafts
        texts, _ = sample(engine, rules, first_seed=10**6, calls=1)
        proposer.say([PROMPT + row for row in texts.tolist()])
        again, rate = sample(engine, rules, first_seed=10**6, calls=1)
        assert torch.equal(texts, again) and rate == 1
        texts = [again]
        for call in range(1, CALLS):
            ahead, _ = sample(engine, rules, first_seed=10**6 + call * ROWS, calls=1)
            proposer.say([PROMPT + row for row in ahead.tolist()])
            rows, rate = sample(engine, rules, first_seed=10**6 + call * ROWS, calls=1)
            assert rate == 1
            texts.append(rows)
        texts = torch.cat(texts)
    else:
        draft = likely_tokens(joint, best=share == "half")
        proposer.say([[*PROMPT, 0, *draft]] * ROWS)
        texts, rate = sample(engine, rules)
        assert rate < 0.06 if share == "none" else 0.25 < rate < 0.75, rate
    assert len(texts) == SAMPLES
    assert surprise(texts, joint) > LEVEL


def test_the_law_without_any_one_option_would_show():
    named = {name for options in RULES.values() for name in options if name in {**BEFORE, **AFTER}}
    assert named == {*BEFORE, *AFTER}
    for rules, options in RULES.items():
        for name in {*options} - {"temperature"}:
            if options[name] != 0:
                assert beyond(law(rules, name) * SAMPLES, law(rules) * SAMPLES) < LEVEL**2, (rules, name)


def test_a_biased_rule_fails_in_both_runtimes(runtime, monkeypatch):
    """The test above can fail; and XLA runs the acceptance of torch_dflash, not a copy."""
    honest = decode.accept_chain

    def trusting(draft, picks):
        return honest(draft, picks).clamp(min=2)  # the first draft is never doubted

    monkeypatch.setattr(decode, "accept_chain", trusting)
    engine, proposer = build(runtime)
    proposer.say([[*PROMPT, 0, *likely_tokens(law("nothing"), best=True)]] * ROWS)
    texts, _ = sample(engine)
    assert surprise(texts, law("nothing")) < LEVEL**2


def test_the_noise_is_gumbel():
    seeds, positions = torch.arange(-20, 20, dtype=torch.int32), torch.arange(50, dtype=torch.int32)
    noise = gumbel(seeds, positions.expand(40, -1), 500).double()
    spread, count = math.pi**2 / 6, noise.numel()
    assert abs(float(noise.mean()) - 0.5772156649) < 4.5 * math.sqrt(spread / count)
    # Its fourth central moment is 14.6, so the sample variance deviates by sqrt((14.6 - spread^2) / n).
    assert abs(float(noise.var()) - spread) < 4.5 * math.sqrt((14.6 - spread**2) / count)
    for dim in range(3):  # neighbouring seeds, positions and ids; and across two of them at once
        there = noise.narrow(dim, 1, noise.shape[dim] - 1)
        here = noise.narrow(dim, 0, noise.shape[dim] - 1)
        other = (dim + 1) % 3
        some, most = here.shape[other] - 1, there.shape[other] - 1
        slanted = there.narrow(other, 1, most), here.narrow(other, 0, some)
        for one, two in ((there, here), slanted):
            r = float(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1])
            assert abs(r) < 4.5 / math.sqrt(one.numel())


def test_the_noise_bits_are_uniform_and_rows_share_none():
    seeds, positions = torch.arange(16, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
    bits = noise_bits(seeds, positions.expand(16, -1), 1000)
    for shift in (24, 16, 8, 0):
        seen = torch.bincount(((bits >> shift) & 0xFF).flatten(), minlength=256).double()
        wanted = bits.numel() / 256
        assert tail(float(((seen - wanted) ** 2 / wanted).sum()), 255) > LEVEL
    for dim in range(3):  # a bit that followed the next bit would show here
        flips = bits.narrow(dim, 1, bits.shape[dim] - 1) ^ bits.narrow(dim, 0, bits.shape[dim] - 1)
        for bit in range(32):
            share = float(((flips >> bit) & 1).double().mean())
            assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(flips.numel())
    # Rows that are shifted copies would share nearly all values; random rows share about 120.
    assert bits.numel() - bits.unique().numel() < 250


def test_the_noise_is_finite_and_ordered_for_all_bits():
    """A uniform float next to 1 rounds to 1, and infinite noise would pick a token for any logit."""
    ends = torch.tensor([0, 1, 2, 3, 255, 256, 2**31 - 1, -(2**31), -256, -2, -1], dtype=torch.int32)
    noise = gumbel_of(ends)
    assert noise.isfinite().all()
    unsigned = ends.long() & 0xFFFFFFFF
    assert (noise[unsigned.argsort()].diff() <= 0).all()
    assert noise.max() > 22 and noise.min() < -2.8
    lowered = jb.to_torch(jax.jit(lambda x: call_torch(gumbel_of, x))(jb.to_jax(ends)))
    torch.testing.assert_close(lowered, noise, rtol=1e-6, atol=1e-6)


def test_noise_bits_are_the_same_on_both_sides():
    generator = torch.Generator().manual_seed(0)
    edges = [0, 1, -1, 2**31 - 1, -(2**31)]
    wide = torch.randint(-(2**31), 2**31, (95,), generator=generator).tolist()
    seeds = torch.tensor(edges + wide, dtype=torch.int32)
    positions = torch.arange(300, dtype=torch.int32).reshape(100, 3) * 977
    cases = [(mix, (seeds,)), (lambda *rows: noise_bits(*rows, 97), (seeds, positions))]
    for function, rows in cases:
        lowered = jax.jit(partial(call_torch, function))
        ours = jb.to_torch(lowered(*jb.to_jax(rows)))
        assert ours.dtype == torch.int32 and torch.equal(ours, function(*rows))
    # The finaliser in plain integers, from its definition.
    for x, y in zip(seeds.tolist(), mix(seeds).tolist(), strict=True):
        x &= 0xFFFFFFFF
        x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
        assert x ^ x >> 16 == y & 0xFFFFFFFF
