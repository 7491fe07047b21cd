"""`td.Chat`: each answer is the target's after the whole conversation, and little is read again."""

import pytest
import torch
from support.hybrids import make_hybrid
from support.refusals import refuses
from support.tiny import make_drafter, make_pair, make_target
from support.tokenizers import GROWING, byte_tokenizer
from transformers import GenerationConfig

import torch_dflash as td

NEW = 10
# Templates of models that think leave out a part of earlier answers.
THINKING = GROWING.replace("m.content }}", "m.content[3:] if m.role == 'assistant' else m.content }}")
ASCII = list(range(1, 94))  # ids of the byte tokenizer that are printable characters


class Letters:  # printable characters alone: its text comes back from the template as it was
    def __call__(self, tokens, length, logits):
        keep = torch.zeros(logits.shape[-1], dtype=torch.bool)
        keep[ASCII] = True
        return logits.masked_fill(~keep.to(logits.device), -torch.inf)


LETTERS = td.BlockProcessor(Letters())


def find_weather(city: str):
    """Tells the weather.

    Args:
        city: where
    """


@pytest.fixture(scope="module")
def pairs():
    ring = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}
    sizes = {"vocab_size": 257, "max_position_embeddings": 1024}
    target = make_target("llama", **sizes)
    wide = {"max_position_embeddings": 1024}
    drafters = {"dflash": make_drafter(target, **wide), "ring": make_drafter(target, **wide, **ring)}
    return target, drafters | {"plain": None}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(GROWING)


def make_chat(pairs, tokenizer, kind="dflash", runtime="eager", max_length=700, **options):
    drafter = pairs[1][kind]
    engine = td.compile(pairs[0], drafter, runtime=runtime, max_length=max_length, processors=(LETTERS,))
    usual = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    return td.Chat(engine, tokenizer, **usual | options)


def own(pairs, tokenizer, messages, tools=None, new=NEW):
    rendered = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = rendered["input_ids"]
    others = [[id] for id in range(257) if id not in ASCII]
    options = {"do_sample": False, "bad_words_ids": others, "eos_token_id": None, "pad_token_id": 0}
    out = pairs[0].generate(**rendered, max_new_tokens=new, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]


@pytest.mark.parametrize(
    ("kind", "runtime"), [("dflash", "eager"), ("ring", "eager"), ("plain", "eager"), ("dflash", "xla")]
)
def test_ten_steps_of_a_tool_call_loop_read_the_conversation_once(pairs, tokenizer, kind, runtime):
    chat = make_chat(pairs, tokenizer, kind, runtime)
    messages, tools, read = [{"role": "user", "content": "Is it warm?"}], [find_weather], []
    for step in range(10):
        answer = chat(messages, tools)
        wanted, length = own(pairs, tokenizer, messages, tools)
        assert answer == {"role": "assistant", "content": wanted} and len(wanted) == NEW
        read.append(chat.stats.prefilled)
        messages += [answer, {"role": "tool", "content": f"{step} degrees"}]
    assert sum(read) + 9 * (NEW - 1) == length  # each token once; all but the last of an answer were decoded
    assert max(read[1:]) < 40 < 300 < length


@pytest.mark.parametrize("kind", ["dflash", "ring"])
def test_a_template_that_changes_earlier_answers_still_costs_a_turn(pairs, kind):
    tokenizer = byte_tokenizer(THINKING)
    chat = make_chat(pairs, tokenizer, kind)
    messages, read = [{"role": "user", "content": "Think"}], []
    for step in range(10):
        wanted, length = own(pairs, tokenizer, messages)
        messages.append(chat(messages))
        assert messages[-1]["content"] == wanted
        read.append(chat.stats.prefilled)
        messages.append({"role": "user", "content": f"More {step}"})
    assert sum(read) < 1.5 * length


def test_an_edit_goes_back_to_where_it_is(pairs, tokenizer):
    chat = make_chat(pairs, tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}]
    for more in ("Two", "Three"):
        messages += [chat(messages), {"role": "user", "content": more}]
    edited = [*messages[:3], {"role": "user", "content": "2!"}]
    wanted, length = own(pairs, tokenizer, edited)
    assert chat(edited)["content"] == wanted
    same = len("<system>Be brief.") + len("<user>One") + len("<assistant>") + NEW + 3 + len("<user>")
    assert chat.stats.prefilled == length - same
    assert chat(messages)["content"] == own(pairs, tokenizer, messages)[0]


