"""Answers and features are the target's own, whole or absent, and made once."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.hybrids import make_hybrid
from support.refusals import refuses
from support.stages import CACHED, SAID, cached, checksums
from support.tiny import make_target
from support.trained import CONTEXT, NEW, TAPS, TEXTS, options, shape

import torch_dflash as td
from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import Answer, Prompt, encode_conversation, read_answers
from torch_dflash.train.answers.regenerate import regenerate
from torch_dflash.train.features.extract import FeatureExtractor, Sequence, cache_features, encode_answers
from torch_dflash.train.features.sequences import CachedSequences, OnlineSequences
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.options import DrafterShape
from torch_dflash.train.fit.schedule import Schedule
from torch_dflash.train.options import Layers, RegenerateOptions


def said(**changes) -> RegenerateOptions:
    return RegenerateOptions(**vars(SAID) | changes)


def answer(world, messages, new=NEW):
    ids = torch.tensor([encode_conversation(world.tokenizer, messages)])
    out = world.target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


def shards(folder: Path, kind: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob(f"{kind}-*"))}


def test_answers_are_the_targets_own_in_shards(world):
    stops = world.target.generation_config.eos_token_id
    assert len(world.answers) == len(TEXTS)
    assert list(shards(world.folder / "answers", "answers")) == [
        f"answers-{number:05}-of-00003.jsonl.gz" for number in range(3)
    ]
    for one in world.answers:
        assert one.response_ids == answer(world, one.messages)
    lengths = [len(one.response_ids) for one in world.answers]
    ended = [one for one in world.answers if one.response_ids[-1] in stops]
    assert max(lengths) == NEW and ended and min(lengths) < NEW
    assert {one.messages[0]["content"] for one in world.answers} == set(TEXTS)


def test_xla_answers_the_same(world, tmp_path):
    regenerate(world.target, world.tokenizer, world.prompts[:2], tmp_path, said(runtime="xla", batch_size=2))
    found = read_answers([tmp_path])
    assert len(found) == 2 and all(one in world.answers for one in found)


def test_only_what_is_missing_is_made_again(world, tmp_path, monkeypatch):
    def go():
        return regenerate(world.target, world.tokenizer, world.prompts, tmp_path, SAID)

    assert go() == len(TEXTS)
    before = shards(tmp_path, "answers")
    (tmp_path / "answers-00001-of-00003.jsonl.gz").unlink()
    assert go() == 4 and shards(tmp_path, "answers") == before
    monkeypatch.setattr("torch_dflash.train.answers.regenerate.generate", None)  # no more decoding
    assert go() == 0


def test_other_settings_are_refused_by_name(world, tmp_path):
    regenerate(world.target, world.tokenizer, world.prompts[:1], tmp_path, SAID)
    with refuses(StageError, str(tmp_path), "max_new_tokens=20, now max_new_tokens=19", "another directory"):
        regenerate(world.target, world.tokenizer, world.prompts[:1], tmp_path, said(max_new_tokens=19))
    with refuses(StageError, "prompts=1, now prompts=2"):
        regenerate(world.target, world.tokenizer, world.prompts[:2], tmp_path, SAID)


def test_later_turns_are_asked_after_the_earlier_answers(world, tmp_path):
    prompts = [Prompt("a", ["one", "two", "three"]), Prompt("b", ["alone"])]
    assert regenerate(world.target, world.tokenizer, prompts, tmp_path, said(max_new_tokens=6)) == 4
    found = read_answers([tmp_path])
    talk = sorted((one for one in found if one.source == "a"), key=lambda one: len(one.messages))
    messages = []
    for turn, one in zip(prompts[0].turns, talk, strict=True):
        messages.append({"role": "user", "content": turn})
        assert one.messages == messages and one.response_ids == answer(world, messages, 6)
        text = world.tokenizer.decode(one.response_ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
    assert [one.messages[0]["content"] for one in found if one.source == "b"] == ["alone"]


def test_prompts_without_room_are_left_out_and_counted(world, tmp_path, capsys):
    """The count has prompts too long by the option, and too long for the context with the longest answer."""
    prompts = [Prompt("a", ["short"]), Prompt("a", ["x" * 40, "never asked"])]
    assert regenerate(world.target, world.tokenizer, prompts, tmp_path / "a", said(max_prompt_tokens=20)) == 1
    assert "answers=1, left_out=2" in capsys.readouterr().err
    prompts.append(Prompt("b", ["y" * (CONTEXT - NEW)]))
    assert regenerate(world.target, world.tokenizer, prompts[::2], tmp_path / "b", SAID) == 1
    assert "answers=1, left_out=1" in capsys.readouterr().err
    summary = {"answers": 1, "left_out": 1}
    assert json.loads((tmp_path / "b" / "summary.json").read_text()) == summary
    assert regenerate(world.target, world.tokenizer, prompts[::2], tmp_path / "b", SAID) == 0
    assert "answers=1, left_out=1" in capsys.readouterr().err  # counted again from the shards
    assert json.loads((tmp_path / "b" / "summary.json").read_text()) == summary
    for few, words in (
        (prompts[2:], f"none of the 1 is at most {CONTEXT - NEW} tokens"),
        ([], "at least one"),
    ):
        with refuses(ValueError, "prompts", words):
            regenerate(world.target, world.tokenizer, few, tmp_path / "c", SAID)
    assert not (tmp_path / "c").exists()
    with refuses(ValueError, f"max_new_tokens={CONTEXT}", f"context of {CONTEXT}"):
        regenerate(world.target, world.tokenizer, prompts, tmp_path / "c", said(max_new_tokens=CONTEXT))


def test_sampled_answers_are_those_of_their_seed(world, tmp_path, monkeypatch):
    monkeypatch.setattr(world.target.generation_config, "do_sample", True)
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        chosen = said(sampled=True, seed=seed, max_new_tokens=8)
        regenerate(world.target, world.tokenizer, world.prompts[:3], tmp_path / name, chosen)
        texts.append(
            {one.messages[0]["content"]: one.response_ids for one in read_answers([tmp_path / name])}
        )
    assert texts[0] == texts[1] != texts[2]
    greedy = {one.messages[0]["content"]: one.response_ids[:8] for one in world.answers}
    assert any(texts[0][text] != greedy[text] for text in texts[0])


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_features_are_the_layers_outputs(world, runtime):
    """Features equal transformers' hidden_states[l + 1], but the last layer's features are not normed."""
    rows = [one.ids for one in world.sequences[:3]]
    found = FeatureExtractor(world.target, TAPS, torch.float32, runtime)(rows)
    hidden = world.target.config.hidden_size
    for row, ids in enumerate(rows):
        with torch.no_grad():
            states = world.target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            for place, tap in enumerate(TAPS):
                mine = found[row, : len(ids), place * hidden : (place + 1) * hidden]
                if tap == TAPS[-1]:
                    mine = world.target.model.norm(mine)
                assert torch.allclose(mine, states[tap + 1][0], atol=2e-4), (row, tap)
    assert (found[0, : len(rows[0]), -hidden:] - states[-1][0, : len(rows[0])]).abs().max() > 0.1


def test_windows_of_a_target_reach_its_features_on_both_runtimes():
    target = make_target("gpt_oss", num_hidden_layers=2)
    rows = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [7, 8]]
    found = [FeatureExtractor(target, (0, 1), torch.float32, name)(rows) for name in ("eager", "xla")]
    # Entries reach 44, and each runtime is within 1.2e-4 of float64.
    assert torch.allclose(found[0][0], found[1][0], atol=1e-3)
    assert torch.allclose(found[0][1, :2], found[1][1, :2], atol=1e-3)
    whole = make_target("gpt_oss", num_hidden_layers=2, sliding_window=64)
    (unlike,) = FeatureExtractor(whole, (0, 1), torch.float32, "eager")(rows[:1])
    assert (unlike[6:10] - found[0][0, 6:10]).abs().amax(dim=1).min() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_hold_ids_starts_and_features(world, tmp_path, dtype):
    cache_features(world.target, world.sequences, tmp_path, cached(dtype=dtype, batch_size=3))
    files = sorted(tmp_path.glob("features-*"))
    assert [path.name for path in files] == [f"features-{n:05}-of-00003.safetensors" for n in range(3)]
    sequences = CachedSequences([tmp_path])
    assert sequences.taps == TAPS and len(sequences) == len(world.sequences)
    extract = FeatureExtractor(world.target, TAPS, getattr(torch, dtype), "eager")
    for number, one in enumerate(world.sequences):
        assert sequences.sequence(number) == one
        (found,) = sequences.features([number])
        assert found.dtype == getattr(torch, dtype)
        assert torch.allclose(found, extract([one.ids])[0], atol=1e-4 if dtype == "float32" else 0.05)
    with safe_open(files[0], "pt") as file:
        assert sorted(file.keys()) == ["features", "ids", "lengths", "starts"]


def test_a_sequence_as_long_as_the_context_has_features(world):
    rows = [[number % 250 + 1 for number in range(CONTEXT)], [3, 4]]
    eager, xla = (
        FeatureExtractor(world.target, TAPS, torch.float32, name)(rows) for name in ("eager", "xla")
    )
    assert eager.shape == xla.shape == (2, CONTEXT, 3 * 32)
    # No training step sees the last token's features: a block's context ends before its anchor.
    assert torch.allclose(eager[0, :-1], xla[0, :-1], atol=5e-4)


def test_threads_that_share_an_extractor_get_their_own_features(world):
    """A fit validates in one thread while it makes its next batch in another."""
    extract = FeatureExtractor(world.target, TAPS, torch.float32, "eager")
    rows = [[[number + place for place in range(20 + number)]] for number in range(1, 41)]
    alone = [extract(one) for one in rows]
    with ThreadPoolExecutor(4) as pool:
        for mine, theirs in zip(alone, pool.map(extract, rows), strict=True):
            assert torch.equal(mine, theirs)


def test_cached_and_computed_features_make_the_same_batches(world):
    online = OnlineSequences(world.sequences, FeatureExtractor(world.target, TAPS, torch.float32, "eager"))
    chosen = options(batch_size=3, anchors=5)
    one, other = (Schedule(kind, chosen, (0, 2), last=3) for kind in (world.cached(), online))
    assert one.steps == other.steps == 3 * 4
    for step in range(one.steps):
        for mine, theirs in zip(one.step_batches(step), other.step_batches(step), strict=True):
            for name in ("ids", "length", "anchors"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
            assert torch.allclose(mine.features, theirs.features, atol=1e-4)
            assert torch.allclose(mine.last, theirs.last, atol=1e-4)
            hidden = world.target.config.hidden_size
            assert mine.features.shape[2] == 2 * hidden and mine.last.shape[2] == hidden


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[-100] ^= 1
    elif how == "header":
        content[20] ^= 255
    path.write_bytes({"truncated": content[: len(content) // 2], "empty": b""}.get(how, content))


@pytest.mark.parametrize("how", ["truncated", "flipped", "header", "empty"])
def test_a_damaged_shard_is_named_and_alone_made_anew(world, tmp_path, how):
    cache_features(world.target, world.sequences, tmp_path, CACHED)
    before = checksums(tmp_path)
    path = tmp_path / "features-00001-of-00003.safetensors"
    damage(path, how)
    with refuses(StageError, str(path), "is damaged", "delete it", "only this shard"):
        CachedSequences([tmp_path])
    path.unlink()
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in before if name != path.name}
    cache_features(world.target, world.sequences, tmp_path, CACHED)
    assert checksums(tmp_path) == before
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in times}


def test_features_of_other_answers_or_taps_are_refused(world, tmp_path):
    cache_features(world.target, world.sequences[:2], tmp_path / "a", CACHED)
    other = [world.sequences[0], Sequence(world.sequences[1].ids[::-1], 3)]
    with refuses(StageError, "checksum="):
        cache_features(world.target, other, tmp_path / "a", CACHED)
    cache_features(world.target, world.sequences[:2], tmp_path / "b", cached(taps=Layers((1,))))
    with refuses(StageError, "different taps", "(0, 2, 3)", "(1,)"):
        CachedSequences([tmp_path / "a", tmp_path / "b"])
    with refuses(StageError, f"{tmp_path / 'void'}: no features", "run the features stage"):
        CachedSequences([tmp_path / "void"])
    for taps, words in (((0, 4), "4 layers"), ((-1,), "4 layers"), ((), "at least one"), ((2, 2), "[2]")):
        with refuses(ValueError, f"taps={list(taps)}", words):
            FeatureExtractor(world.target, taps)
        if words != "4 layers":  # known without a target
            for build in (cached, shape):
                with refuses(ValueError, f"taps={list(taps)}", words):
                    build(taps=Layers(taps))
    with refuses(StageError, "max_length"):
        cache_features(world.target, [], tmp_path / "c", CACHED)


def test_answers_are_cut_at_the_end_and_left_out_if_nothing_is_left(world):
    one = world.answers[0]
    prompt = encode_conversation(world.tokenizer, one.messages)
    for room, kept in ((100, NEW), (len(prompt) + 2, 2), (len(prompt) + 1, None), (3, None)):
        found = encode_answers(world.tokenizer, [one], room)
        wanted = [] if kept is None else [Sequence(prompt + one.response_ids[:kept], len(prompt))]
        assert found == wanted
    stopped = Answer("a", one.messages, [0])
    assert encode_answers(world.tokenizer, [stopped], 100) == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_oss"])
def test_a_new_drafter_fits_any_family(family):
    target = make_target(family)
    drafter = new_drafter(target, DrafterShape(mask_token_id=96, layers=2, block_size=4))
    ids = torch.tensor([[3, 4, 5]])
    out = td.generate(target, drafter, ids, max_new_tokens=5, runtime="eager", do_sample=False)
    assert torch.equal(
        out, td.generate(target, None, ids, max_new_tokens=5, runtime="eager", do_sample=False)
    )
    again = new_drafter(make_target(family), DrafterShape(mask_token_id=96, layers=2, block_size=4))
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["qwen3_5", "kimi_linear"])
def test_a_new_drafter_of_a_target_with_recurrent_layers_can_be_loaded(kind, tmp_path):
    """Rotations of a part of a head, and targets that rotate nothing, are not copied."""
    target = make_hybrid(kind)
    assert (getattr(target.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 0.5) < 1
    sizes = {"mask_token_id": 90, "layers": 1, "block_size": 4, "taps": (0,)}
    new_drafter(target, DrafterShape(**sizes)).save_pretrained(tmp_path)
    drafter, ids = td.load_drafter(tmp_path, target), torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 8, "runtime": "eager", "do_sample": False}
    texts = [td.generate(target, one, ids, **options) for one in (None, drafter)]
    assert texts[0].equal(texts[1])
