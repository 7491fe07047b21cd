"""``target.generate(custom_generate=...)``, streamers, streams and compiled engines."""

import copy
import shutil

import pytest
import torch
import transformers
from support import ROOT
from support.hub_cache import REVISION, HubCache
from support.refusals import refuses
from support.shell import python
from support.versions import COUNTS_PADDING, needs_native
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    TextIteratorStreamer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

import torch_dflash as td

RUNTIMES = ["eager", "xla"]
NEW = 14


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_custom_generate_gives_the_targets_greedy_text(pair, batch, runtime):
    target, drafter = copy.deepcopy(pair[0]), pair[1]
    free = target.generate(**batch, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    target.generation_config.update(eos_token_id=[int(free[0, -4]), 96], pad_token_id=7)
    block = td.dflash(drafter, runtime=runtime)
    expected = target.generate(**batch, max_new_tokens=NEW)
    assert torch.equal(target.generate(**batch, max_new_tokens=NEW, custom_generate=block), expected)
    # One row, no padding: transformers hands over no mask.
    row = batch["input_ids"][:1]
    expected = target.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=NEW)
    out = target.generate(row, max_new_tokens=NEW, custom_generate=block, return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput) and torch.equal(out.sequences, expected)
    assert out.stats.new_tokens == expected.shape[1] - row.shape[1]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_custom_generate_samples_like_generate(pair, batch, runtime):
    target, drafter = pair
    asked = {"max_new_tokens": NEW, "do_sample": True, "temperature": 4.0, "top_k": 20}
    expected = td.generate(target, None, **batch, **asked, seed=11, runtime="eager")
    block = td.dflash(drafter, runtime=runtime)
    assert torch.equal(target.generate(**batch, **asked, seed=11, custom_generate=block), expected)
    bound = td.dflash(drafter, runtime=runtime, seed=11, cache="paged")
    assert torch.equal(target.generate(**batch, **asked, custom_generate=bound), expected)
    torch.manual_seed(5)
    first = target.generate(**batch, **asked, custom_generate=block)
    torch.manual_seed(5)
    assert torch.equal(target.generate(**batch, **asked, custom_generate=block), first)
    assert not torch.equal(first, expected)


@pytest.mark.parametrize("option", ["presence_penalty", "frequency_penalty"])
def test_custom_generate_takes_the_penalties_of_servers(pair, batch, option):
    target, drafter = pair
    asked = {"max_new_tokens": NEW, "do_sample": False, option: 4.0}
    expected = td.generate(target, None, **batch, **asked, runtime="eager")
    block = td.dflash(drafter, runtime="eager")
    assert torch.equal(target.generate(**batch, **asked, custom_generate=block), expected)
    plain = target.generate(**batch, max_new_tokens=NEW, do_sample=False, custom_generate=block)
    assert not torch.equal(plain, expected)


def test_no_time_at_all_ends_with_the_first_read(pair, batch):
    target, drafter = pair
    block = td.dflash(drafter, runtime="eager", rounds_per_chunk=1)
    options = {"max_new_tokens": 200, "do_sample": False}
    found = target.generate(**batch, **options, max_time=0.0, custom_generate=block)
    assert found.shape[1] <= batch["input_ids"].shape[1] + drafter.config.block_size + 1


@pytest.mark.parametrize(
    "option",
    [
        {"forced_bos_token_id": 3},
        {"forced_eos_token_id": 3},
        {"suppress_tokens": [*range(20, 30)]},
        {"begin_suppress_tokens": [*range(20, 50)]},
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 30},
        {"repetition_penalty": 1.5, "forced_eos_token_id": 3},
    ],
    ids=lambda option: "+".join(option),
)
def test_what_may_follow_beside_what_transformers_lists_behind_it(pair, batch, option):
    """``prefix_allowed_tokens_fn`` stands before these processors in transformers' list."""
    target, drafter = pair
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | option
    asked["prefix_allowed_tokens_fn"] = lambda row, ids: [*range(20, 60)]
    if COUNTS_PADDING and "repetition_penalty" in option:
        batch = {name: value[:1] for name, value in batch.items()}
    expected = target.generate(**batch, **asked)
    block = td.dflash(drafter, runtime="eager")
    assert torch.equal(target.generate(**batch, **asked, custom_generate=block), expected)
    words = "PrefixConstrainedLogitsProcessor runs on the host.*runtime='eager'"
    with pytest.raises(ValueError, match=words):
        target.generate(**batch, **asked, custom_generate=td.dflash(drafter, runtime="xla"))


