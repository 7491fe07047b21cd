"""``torch-dflash train vocabulary`` writes a drafter that drafts frequent ids alone."""

import torch
from support.stages import train

import torch_dflash as td


def test_a_drafter_with_the_answers_ids_drafts_as_before(world, overfit, tmp_path, capsys):
    said = [answer.response_ids for answer in world.answers]
    rows, out = len({token for text in said for token in text}), tmp_path / "narrow"
    line = ("vocabulary", "--drafter", overfit.exported, "--answers", world.folder / "answers")
    assert train(world, *line, "--rows", rows, "--out", out) == 0
    assert capsys.readouterr().out == (
        f"{rows} ids are 100.0% of the answers' tokens.\nThe drafter is in {out}.\n"
    )
    drafter = td.load_drafter(out, target=world.target)
    assert drafter.lm_head.weight.shape[0] == rows and drafter.dtype == overfit.drafter.dtype
    ids = torch.tensor([overfit.trained[0]])
    options = {"max_new_tokens": 16, "runtime": "eager", "return_dict_in_generate": True, "do_sample": False}
    outs = [
        td.generate(world.target, one, ids, torch.ones_like(ids), **options)
        for one in (drafter, overfit.drafter)
    ]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[0].stats.acceptance_lengths == outs[1].stats.acceptance_lengths
    assert train(world, *line, "--rows", 3, "--out", tmp_path / "three") == 0
    share = float(capsys.readouterr().out.split()[3].rstrip("%"))
    assert 0 < share < 100
    three = td.load_drafter(tmp_path / "three", target=world.target)
    out = td.generate(world.target, three, ids, torch.ones_like(ids), **options)
    assert torch.equal(out.sequences, outs[1].sequences)
    assert out.stats.rounds > outs[1].stats.rounds


def test_what_it_cannot_do_is_said_in_one_line(world, overfit, tmp_path, capsys):
    line = ["vocabulary", "--answers", world.folder / "answers", "--out"]
    for more, words in (
        ([overfit.exported, "--drafter", overfit.exported], "holds a model already"),
        ([tmp_path / "a", "--drafter", "ngram"], "--drafter ngram: it has no head to cut"),
        ([tmp_path / "a", "--drafter", overfit.exported, "--rows", 0], "'--rows': 0 is not in the range"),
    ):
        assert train(world, *line, *more) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
