"""With a grammar the text is that of plain decoding under the same matcher, through every door."""

import json
import re
from functools import cache

import llguidance.hf
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from support.hybrids import make_hybrid
from support.refusals import refuses
from support.scripted import Scripted
from support.tabled import Tabled, with_path
from support.tiny import correlate, make_drafter, make_target, ragged_prompts
from support.tokenizers import byte_tokenizer
from transformers import LogitsProcessorList

import torch_dflash as td
from torch_dflash.grammars.matcher import MatcherRow
from torch_dflash.processors.grammars import GrammarMatcher, GrammarTable, only
from torch_dflash.processors.options import Batch

NEW, STOP, VOCAB = 28, 0, 288  # the tokenizer has fewer ids than the model
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bc"]}, "tags": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["kind", "tags"],
    "additionalProperties": False,
}
PATTERN = "([0-9]{1,3}|ab|é)(-([0-9]{1,3}|ab|é)){5,}"
LARK = 'start: "[" pair ("," pair)* "]"\npair: /[a-c]{1,2}/ "=" /[0-9]+/'
# Some tokens are several characters, and a grammar may end in their middle; "é" is two bytes, and a token.
MERGES = ['{ "', '" :', "t r", "tr u", "tru e", "] }", '[ "', "[ a", "a b", "1 2", "- 1", ", b", "Ã ©", "= 1"]
TOKENIZER = byte_tokenizer(merges=[tuple(pair.split()) for pair in MERGES])
TOKENIZER.add_tokens(["ab-", "yes|no"])  # no bytes of the BPE's
TOKENIZER.add_special_tokens({"additional_special_tokens": ["[b=1]"]})  # which no text holds


def ids_of(belongs):
    return [token for token in range(len(TOKENIZER)) if belongs(TOKENIZER.decode([token]))]


def regex(pattern, device=False):
    return td.Grammar.regex(pattern, TOKENIZER, device=device)


def make_grammar(kind):
    if kind in ("regex", "table"):
        return regex(PATTERN, kind == "table")
    return td.Grammar.lark(LARK, TOKENIZER) if kind == "lark" else td.Grammar.json_schema(SCHEMA, TOKENIZER)


@cache
def read_tokenizer():
    return llguidance.hf.from_tokenizer(TOKENIZER)


class Reference:  # the way of transformers' users: a new matcher for every row and token
    def __init__(self, kind, starts):
        self.tokenizer = read_tokenizer()
        text = {"json": json.dumps(SCHEMA), "lark": LARK}.get(kind, PATTERN)
        form = {"json": LLMatcher.grammar_from_json_schema, "lark": LLMatcher.grammar_from_lark}
        self.grammar, self.starts = form.get(kind, LLMatcher.grammar_from_regex)(text), starts

    def __call__(self, ids, scores):
        scores = scores.clone()
        for row, start in enumerate(self.starts):
            matcher, answer = LLMatcher(self.tokenizer, self.grammar), ids[row, start:].tolist()
            if STOP in answer:
                continue
            assert matcher.consume_tokens(answer)
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[:VOCAB]
            banned = np.ones(VOCAB, bool)
            banned[: len(allowed)] = allowed == 0
            scores[row, torch.from_numpy(banned)] = -torch.inf
        return scores


@pytest.fixture(scope="module")
def pair():
    target = make_target("qwen3", vocab_size=VOCAB, num_hidden_layers=2)
    drafter = make_drafter(target, num_hidden_layers=1, target_layer_ids=[0, 1])
    correlate(target, drafter, 2.5)
    return target, drafter


@pytest.fixture(scope="module")
def batch():
    ids, mask = ragged_prompts(3)
    return {"input_ids": ids, "attention_mask": mask}


def asked(options):
    fixed = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": STOP, "pad_token_id": STOP}
    return fixed | options


def ours(pair, batch, grammar, runtime="eager", **options):
    options = asked(options) | {"runtime": runtime, "return_dict_in_generate": True}
    out = td.generate(*pair, **batch, grammar=grammar, **options)
    return out.new_tokens, out.stats