def test_custom_generate_is_greedy_where_do_sample_is_unset(pair, batch):
    target, drafter = pair
    # The other options have no effect then, to transformers too.
    config = GenerationConfig(max_new_tokens=NEW, pad_token_id=0, temperature=1.0, top_k=50, top_p=0.9)
    options = {"do_sample": None, "generation_config": config}
    out = target.generate(**batch, **options, custom_generate=td.dflash(drafter, runtime="eager"))
    assert torch.equal(out, target.generate(**batch, max_new_tokens=NEW, do_sample=False, pad_token_id=0))


def test_custom_generate_repeats_prompts(pair, batch):
    target, drafter = pair
    block, length = td.dflash(drafter, runtime="eager", seed=3), batch["input_ids"].shape[1]
    options = {"do_sample": True, "temperature": 4.0, "num_return_sequences": 3, "max_new_tokens": NEW}
    options |= {"custom_generate": block}
    out = target.generate(**batch, **options)
    assert torch.equal(out[:, :length], batch["input_ids"].repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in out[:, length:].tolist()}) == 6  # rows do not share their noise


def test_custom_generate_takes_a_generation_config(pair, batch):
    target, drafter = pair
    block = td.dflash(drafter, runtime="eager", block_size=4, verify_width=3)
    text = target.generate(**batch, max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist()
    config = GenerationConfig(max_new_tokens=9, eos_token_id=text[3], pad_token_id=1)
    expected = target.generate(**batch, generation_config=config)
    config.return_dict_in_generate = True
    out = target.generate(**batch, generation_config=config, custom_generate=block)
    assert torch.equal(out.sequences, expected)
    assert max(length for row in out.stats.acceptance_lengths for length in row) in (2, 3)


@pytest.mark.parametrize("version", ["5.15.0", "5.17.2"])
def test_a_loop_that_writes_on_behind_a_stop_id_is_refused(pair, batch, monkeypatch, version):
    monkeypatch.setattr(transformers, "__version__", version)
    row = {name: rows[:1] for name, rows in batch.items()}
    with refuses(ValueError, "stop id inside of a block", "transformers>=5.18", "custom_generate"):
        pair[0].generate(**row, max_new_tokens=NEW, assistant_model=pair[1], speculation_type="dflash")


@needs_native
def test_custom_generate_agrees_with_transformers_own_dflash(pair, batch):
    row = {name: rows[:1] for name, rows in batch.items()}
    asked = {"max_new_tokens": NEW, "do_sample": False}
    native = pair[0].generate(**row, **asked, assistant_model=pair[1], speculation_type="dflash")
    ours = pair[0].generate(**row, **asked, custom_generate=td.dflash(pair[1], runtime="eager"))
    assert torch.equal(native, ours)


class Recorder:  # the names of transformers' streamers
    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, value):
        assert not self.ended and value.device.type == "cpu"
        self.puts.append(value.clone())

    def end(self):
        assert not self.ended
        self.ended = True


@pytest.mark.parametrize("through", ["generate", "custom_generate"])
def test_streamer_gets_the_prompt_then_new_tokens_as_they_come(pair, batch, through):
    target, drafter = pair
    streamer, ids = Recorder(), batch["input_ids"][:1]
    if through == "generate":
        out = td.generate(
            target, drafter, ids, max_new_tokens=NEW, runtime="eager", streamer=streamer,
            return_dict_in_generate=True,
        )  # fmt: skip
    else:
        block = td.dflash(drafter, runtime="eager", streamer=streamer)
        out = target.generate(ids, max_new_tokens=NEW, custom_generate=block, return_dict_in_generate=True)
    assert streamer.ended
    prompt, *fresh = streamer.puts
    assert torch.equal(prompt, ids)
    assert all(piece.dtype == torch.long and piece.ndim == 1 and len(piece) for piece in fresh)
    assert torch.equal(torch.cat(fresh), out.sequences[0, ids.shape[1] :])
    assert [len(piece) for piece in fresh] == [1, *out.stats.acceptance_lengths[0]]


class Letters:  # enough of a tokenizer for transformers' text streamers
    def decode(self, ids, **options):
        return "".join(chr(32 + int(token) % 94) for token in ids)


