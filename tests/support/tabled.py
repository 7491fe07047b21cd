"""A proposer that drafts the trees of a table, by the anchor's position; and random trees."""

import random
from collections.abc import Callable

import torch

from torch_dflash.proposers.base import Proposer
from torch_dflash.state import Draft


class Tabled(Proposer):  # drafts row b's tree at position p from tables [B, S, N], rewritten in place
    name = "tabled"

    def __init__(self, batch_size: int, slots: int, rows: int, depth: int):
        super().__init__()
        self.width, self.depth = rows, depth
        for name in ("tokens", "parent"):
            empty = torch.zeros(batch_size, slots, rows - 1, dtype=torch.int32)
            self.register_buffer(name, empty)
        self.register_buffer("valid", torch.zeros(batch_size, slots, dtype=torch.int32))

    def propose(self, pstate, anchor, length, embed, head):
        at = length.long()[:, None]
        index = at[..., None].expand(-1, 1, self.width - 1)
        tokens, parent = (table.gather(1, index)[:, 0] for table in (self.tokens, self.parent))
        return Draft(tokens, self.valid.gather(1, at)[:, 0], parent), pstate

    def fill(self, texts: list[list[int]], tree: Callable[[list[int], random.Random], tuple]) -> None:
        """Fills the table: at each position of ``texts`` the (tokens, parent) of ``tree(next tokens)``."""
        draw = random.Random(5)
        self.valid.zero_()
        for row, text in enumerate(texts):
            for at in range(len(text) - 1):
                tokens, parent = tree(text[at + 1 :], draw)
                count = len(tokens)
                self.tokens[row, at, :count] = torch.tensor(tokens, dtype=torch.int32)
                self.parent[row, at, :count] = torch.tensor(parent, dtype=torch.int32)
                self.valid[row, at] = count


def shape(nodes: int, depth: int, draw: random.Random) -> list[int]:
    parent, path = [], []
    for node in range(nodes):
        path = path[: draw.randint(max(0, len(path) - 2), min(len(path), depth - 1))]
        parent.append(path[-1] if path else -1)
        path.append(node)
    return parent


def with_path(nodes: int, depth: int, right: bool = True, vocab: int = 90) -> Callable:
    """Trees with the continuation in a random branch, as deep as the branch; or never right."""

    def tree(ahead: list[int], draw: random.Random) -> tuple[list[int], list[int]]:
        parent = shape(nodes, depth, draw)
        deep = [0] * nodes
        for node, above in enumerate(parent):
            deep[node] = deep[above] + 1 if above >= 0 else 1
        end = max(range(nodes), key=lambda node: (deep[node], draw.random()))
        path, node = set(), end
        while node >= 0:
            path.add(node)
            node = parent[node]
        tokens = []
        for node in range(nodes):
            true = ahead[deep[node] - 1] if deep[node] <= len(ahead) else 0
            wrong = (true + draw.randint(1, vocab - 1)) % vocab
            tokens.append(true if right and node in path else wrong)
        return tokens, parent

    return tree