def theirs(target, batch, kind, **options):
    ids = batch["input_ids"]
    listed = LogitsProcessorList([Reference(kind, [ids.shape[1]] * len(ids))])
    out = target.generate(**batch, **asked(options), logits_processor=listed)
    return [new[: new.index(STOP) + 1 if STOP in new else NEW] for new in out[:, ids.shape[1] :].tolist()]


def copier(batch, answers, rows=4):
    """Drafts each row's own answer, every fourth token wrong: some are accepted, all rejected ones matter."""
    drafter = Scripted(rows, 96, width=6)
    texts = []
    for ids, mask, answer in zip(*batch.values(), answers, strict=True):
        wrong = [(token + 5) % 250 if at % 4 == 2 else token for at, token in enumerate(answer)]
        texts.append([*ids[mask.bool()].tolist(), *wrong])
    drafter.say(texts)
    return drafter


def hidden(batch, answers):
    """Drafts trees that hold each row's own answer in a random branch."""
    rows, drafter = zip(*batch.values(), strict=True), Tabled(4, 96, rows=10, depth=5)
    texts = [[*ids[mask.bool()].tolist(), *own] for (ids, mask), own in zip(rows, answers, strict=True)]
    drafter.fill(texts, with_path(9, 5, vocab=250))
    return drafter


@pytest.mark.parametrize("kind", ["json", "regex", "table", "lark"])
def test_eager_text_is_that_of_transformers_with_the_matcher(pair, batch, kind):
    want = theirs(pair[0], batch, kind)
    grammar = make_grammar(kind)
    assert ours((pair[0], None), batch, grammar)[0] == want
    assert ours(pair, batch, grammar)[0] == want
    drafted, stats = ours((pair[0], copier(batch, want)), batch, grammar)
    assert drafted == want and stats.mean_acceptance_length > 2
    assert stats.grammar_reads == (0 if kind == "table" else stats.rounds + 1)
    branched, more = ours((pair[0], hidden(batch, want)), batch, grammar)
    assert branched == want and more.mean_acceptance_length > stats.mean_acceptance_length
    assert more.grammar_reads == (0 if kind == "table" else more.rounds + 1)
    assert want != ours((pair[0], None), batch, None)[0]
    assert any(len(TOKENIZER.decode([token])) > 1 for row in want for token in row[:-1])


def test_recurrent_layers_keep_to_a_grammar(batch):
    """The rows have no padding: in transformers' recurrent layers padding changes the state."""
    target, want = make_hybrid("qwen3_5", vocab_size=VOCAB), []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        row = ids[mask.bool()][None]
        want += theirs(target, {"input_ids": row, "attention_mask": torch.ones_like(row)}, "json")
    for drafter in (copier(batch, want), hidden(batch, want)):
        text, stats = ours((target, drafter), batch, make_grammar("json"))
        assert text == want and stats.mean_acceptance_length > 2


BESIDE = [
    {"repetition_penalty": 3.0},
    {"stop_strings": ["ind", "\n\n"], "tokenizer": TOKENIZER},
    {"no_repeat_ngram_size": 3, "sequence_bias": [[ids_of(str.isdecimal)[3:4], 4.0]]},
    {"max_new_tokens": [3, 9, NEW]},
]


@pytest.mark.parametrize("options", BESIDE, ids=lambda options: min(options))
def test_text_under_a_grammar_and_other_options_is_that_of_transformers(pair, batch, options):
    kind, most = "json", options.get("max_new_tokens", [NEW] * 3)
    given = {name: value for name, value in options.items() if name != "max_new_tokens"}
    rows = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(3)]
    rows = [{"input_ids": row["input_ids"][row["attention_mask"] > 0][None]} for row in rows]
    want = [theirs(pair[0], row, kind, **given)[0][:cap] for row, cap in zip(rows, most, strict=True)]
    found, stats = ours((pair[0], copier(batch, want)), batch, make_grammar(kind), **options)
    assert found == want != theirs(pair[0], batch, kind) and stats.mean_acceptance_length > 1


