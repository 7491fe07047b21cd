"""The stages of training, small and eager."""

from pathlib import Path

from safetensors import safe_open

from support.trained import MASK, NEW, TAPS, World
from torch_dflash.cli import main
from torch_dflash.train.options import FeatureOptions, Layers, RegenerateOptions

SHAPE = ("--mask-token-id", str(MASK), "--layers", "1", "--block-size", "4")


SHORT = ("--batch-size", "4", "--held-out", "1", "--anchors", "8", "--learning-rate", "1e-3")


EAGER = ("--runtime", "eager", "--max-new-tokens", "8")


def train(world: World, stage: str, *line) -> int:
    return main(["train", stage, "--target", world.path, *map(str, line)])


def fit(world: World, out: Path, *line, shape=SHAPE, epochs=2) -> int:
    return train(world, "fit", "--out", out, *shape, *SHORT, "--epochs", epochs, *line)


SAID = RegenerateOptions(max_new_tokens=NEW, batch_size=4, shard_size=4, runtime="eager")


CACHED = FeatureOptions(taps=Layers(TAPS), dtype="float32", shard_size=4, runtime="eager")


def cached(**changes) -> FeatureOptions:
    return FeatureOptions(**vars(CACHED) | changes)


def checksums(folder: Path) -> dict[str, dict]:
    return {path.name: safe_open(path, "pt").metadata() for path in sorted(folder.glob("features-*"))}
