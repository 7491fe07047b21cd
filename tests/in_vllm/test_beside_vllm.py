"""The package in the environment of vLLM: its torch, jax, torchax, transformers and llguidance are older."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CODE = """
import torch, torch_dflash as td
from support import tiny
from support.tokenizers import byte_tokenizer
target, drafter = tiny.make_pair(agree=8.0)
ids = torch.randint(0, 90, (2, 7))
texts = [td.generate(target, drafter, ids, max_new_tokens=12, runtime=name) for name in ("eager", "xla")]
assert torch.equal(*texts)
tokenizer = byte_tokenizer()
target = tiny.make_target(vocab_size=257, eos_token_id=0)
drafter = tiny.make_drafter(target)
grammar = td.Grammar.regex("[a-c]{4,8}", tokenizer)
out = td.generate(target, drafter, ids, max_new_tokens=12, grammar=grammar, runtime="eager")
said = tokenizer.batch_decode(out[:, 7:], skip_special_tokens=True)
assert all(set(text) <= set("abc") and len(text) >= 4 for text in said), said
print("done")
"""


def test_texts_eager_xla_and_by_a_grammar():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), done.stderr[-4000:]


def test_importing_the_package_imports_no_vllm():
    code = "import sys, torch_dflash, torch_dflash.integrations.vllm.plugin; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