@pytest.mark.parametrize("kind", ["json", "table"])
def test_xla_text_is_that_of_transformers_with_the_matcher(pair, batch, kind):
    want = theirs(pair[0], batch, kind)
    drafted, stats = ours((pair[0], copier(batch, want)), batch, make_grammar(kind), runtime="xla")
    assert drafted == want and stats.mean_acceptance_length > 2
    assert stats.host_reads < stats.rounds
    # The program ends one pass after the last row, and this pass asks once more.
    reads = 0 if kind == "table" else stats.rounds + 1
    assert stats.grammar_reads == reads


@pytest.fixture(scope="module")
def engine(pair):
    kinds = "grammar", GrammarTable(64, 16, VOCAB), "suppress_tokens"
    trees = td.Union(td.NGramProposer(), pair[1], rows=8)
    return td.compile(pair[0], trees, runtime="xla", max_length=96, batch_size=4, processors=kinds)


def test_rows_have_their_own_grammar_and_another_compiles_nothing(pair, batch, engine):
    json_, pattern, lark = map(make_grammar, ("json", "regex", "lark"))
    engine.generate(**batch, **asked({}))
    free = ours((pair[0], None), batch, None)[0]
    for given in ([json_, None, pattern], [None, lark, json_], lark, [make_grammar("table"), None, lark]):
        options = asked({"return_dict_in_generate": True})
        out = engine.generate(**batch, grammar=given, **options)
        assert out.stats.compilations == 0
        for row, grammar in enumerate(given if isinstance(given, list) else [given] * 3):
            kind = {json_: "json", pattern: "regex", lark: "lark", None: None}.get(grammar, "table")
            assert out.new_tokens[row] == (theirs(pair[0], batch, kind)[row] if kind else free[row])
    with refuses(ValueError, "new token 0", "none was left", "suppress_tokens"):
        braces = ids_of(lambda text: text[:1] == "{")
        engine.generate(**batch, grammar=json_, suppress_tokens=braces, **asked({}))
    assert engine.generate(**batch, grammar=json_, **asked({})).shape[0] == 3  # and decodes the next call


def test_an_interrupt_while_a_program_asks_the_host_is_an_interrupt(batch, engine, monkeypatch):
    grammar = make_grammar("json")
    want = engine.generate(**batch, grammar=grammar, **asked({}))

    def interrupted(*_):  # as Python's own handler of SIGINT does between two instructions
        raise KeyboardInterrupt

    monkeypatch.setattr(MatcherRow, "allowed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(**batch, grammar=grammar, **asked({}))
    monkeypatch.undo()
    assert torch.equal(engine.generate(**batch, grammar=grammar, **asked({})), want)


def test_sampled_text_is_plain_decodings(pair, batch):
    options = {"do_sample": True, "temperature": 2.0, "top_k": 0, "top_p": 0.9, "seed": 5}
    for kind in ("lark", "table"):
        grammar = make_grammar(kind)
        want = ours((pair[0], None), batch, grammar, **options)[0]
        assert ours((pair[0], copier(batch, want)), batch, grammar, **options)[0] == want
        assert ours(pair, batch, grammar, **options)[0] == want
        texts = [TOKENIZER.decode(row, skip_special_tokens=True) for row in want if STOP in row]
        whole = r"\[[a-c]{1,2}=[0-9]+(,[a-c]{1,2}=[0-9]+)*\]" if kind == "lark" else PATTERN
        assert all(re.fullmatch(whole, text) for text in texts)


def test_the_law_of_samples_is_the_targets_among_what_is_allowed(pair):
    """A first token of three, and behind "e" one of two more or the end."""
    rows, ids = 800, torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 3, "do_sample": True, "top_k": 0, "temperature": 8.0, "seed": 1}
    spelt = {letter: TOKENIZER(letter)["input_ids"][0] for letter in "efgh"}
    with torch.no_grad():

        def law(text, allowed):
            logits = pair[0](torch.cat([ids, torch.tensor([text])], 1) if text else ids).logits[0, -1] / 8
            return dict(zip(allowed, logits[allowed].softmax(0).tolist(), strict=True))

        first = law([], [spelt["e"], spelt["h"]])
        second = law([spelt["e"]], [STOP, spelt["f"], spelt["g"]])
    want = {(spelt["h"], STOP): first[spelt["h"]]} | {
        (spelt["e"], *([STOP] if end == STOP else [end, STOP])): first[spelt["e"]] * share
        for end, share in second.items()
    }
    drafter = Scripted(rows, 32, width=4)
    drafter.say([[5, 6, 7, spelt["e"], max(second, key=second.get), STOP]] * rows)
    for given in (regex("(e(f|g)?|h)", device) for device in (True, False)):
        texts, stats = ours((pair[0], drafter), {"input_ids": ids.expand(rows, -1)}, given, **options)
        found = [tuple(row) for row in texts]
        assert {*found} <= {*want}
        for text, share in want.items():
            assert abs(found.count(text) / rows - share) < 4 * (share * (1 - share) / rows) ** 0.5 + 1e-9
    assert stats.mean_acceptance_length > 1.05