def test_recurrent_layers_go_back_to_the_end_of_an_earlier_prompt(tokenizer):
    """After an edit ``prefilled`` counts the tokens behind that prompt's last message."""
    target = make_hybrid("qwen3_5", vocab_size=257, max_position_embeddings=1024)
    drafter = make_drafter(target, target_layer_ids=[0, 1], max_position_embeddings=1024)
    pairs = target, {"dflash": drafter}
    chat = make_chat(pairs, tokenizer)
    messages, lengths = [{"role": "user", "content": "One"}], []
    for more in ("Two", "Three"):
        wanted, length = own(pairs, tokenizer, messages)
        assert chat(messages)["content"] == wanted
        lengths.append(length)
        messages += [chat.message, {"role": "user", "content": more}]
    assert chat.stats.prefilled == lengths[1] - lengths[0] - (NEW - 1)  # all but an answer's last was decoded
    first = lengths[0] - len("<assistant>")  # another template may begin an answer otherwise
    for edited, kept in (([*messages[:2], {"role": "user", "content": "2!"}], first), (messages[4:], 0)):
        wanted, length = own(pairs, tokenizer, edited)
        assert chat(edited)["content"] == wanted and chat.stats.prefilled == length - kept


def test_pieces_are_the_message_and_an_answer_may_be_left(pairs, tokenizer):
    chat = make_chat(pairs, tokenizer, max_new_tokens=30)
    assert chat.message is None and chat.stats is None
    messages, pieces = [{"role": "user", "content": "Count"}], []
    for piece in chat.stream(messages):
        pieces.append(piece)
        if len(pieces) == 4:
            break
    said = "".join(piece.text for piece in pieces)
    assert chat.message == {"role": "assistant", "content": said} and said
    assert own(pairs, tokenizer, messages, new=30)[0].startswith(said)
    messages += [chat.message, {"role": "user", "content": "Go on"}]
    pieces = list(chat.stream(messages))
    assert pieces[-1].done and not pieces[0].done
    assert "".join(piece.text for piece in pieces) == chat.message["content"]
    assert chat.message["content"] == own(pairs, tokenizer, messages, new=30)[0]
    assert chat.stats.prefilled == len("</s>") - 3 + len("<user>Go on</s><assistant>") - 3 + 1


def test_a_stop_id_ends_an_answer_and_is_not_of_its_text(pairs, tokenizer):
    messages = [{"role": "user", "content": "Stop"}]
    wanted = own(pairs, tokenizer, messages)[0]
    stop = tokenizer.convert_tokens_to_ids(wanted[3])
    chat = make_chat(pairs, tokenizer, eos_token_id=[stop])
    end = wanted.index(wanted[3]) + 1
    assert chat(messages)["content"] == wanted[:end]
    assert chat(messages, stop_strings=[wanted[:2]], eos_token_id=[])["content"] == wanted[:2]


