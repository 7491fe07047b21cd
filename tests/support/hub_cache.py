"""A hub cache as huggingface_hub keeps it, with tiny models under published ids."""

import json

from support.tiny import make_drafter, make_target
from support.tokenizers import TEMPLATE, byte_tokenizer

REVISION = "0" * 39 + "1"


class HubCache:  # ``folder(id)`` is the folder of a repository's only revision
    def __init__(self, root):
        self.root = root
        self.target = make_target("qwen3", vocab_size=257, eos_token_id=0)
        self.drafter = make_drafter(self.target, block_size=16)

    def folder(self, repo):
        own = self.root / f"models--{repo.replace('/', '--')}"
        folder = own / "snapshots" / REVISION
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("refs", "blobs"):
            (own / name).mkdir(exist_ok=True)
        (own / "refs/main").write_text(REVISION)
        return folder

    def add_target(self, repo):
        self.target.save_pretrained(self.folder(repo))
        byte_tokenizer(TEMPLATE).save_pretrained(self.folder(repo))

    def add_drafter(self, repo, **changes):
        folder = self.folder(repo)
        self.drafter.save_pretrained(folder)
        raw = json.loads((folder / "config.json").read_text())
        raw |= changes | {"dflash_config": raw["dflash_config"] | changes}
        (folder / "config.json").write_text(json.dumps(raw))
        return folder