def test_every_door_takes_a_grammar(pair, batch):
    want = theirs(pair[0], batch, "json")
    grammar = make_grammar("json")
    ids, block = batch["input_ids"], td.dflash(pair[1], runtime="eager", tokenizer=TOKENIZER)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    plain = {"runtime": "eager", "return_dict_in_generate": True}
    for given in ({"grammar": grammar}, {"response_format": form}):
        out = pair[0].generate(**batch, custom_generate=block, **asked(given))
        new = out[:, ids.shape[1] :].tolist()
        assert [text[: len(row)] for text, row in zip(new, want, strict=True)] == want
        named = given | ({"tokenizer": TOKENIZER} if "response_format" in given else {})
        assert td.generate(*pair, **batch, **asked(named), **plain).new_tokens == want
        engine = td.compile(*pair, runtime="eager", max_length=96, batch_size=3, processors=("grammar",))
        assert engine.generate(**batch, **asked(named), return_dict_in_generate=True).new_tokens == want
    pieces = list(td.stream(*pair, **batch, runtime="eager", grammar=grammar, **asked({})))
    assert [[token for piece in pieces for token in piece[row].tokens] for row in range(3)] == want
    options = asked({"response_format": {"type": "text"}, "tokenizer": TOKENIZER}) | plain
    assert td.generate(*pair, **batch, **options).new_tokens == ours(pair, batch, None)[0]
    options["response_format"] = [{"type": "json_object"}, None, form]
    rows = td.generate(*pair, **batch, **options).new_tokens
    assert rows[2] == want[2] and TOKENIZER.decode(rows[0])[0] == "{"


def test_a_session_goes_on_under_another_grammar(pair):
    engine = td.compile(*pair, runtime="eager", max_length=96, processors=("grammar",))
    session, prompt = engine.session(), [1, 2, 3, 4, 5]
    for kind in ("json", "lark", "json"):
        gains = session.gains(prompt, grammar=make_grammar(kind), **asked({}))
        answer, ids = [token for gain in gains for token in gain.tokens], torch.tensor([prompt])
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert answer == theirs(pair[0], row, kind)[0]
        assert session.stats.grammar_reads == session.stats.rounds + 1
        prompt = [*prompt, *answer, 9]


def test_answers_follow_from_the_tokens_alone():
    """Earlier questions about other texts and drafts, in any order, change no answer."""
    row = make_grammar("json").row((STOP,), VOCAB)
    text = TOKENIZER('{"kind":"bc","tags":[true,false]}')["input_ids"]
    other = TOKENIZER('{ "kind" : "a"')["input_ids"]
    fresh = lambda: make_grammar("json").row((STOP,), VOCAB)  # noqa: E731
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0)).tolist()
    for at in [*order, *order[:3]]:
        drafts = [text[at : at + 4], other[:4], [STOP, 5], [200, 3]][at % 4]
        for answer in (text[:at], other[: at % len(other)]):
            assert (row.allowed(answer, drafts, 9) == fresh().allowed(answer, drafts, 9)).all()