def test_an_answer_in_a_format_needs_no_second_tokenizer(pairs, tokenizer):
    engine = td.compile(pairs[0], None, runtime="eager", max_length=128, processors=("grammar",))
    chat = td.Chat(engine, tokenizer, do_sample=False, max_new_tokens=NEW, eos_token_id=0)
    schema = {"type": "object", "properties": {"warm": {"enum": [True]}}, "required": ["warm"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    message = chat([{"role": "user", "content": "Is it warm?"}], response_format=form)
    assert message["content"].startswith("{") and chat.stats.grammar_reads == NEW


def test_without_a_number_an_answer_may_fill_the_room(pairs, tokenizer):
    chat = make_chat(pairs, tokenizer, max_new_tokens=None, max_length=64)
    messages = [{"role": "user", "content": "x" * 20}]
    wanted, length = own(pairs, tokenizer, messages, new=64 - 38)
    assert length == 38 and chat(messages)["content"] == wanted
    messages += [chat.message, {"role": "user", "content": "More"}]
    with refuses(ValueError, "messages: ", "leave no room", "max_length=64", "compile with a larger"):
        chat(messages)


def test_a_length_that_was_asked_for_is_not_the_rooms(pairs, tokenizer):
    messages = [{"role": "user", "content": "Hello"}]
    wanted, length = own(pairs, tokenizer, messages)
    for new, asked in (
        (5, {"max_length": length + 5}),
        (4, {"generation_config": GenerationConfig(max_new_tokens=4)}),
        (3, {"generation_config": GenerationConfig(max_length=length + 3)}),
        (2, {"generation_config": GenerationConfig(max_new_tokens=4), "max_new_tokens": 2}),
    ):
        chat = make_chat(pairs, tokenizer, max_new_tokens=None)
        assert chat(messages, **asked)["content"] == wanted[:new], asked
        own_words = make_chat(pairs, tokenizer, **{"max_new_tokens": None} | asked)
        assert own_words(messages)["content"] == wanted[:new], asked


def test_what_does_not_fit_is_refused_and_nothing_is_lost(pairs, tokenizer):
    chat = make_chat(pairs, tokenizer, max_length=100)
    messages = [{"role": "user", "content": "Hello"}]
    answer = chat(messages)
    long = [*messages, answer, {"role": "user", "content": "x" * 60}]
    with refuses(ValueError, "max_new_tokens=10", "max_length=100"):
        chat.stream(long)  # before the first piece is asked for
    assert chat.message is answer
    messages += [answer, {"role": "user", "content": "x"}]
    assert chat(messages)["content"] == own(pairs, tokenizer, messages)[0]
    assert chat.stats.prefilled == 1 + 1 + len("<user>x") + 1 + len("<assistant>")


def test_refusals_say_what_to_do(pairs, tokenizer):
    with refuses(ValueError, "has no chat template", "set tokenizer.chat_template"):
        make_chat(pairs, byte_tokenizer())
    chat = make_chat(pairs, byte_tokenizer("{{ raise_exception('roles must alternate') }}"))
    with refuses(ValueError, "messages: the tokenizer's chat template refuses them (roles must alternate)"):
        chat([{"role": "user", "content": "x"}])
    for messages in ([], "hello", [{"content": "x"}]):
        with refuses(TypeError, "messages: pass a list of"):
            chat(messages)
    for name in ("tokenize", "return_tensors", "return_dict", "add_generation_prompt"):
        with refuses(ValueError, f"template_options holds {name!r}", "leave it out"):
            make_chat(pairs, tokenizer, template_options={name: False})
    chat = make_chat(pairs, byte_tokenizer("{{ '' }}"))
    with refuses(ValueError, "messages: ", "makes no token of them"):
        chat([{"role": "user", "content": "x"}])
    chat = make_chat(pairs, tokenizer)
    for options in ({"max_new_tokens": 0}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(ValueError):
            chat([{"role": "user", "content": "x"}], **options)


def test_a_response_template_finds_the_calls(pairs):
    tokenizer = byte_tokenizer(GROWING)
    found = []

    def parse_response(ids, prefix, tools):
        found.append((tokenizer.decode(ids), tokenizer.decode(prefix), tools))
        return {"role": "assistant", "tool_calls": ["called"]}

    tokenizer.response_template, tokenizer.parse_response = {"anything": 1}, parse_response
    chat = make_chat(pairs, tokenizer)
    messages = [{"role": "user", "content": "x"}]
    assert chat(messages, [find_weather]) == {"role": "assistant", "tool_calls": ["called"]}
    answer = own(pairs, tokenizer, messages, [find_weather])[0]
    assert found == [(answer, "[find_weather]<user>x</s><assistant>", [find_weather])]


def test_an_answer_that_cannot_be_parsed_stays_text(pairs):
    tokenizer = byte_tokenizer(GROWING)

    def parse_response(ids, prefix, tools):
        raise ValueError("a call without an end")

    tokenizer.response_template, tokenizer.parse_response = {"anything": 1}, parse_response
    chat, messages = make_chat(pairs, tokenizer), [{"role": "user", "content": "x"}]
    wanted = {"role": "assistant", "content": own(pairs, tokenizer, messages)[0]}
    with pytest.warns(UserWarning, match="a call without an end"):
        pieces = list(chat.stream(messages))
    assert pieces[-1].done and "".join(piece.text for piece in pieces) == wanted["content"]
    assert chat.message == wanted


def test_agreeing_pairs_draft_in_every_turn():
    target, drafter = make_pair("llama", agree=8.0)

    class Numbers:
        chat_template = "yes"

        def apply_chat_template(self, messages, **options):
            ids = [int(word) for message in messages for word in message["content"].split()]
            return {"input_ids": torch.tensor([ids])}

        def decode(self, ids, skip_special_tokens):
            return "".join(f" {id}" for id in ids)

    chat = td.Chat(td.compile(target, drafter, runtime="eager", max_length=256), Numbers(), max_new_tokens=40)
    messages = [{"role": "user", "content": "3 1 4 1 5"}]
    for _ in range(3):
        drafted = sum(sum(piece.drafted) for piece in chat.stream(messages, do_sample=False))
        assert drafted > 5 and chat.stats.mean_acceptance_length > 1.1
        messages += [chat.message, {"role": "user", "content": "9 2"}]
    assert chat.stats.prefilled == 3
