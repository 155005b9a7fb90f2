"""Read the recorded data in tests/data, and pack it: python tests/recorded_data.py REFERENCE_FOLDER.

tests/data/README.md says where the data comes from. Files that compress well are stored as .xz. The gradients of
stories260K are stored as random projections: three numbers for each parameter.
"""

import lzma
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"
COPIED = [
    "tiny-gpt*-random/*",
    "hf-gpt2/gpt-nano-sort/*",
    "hf-gpt2/mingpt-adder-2digit/*",
    "hf-gpt2/makemore-names/*",
    "hf-llama/stories260K/*.json",
    "hf-llama/stories260K/model.safetensors",
    "gpt2-bpe/vectors.*",
    "corpora/names-test-1000.txt",
    "*/LICENSE*",
]
PACKED = ["gpt-nano-sort/*.json", "gpt2-bpe/*.json", "gpt2-bpe/merges.txt", "gpt2-124m-outputs/*.json"]


def find_data() -> Path:
    """The folder tests/data. The source distribution lacks it: there the test skips."""
    if not DATA.is_dir():
        pytest.skip("tests/data is a part of the repository only")
    return DATA


def read_packed(name: str) -> bytes:
    """The content of a file in tests/data that is stored as .xz: read_packed("gpt2-bpe/vocab.json")."""
    return lzma.decompress((find_data() / f"{name}.xz").read_bytes())


def project(gradient: np.ndarray) -> np.ndarray:
    """Three products of a gradient with random directions, the same for every gradient of this size: (3,)."""
    directions = np.random.default_rng(gradient.size).standard_normal((3, gradient.size))
    return directions @ gradient.ravel()


def pack(reference: Path) -> None:
    def find(patterns: list[str]) -> Iterator[tuple[Path, Path]]:
        for source in (path for pattern in patterns for path in sorted(reference.glob(pattern))):
            target = DATA / source.relative_to(reference)
            target.parent.mkdir(parents=True, exist_ok=True)
            yield source, target

    for source, target in find(COPIED):
        shutil.copyfile(source, target)
    for source, target in find(PACKED):
        content = lzma.compress(source.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        target.with_name(f"{target.name}.xz").write_bytes(content)
    story = dict(np.load(reference / "hf-llama/stories260K/expected_float64.npz"))
    for name in [name for name in story if name.startswith("grad.")]:
        gradient = story.pop(name)
        story[f"projections.{name.removeprefix('grad.')}"] = project(gradient)
    np.savez_compressed(DATA / "hf-llama/stories260K/expected_float64.npz", **story)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