STRING = '"([^"\\\\]|\\\\["n])*"'


@pytest.mark.parametrize("pattern", [PATTERN, STRING, "yes|no|YES", "[^a]{2}", "(a|bc)+😀?"])
def test_a_table_allows_what_the_matcher_allows(pattern):
    table, matcher = (regex(pattern, device).row((STOP,), VOCAB) for device in (True, False))
    following, class_of, bits = table.arrays(VOCAB)
    generator = np.random.default_rng(0)
    for _ in range(12):
        state, text = 1, []
        for _ in range(10):
            want = matcher.allowed(text, [], 9)[0]
            assert (bits[state] == want).all(), text
            ids = np.unpackbits(want.view(np.uint8), bitorder="little").nonzero()[0]
            token = int(generator.choice(ids))
            if token == STOP:
                break
            state, text = following[state, class_of[token]], [*text, token]


def neighbours(values):
    def rolled(self, asked, starts):
        handles, starts = values(self, asked, starts)
        return handles.roll(1), starts.roll(1)

    return rolled


def in_states(change):
    return lambda observe: lambda self, memory, ids, count: observe(self, memory, *change(ids, count))


def remembered(go):
    return lambda self, answer: go(self, [*self._taken, *answer][:40])


GO_TO, OBSERVE, REST = (MatcherRow, "_go_to"), (GrammarTable, "observe"), "the rejected draft is remembered"
VALUES = td.processors.GrammarMatcher, "values"
BROKEN = {  # by the kind of the grammar
    ("json", REST): (GO_TO, remembered),
    ("json", "off by one"): (GO_TO, lambda go: lambda self, answer: go(self, answer[:-1])),
    ("json", "a neighbour"): (VALUES, neighbours),
    ("table", REST): (OBSERVE, in_states(lambda ids, count: (ids, torch.full_like(count, ids.shape[1])))),
    ("table", "off by one"): (OBSERVE, in_states(lambda ids, count: (ids, (count - 1).clamp(min=0)))),
    ("table", "a neighbour"): (OBSERVE, in_states(lambda ids, count: (ids.roll(1, 0), count.roll(1, 0)))),
}


@pytest.mark.parametrize(("kind", "how"), BROKEN)
def test_a_grammar_that_is_elsewhere_is_caught(pair, batch, monkeypatch, kind, how):
    want, ((owner, name), change) = theirs(pair[0], batch, kind), BROKEN[kind, how]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    row = "row 0: token .*" if owner is MatcherRow else ""
    with pytest.raises(ValueError, match=row + "is not one that its grammar allows"):
        assert ours((pair[0], copier(batch, want)), batch, make_grammar(kind))[0] != want


@pytest.mark.parametrize("device", [False, True])
def test_an_end_that_is_allowed_early_is_caught(pair, batch, monkeypatch, device):
    grammar = regex("[0-9]{2,}", device)
    wish = td.BlockProcessor(lambda tokens, length, logits: logits + 99.0 * (torch.arange(VOCAB) == STOP))
    rows, _ = ours(pair, batch, grammar, processors=(wish,))
    assert all(row[2:] == [STOP] for row in rows)  # as soon as the grammar allows the end, and no sooner
    monkeypatch.setattr(
        "torch_dflash.processors.grammars.only",
        lambda bits, logits: torch.where(torch.arange(VOCAB) == STOP, logits, only(bits, logits)),
    )
    with pytest.raises(ValueError, match="row 0: token 0, new token 0, is not one that its grammar allows"):
        ours(pair, batch, grammar, processors=(wish,))


def test_a_tree_may_hold_ids_that_no_token_has(pair, batch):
    """A model's vocabulary is wider than its tokenizer's; the matcher does not know the other ids."""
    target, _ = pair
    drafter = make_drafter(target, num_hidden_layers=1, target_layer_ids=[0, 1])
    grammar = regex("(a|b|[0-9])+(e(f|g)?|h)*")
    plain, _ = ours((target, None), batch, grammar)
    assert ours((target, td.TreeProposer(drafter, rows=16)), batch, grammar)[0] == plain


