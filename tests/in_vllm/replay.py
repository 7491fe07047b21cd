"""A drafter's drafts at each recorded step, from the emitted text alone: transformers' target, float32."""

import torch
from torch.nn.functional import embedding
from transformers import AutoModelForCausalLM, DynamicCache

import torch_dflash as td


class Replay:  # drafts and logits of a pair in float32, whole texts at a time
    def __init__(self, target, drafter):
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.drafter = td.load_drafter(drafter, dtype=torch.float32).eval()

    @torch.no_grad()
    def read(self, tokens):
        """(features [1, R, nH], logits [R, V]) of a whole text."""
        out = self.target(torch.tensor([tokens]), output_hidden_states=True)
        taps = self.drafter.config.target_layer_ids
        return torch.cat([out.hidden_states[tap + 1] for tap in taps], -1), out.logits[0]

    @torch.no_grad()
    def draft(self, features, anchor, length, count):
        """The tokens drafted after ``anchor`` at position ``length``."""
        config = self.drafter.config
        first = int(not config.sample_from_anchor)
        ids = torch.tensor([[anchor] + [config.mask_token_id] * (count - 1 + first)])
        table = self.target.get_input_embeddings().weight  # some targets' own calls scale their rows
        noise = self.drafter.embed(ids, lambda chosen: embedding(chosen, table), torch.float32)
        at = torch.arange(length + ids.shape[1])[None]
        out = self.drafter(noise, features[:, :length], at, past_key_values=DynamicCache())
        hidden, head = out.last_hidden_state[:, first:], self.target.get_output_embeddings()
        return self.drafter.choose(hidden, ids[:, 0], head)[0].tolist()

    def compare(self, request, count):
        """Counts of a recorded request.

        Drafts, tokens accepted in vLLM, tokens accepted here, drafts with equal acceptance; without
        async scheduling also drafted tokens, and those of them that are drafted here.
        """
        text = request["prompt"] + [token for *_, gained in request["steps"] for token in gained]
        features, _ = self.read(text)
        found = [0] * 6
        for at, drafts, gained in request["steps"]:
            if not drafts:
                continue
            mine = self.draft(features, text[at], at, count)[: len(drafts)]
            following = text[at + 1 : at + 1 + len(drafts)]
            accepted = next(
                (k for k, (a, b) in enumerate(zip(mine, following, strict=False)) if a != b), None
            )
            accepted = min(len(mine), len(following)) if accepted is None else accepted
            found[0] += 1
            found[1] += len(gained) - 1
            # No token that could be compared follows the last token of a text.
            found[2] += min(accepted, len(text) - 1 - at)
            found[3] += accepted == len(gained) - 1
            if -1 not in drafts:
                found[4] += len(drafts)
                found[5] += sum(a == b for a, b in zip(mine, drafts, strict=True))
        return found

    def says_greedily(self, prompt, text, gap) -> bool:
        """Whether each token of a text has the highest logit, or one that is less than ``gap`` below."""
        _, logits = self.read(prompt + text)
        said = logits[len(prompt) - 1 : -1]
        return bool((said.amax(-1) - said.gather(-1, torch.tensor(text)[:, None])[:, 0] < gap).all())

    def parts_at_a_tie(self, prompt, one, other, gap) -> bool:
        """Whether two texts are equal, or first differ where float32 logits differ by less than ``gap``."""
        at = next((k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is None:
            return True
        _, logits = self.read(prompt + one[:at])
        return bool((logits[-1, one[at]] - logits[-1, other[at]]).abs() < gap)


def law(logits, temperature, top_k, top_p, slack=0.0):
    """The exact law of tokens [T, V]: the temperature, then the ``top_k`` best, then the first ``top_p``.

    ``slack``: the tolerance on a greedy token's logit, and beyond ``top_p``.
    """
    if not temperature:
        return (logits >= logits.amax(-1, keepdim=True) - slack).float()
    scaled = logits / temperature
    scaled = scaled.where(scaled >= scaled.topk(top_k or scaled.shape[-1]).values[:, -1:], -torch.inf)
    probs, order = scaled.softmax(-1).sort(descending=True)
    probs = probs.where(probs.cumsum(-1) - probs < top_p + slack, 0.0)
    return torch.zeros_like(logits).scatter(-1, order, probs / probs.sum(-1, keepdim=True))