def test_transformers_own_streamer(pair, batch):
    ids = batch["input_ids"][:1]
    streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=5.0)
    out = td.generate(*pair, ids, max_new_tokens=NEW, runtime="eager", streamer=streamer)
    assert "".join(streamer) == Letters().decode(out[0, ids.shape[1] :])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_stream_yields_what_generate_returns(pair, batch, runtime):
    engine = td.compile(*pair, runtime=runtime, max_length=64, batch_size=2, rounds_per_chunk=2)
    out = engine.generate(**batch, max_new_tokens=NEW)
    rows = [[], []]
    for chunk in engine.stream(**batch, max_new_tokens=NEW):
        assert any(chunk)
        for row, fresh in zip(rows, chunk, strict=True):
            row += fresh
    assert rows == out[:, batch["input_ids"].shape[1] :].tolist()
    abandoned = engine.stream(**batch, max_new_tokens=NEW)
    first = next(abandoned)
    assert [len(row) for row in first] == [1, 1]
    abandoned.close()
    assert torch.equal(engine.generate(**batch, max_new_tokens=NEW), out)


def test_a_warm_engine_compiles_nothing_more(pair, batch):
    engine = td.compile(*pair, runtime="xla", max_length=64, batch_size=2).warmup()
    expected = pair[0].generate(**batch, max_new_tokens=NEW, do_sample=False)
    calls = [{}, {"do_sample": True, "temperature": [0.3, 1.7], "top_p": 0.9, "seed": 1}]
    calls += [{"eos_token_id": [1, 2, 3], "max_new_tokens": [2, 40]}]
    for asked in calls:
        options = {"max_new_tokens": NEW, "return_dict_in_generate": True} | asked
        assert engine.generate(**batch, **options).stats.compilations == 0
    for width in (1, 15, 16, 17, 40):
        ids = torch.ones(1, width, dtype=torch.int32)
        out = engine.generate(ids, max_new_tokens=NEW, return_dict_in_generate=True)
        assert out.stats.compilations == 0 and out.sequences.shape == (1, width + NEW)
        assert out.stats.host_reads == 1 + -(-out.stats.rounds // engine.plan.rounds_per_chunk)
    assert torch.equal(engine.generate(**batch, max_new_tokens=NEW), expected)


def test_engines_keep_the_pair_alive_and_generate_reuses_them(pair, batch):
    engine = td.compile(*copy.deepcopy(pair), runtime="eager", max_length=64, batch_size=2)
    assert engine.generate(**batch, max_new_tokens=4).shape[1] == batch["input_ids"].shape[1] + 4
    first = td.generate(*pair, **batch, max_new_tokens=4, runtime="xla", return_dict_in_generate=True)
    again = td.generate(
        *pair, **batch, max_new_tokens=9, do_sample=True, top_k=0, seed=2, eos_token_id=[5, 6],
        runtime="xla", return_dict_in_generate=True,
    )  # fmt: skip
    assert first.stats.compilations >= 0 == again.stats.compilations


def test_a_generation_config_of_the_users_is_filled_from_the_models(pair, batch):
    target, drafter = pair
    given = GenerationConfig(max_new_tokens=9, eos_token_id=[1, 2])
    wanted = target.generate(**batch, generation_config=given, pad_token_id=0)
    got = td.generate(target, drafter, **batch, generation_config=given, pad_token_id=0, runtime="eager")
    assert torch.equal(got, wanted)
    with pytest.raises(TypeError, match="generation_config=dict"):
        td.generate(target, drafter, **batch, generation_config={"max_new_tokens": 9})


def test_custom_generate_hears_an_override_of_the_models_config(pair, batch):
    target, drafter = copy.deepcopy(pair[0]), pair[1]
    target.generation_config.update(repetition_penalty=1.3, pad_token_id=0)
    options = {"max_new_tokens": NEW, "repetition_penalty": 1.0, "do_sample": False}
    expected = target.generate(**batch, **options)
    block = td.dflash(drafter, runtime="eager")
    assert torch.equal(target.generate(**batch, **options, custom_generate=block), expected)


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 16, "image_size": 28}
IMAGES |= {"patch_size": 14}