@pytest.mark.parametrize("kind", ["regex", "table"])
def test_an_error_names_the_row_of_the_call_where_a_replica_has_some_of_them(kind):
    batch = Batch(1, [4] * 2, [(STOP,)] * 2, False, VOCAB)
    asked = GrammarMatcher.read_options({"grammar": [None, make_grammar(kind)]}, batch)
    grammar = next(values[1] for _, values in asked if values[1] is not None)
    with refuses(ValueError, "row 1: token 0, new token 0"):
        grammar.check([STOP])


def test_options_that_leave_no_token_are_an_error_and_no_other_text(pair, batch):
    for device in (False, True):
        with refuses(ValueError, "new token 1", "none was left", "suppress_tokens"):
            ours(pair, batch, regex("a[0-9]+", device), suppress_tokens=ids_of(str.isdecimal))


def test_what_is_no_grammar_is_refused_by_name(pair, batch):
    grammar, json_ = make_grammar("json"), lambda schema: td.Grammar.json_schema(schema, TOKENIZER)

    def form(kind, **more):
        return ours(pair, batch, None, response_format={"type": kind}, **more)

    for make, words in (
        (lambda: json_("{nope"), ["schema='{nope'", "must be a JSON schema"]),
        (lambda: json_({"type": "nosuch"}), ["json_schema", "Invalid type: nosuch"]),
        (lambda: json_({"not": {}}), ['Unimplemented keys: ["not"]']),
        (lambda: regex("(["), ["Grammar.regex('([')", "unclosed character class"]),
        (lambda: regex("[^\\s\\S]"), ["no token may come first"]),
        (lambda: regex("\\d+", True), ["read it differently", "[0-9]", "device=False"]),
        (lambda: regex("[a-z]{600}", True), ["512 states", "device=False"]),
        (lambda: td.Grammar.lark("start: nosuch", TOKENIZER), ["Grammar.lark", 'unknown name: "nosuch"']),
        (lambda: ours(pair, batch, "json"), ["grammar='json'", "td.Grammar.json_schema"]),
        (lambda: ours(pair, batch, [grammar]), ["grammar has 1 entries for a batch of 3"]),
        (lambda: ours(pair, batch, grammar, eos_token_id=None), ["eos_token_id=[]", "no way to end"]),
        (lambda: ours(pair, batch, grammar, response_format={"type": "text"}), ["pass one of them"]),
        (lambda: form("text/csv"), ["json_object", "json_schema"]),
        (lambda: form("json_object"), ["pass tokenizer="]),
        (lambda: form("json_schema", tokenizer=TOKENIZER), ['"json_schema": {"schema": {...}}']),
    ):
        with refuses(ValueError, *words):
            make()
    with refuses(TypeError, "tokenizer=str", "fast tokenizer"):
        td.Grammar.regex("a", "gpt2")
    small = make_target("qwen3", vocab_size=200)
    with refuses(ValueError, f"its tokenizer has {len(TOKENIZER)} ids, the target 200", "own tokenizer"):
        ours((small, None), batch, grammar)


def test_an_engine_says_what_it_was_compiled_without(pair, batch):
    engine = td.compile(*pair, runtime="eager", max_length=96, batch_size=3, processors=("grammar",))
    with refuses(ValueError, "compiled without grammar", "td.processors.GrammarTable(", "vocab_size=288)"):
        engine.generate(**batch, grammar=make_grammar("table"), **asked({}))
    with refuses(ValueError, "grammar", "a state that is handed out", "call generate"):
        engine.start(**batch, grammar=make_grammar("json"), **asked({}))
    bare = td.compile(*pair, runtime="eager", max_length=96, batch_size=3, processors=())
    with refuses(ValueError, "compiled without grammar", "processors=('grammar',)"):
        bare.generate(**batch, grammar=make_grammar("json"), **asked({}))


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with refuses(ImportError, "pip install llguidance."):
        td.Grammar.regex("a", TOKENIZER)
