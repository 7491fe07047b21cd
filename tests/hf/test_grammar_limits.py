"""Patterns are built correctly or refused, within seconds and a bounded memory."""

import re
import resource
import signal

import numpy as np
import pytest
from support.refusals import refuses
from support.tokenizers import byte_tokenizer

import torch_dflash as td
from torch_dflash.grammars import grammar as grammars
from torch_dflash.grammars.regular import DEAD, FIRST, byte_automaton

TOKENIZER = byte_tokenizer()
SECONDS, MEGABYTES = 20, 100  # on a busy machine; without a bound they would be hours and all memory
HAN = "".join(map(chr, range(0x4E00, 0x4E00 + 7 * 400, 7)))


@pytest.fixture(autouse=True)
def bounded():
    """Fails a test that takes long or much memory, without a wait for its end."""

    def late(*_):
        pytest.fail(f"still running after {SECONDS} s")

    before, handler = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < MEGABYTES, f"{grown} MB"


ENDLESS = {
    "nested counts": "(a{1,1000}){1,1000}", "counts of counts": "((a{1,100}){1,100}){1,100}",
    "many states at once": "(a|b)*a(a|b){40}", "many states in each": "(a?){0,600}b",
    "a count of nothing": "(){0,4000000}", "a class of many ranges": f"[{HAN}]{{1,999}}",
    "classes of all characters": "[\x01-\U0010ffff]" * 200,
    "long alternations": "|".join(f"({letter}|é)*{letter}.{{30}}" for letter in "abcdefghijklmnopq"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_small_table_is_refused_at_once(name):
    assert len(ENDLESS[name]) <= 1000
    with refuses(ValueError, "Grammar.regex(", "512 states of bytes", "device=False"):
        td.Grammar.regex(ENDLESS[name], TOKENIZER, device=True)


@pytest.mark.parametrize("name", ENDLESS)
def test_the_matcher_on_the_host_has_bounds_of_its_own(name):
    row = td.Grammar.regex(ENDLESS[name], TOKENIZER).row((0,), 257)
    answer = []
    for _ in range(9):
        words = row.allowed(answer, [], 9)[0]
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        bits[0] = 0
        if not bits.any():
            break
        answer.append(int(bits.nonzero()[0][-1]))


SMALL = ["[一-龥]{1,20}x", "(a|b)*a(a|b){7}", "|".join(f"{word * 5}!" for word in "abcdefghijklmnop")]


@pytest.mark.parametrize("pattern", SMALL)
def test_what_has_a_small_table_is_built(pattern):
    assert td.Grammar.regex(pattern, TOKENIZER, device=True).table is not None


EDGES = [0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFD, 0xFFFF, 0x10000, 0x10FFFF, 10, ord("b"), ord("é")]
SETS = ["[^b]", ".", "(?s:.)", "[é-𝄞]", "[^é-𝄞]", "[\\x{80}-\\u{ffff}b]", "[\\n\\-\\]^a-]", "(?i)É"]
SETS += ["\\u00e9|b"]


@pytest.mark.parametrize("pattern", SETS)
def test_classes_hold_the_characters_that_they_name(pattern):
    following, ends = byte_automaton(pattern, 512)
    own = re.sub(r"\\[ux]\{(\w+)\}", lambda found: f"\\U{found[1]:0>8}", pattern)
    for code in [*EDGES, *(code + 1 for code in EDGES if code < 0xFFFF and code != 0xD7FF)]:
        state = FIRST
        for byte in chr(code).encode():
            state = following[state, byte]
        assert (state != DEAD and ends[state]) == bool(re.fullmatch(own, chr(code))), hex(code)
    # Surrogates, overlong, too high.
    for wrong in (b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\x80"):
        state = FIRST
        for byte in wrong:
            state = following[state, byte]
        assert state == DEAD, wrong


TEXTS = ["", "a", "ab", "aab", "abab", "ababx", "a1", "a1,b22", "A1", "aé", "é", "b" * 9, "b" * 10]
WHOLE = ["(ab)*x?", "a{1,2}b", "(?:a[0-9]|b[0-9]{2})(,b[0-9]{1,3})?", "(?i)A1|É", "(?P<n>a|ab)(?i:B)*"]
WHOLE += ["(?-i:a)(?-imsx:b)*", "(?i:A(?-i:b))", "b{3}{3}"]


@pytest.mark.parametrize("pattern", [*WHOLE, "", "(|a)(b*)*", "a+?b??|(a|)é", "a|(?i)B{9}", "b{9,}"])
def test_the_automaton_takes_the_texts_that_match(pattern):
    following, ends = byte_automaton(pattern, 512)
    own = {"b{3}{3}": "b{9}", "a|(?i)B{9}": "a|(?i:B){9}"}.get(pattern, pattern)
    for text in TEXTS:
        state = FIRST
        for byte in text.encode():
            state = following[state, byte]
        assert bool(ends[state]) == bool(re.fullmatch(own, text)), text


@pytest.mark.parametrize(
    ("pattern", "words"),
    {
        "a[\\d]": ("'\\\\d' at character 3 ", "read it differently", "[0-9]", "device=False"),
        "^a$": ("'^' at character 1 ", "leave it out"),
        "[[:alpha:]]": ("'[' at character 2 ", "write \\ before it"),
        "[a&&[ab]]": ("'&&' at character 3 ", "write \\ before it"),
        "(?x)a b": ("'(?x)' at character 1 ",),
        "a(?m)b": ("'(?m)' at character 2 ",),
        "a(?=b)": ("'(?=' at character 2 ",),
        "(a)(?P=n)": ("'(?P=' at character 4 ",),
        "a\\": ("the backslash at character 2 has nothing behind it",),
        "[a\\": ("the backslash at character 3 has nothing behind it",),
        "a[bc": ("'[' at character 2 is never closed",),
        "a(?i:b": ("'(' at character 2 is never closed",),
        "a)b": ("')' at character 2 closes nothing",),
        "a[z-b]": ("'z-b' at character 3 ",),
        "a\\ud800": ("'\\\\ud800' at character 2 ",),
        "[%--]": ("'--' at character 3 ",),
        "(" * 990 + "a" + ")" * 990: ("nested too deeply", "device=False"),
        "(?i)[一-龥]": ("'[一-龥]' at character 5 ", "many characters with the flag i"),
    }.items(),
)
def test_what_dialects_read_differently_is_refused_by_name(pattern, words):
    with refuses(ValueError, *words):
        byte_automaton(pattern, 512)


FORCED = byte_tokenizer(merges=[("e", "s"), ("y", "es"), ("m", "i"), ("n", "u"), ("mi", "nu"), ("t", "es")])
"""The matcher has one spelling of forced words, and a table has every one."""


@pytest.mark.parametrize(
    "pattern", ["yes|no", "[0-9]+ minutes", "[0-9]{1,4} minutes", "(yes|no)(, yes){0,3}"]
)
def test_a_forced_text_has_a_table(pattern):
    grammar = td.Grammar.regex(pattern, FORCED, device=True)
    row = grammar.row((0,), len(FORCED))
    text = {"y": "yes", "[": "7 minutes", "(": "yes, yes"}[pattern[0]]
    row.check([*FORCED(text)["input_ids"], 0])
    spelt = [token for letter in text for token in FORCED(letter)["input_ids"]]
    row.check([*spelt, 0])
    with refuses(ValueError, "none was left"):
        row.check([*spelt[:-1], 0])


OTHERS = ("yes|no|yet", "yep|no", "ye?s?|no", "yes|no|yess", "ye|no", "yes", "yes|n[ou]")


@pytest.mark.parametrize(
    ("words", "pattern", "other"),
    [
        (TOKENIZER, "[0-9]{2}", "[0-9]{3}"),
        (TOKENIZER, "(?i)ω", "(?i)ω"),
        (TOKENIZER, "a|b", "a"),
        *((FORCED, "yes|no", other) for other in OTHERS),
    ],
)
def test_a_table_that_differs_from_the_matcher_is_refused(monkeypatch, words, pattern, other):
    made = grammars.token_table
    monkeypatch.setattr(grammars, "token_table", lambda _, spelt: made(other, spelt))
    with refuses(ValueError, "after ids [", "read it differently", "device=False"):
        td.Grammar.regex(pattern, words, device=True)