def multimodal(name):
    """A random model for text and images; its generate prepares more than text needs."""
    if name == "gemma3":
        config = Gemma3Config(
            text_config=SMALL | {"head_dim": 8, "sliding_window": 6},
            vision_config=IMAGES | {"num_attention_heads": 2}, image_token_index=96,
        )  # fmt: skip
        return Gemma3ForConditionalGeneration(config).eval()
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=SMALL | SECTIONS, vision_config=vision)
    ).eval()


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_custom_generate_of_a_multimodal_model_that_is_given_text(batch, name):
    target = multimodal(name)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    block = td.dflash(td.NGramProposer(4), runtime="eager")
    expected = target.generate(**batch, **options)
    assert torch.equal(target.generate(**batch, **options, custom_generate=block), expected)


FOLDER = str(ROOT / "examples" / "in_a_repository")


class Streamer:  # keeps its input
    def __init__(self):
        self.put_ids, self.ended = [], False

    def put(self, ids):
        self.put_ids += ids.flatten().tolist()

    def end(self):
        self.ended = True


def test_the_text_is_transformers_own(pair, batch):
    target, drafter = pair
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    block = {"custom_generate": FOLDER, "trust_remote_code": True, "runtime": "eager"}
    for options in ({}, {"repetition_penalty": 1.7}, {"eos_token_id": [10, 33], "min_new_tokens": 4}):
        want = target.generate(**batch, **asked, **options)
        for assistant in (drafter, None):
            found = target.generate(**batch, **asked, **options, **block, assistant_model=assistant)
            assert torch.equal(found, want)


def test_a_streamer_and_a_dict_arrive(pair, batch):
    target, drafter = pair
    row, streamer = {name: value[:1] for name, value in batch.items()}, Streamer()
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    block = {"custom_generate": FOLDER, "trust_remote_code": True, "runtime": "eager"}
    out = target.generate(**row, **asked, **block, assistant_model=drafter, streamer=streamer)
    assert streamer.ended and streamer.put_ids == out.sequences[0].tolist()
    assert out.stats.mean_acceptance_length > 1


def remote(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def in_a_folder(pair, folder):
    """``pair`` as a model's repository holds it, with our folder."""
    pair[0].save_pretrained(folder)
    pair[1].save_pretrained(folder / "drafter")
    shutil.copytree(f"{FOLDER}/custom_generate", folder / "custom_generate")


def test_the_drafter_beside_the_weights_drafts(pair, batch, tmp_path):
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    want = pair[0].generate(**batch, **asked).sequences
    in_a_folder(pair, tmp_path)
    found = remote(tmp_path).generate(**batch, **asked, runtime="eager")
    assert torch.equal(found.sequences, want) and found.stats.mean_acceptance_length > 1
    (tmp_path / "drafter/config.json").write_text("{")
    with pytest.raises(OSError, match="JSON"):
        remote(tmp_path).generate(**batch, **asked, runtime="eager")
    shutil.rmtree(tmp_path / "drafter")
    found = remote(tmp_path).generate(**batch, **asked, runtime="eager")
    assert torch.equal(found.sequences, want) and found.stats.mean_acceptance_length == 1


def test_a_drafter_of_the_hub_is_of_the_models_revision(pair, batch, tmp_path):
    """Offline in a process of its own, whose cache holds the repository; ``main`` has moved on since."""
    folder = HubCache(tmp_path).folder("us/pair")
    in_a_folder(pair, folder)
    (tmp_path / "models--us--pair/refs/main").write_text("0" * 39 + "2")
    done = python(
        "import torch, transformers\n"
        f"load, own = transformers.AutoModelForCausalLM.from_pretrained, {{'revision': {REVISION!r}}}\n"
        "model = load('us/pair', trust_remote_code=True, **own)\n"
        "options = dict(max_new_tokens=9, do_sample=False, return_dict_in_generate=True, runtime='eager')\n"
        "options['inputs'] = torch.tensor([[3, 5, 7]])\n"
        "print(model.generate(**options).stats.mean_acceptance_length > 1)\n"
        "other = load('us/pair', **own)\n"
        f"options |= dict(custom_generate={FOLDER!r}, trust_remote_code=True)\n"
        "print(other.generate(**options).stats.mean_acceptance_length)\n",
        HF_HUB_CACHE=str(tmp_path),
        HF_HUB_OFFLINE="1",
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    assert done.stdout.split() == ["True", "1.0"], done.stderr
