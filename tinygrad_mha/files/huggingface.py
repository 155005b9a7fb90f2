"""Read and write Hugging Face folders of GPT-1 and GPT-2 as a configuration and arrays by name.

Our parameter names are GPT-2's, and both store linear weights (in, out). What differs is a prefix, two names of GPT-1,
mask buffers in some files, the tied head, and the keys of config.json.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha.files.atomic import replacing
from tinygrad_mha.files.json_files import CheckpointError, read_json
from tinygrad_mha.files.safetensors import load_arrays, save_arrays

__all__ = ["read_folder", "write_folder"]

PREFIX = "transformer."
MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # not h.0.attn.c_attn.bias
HAS_BIAS = re.compile(r"(^|\.)(ln_|c_)\w+\.weight$")  # layer norms and linear layers
TO_OURS = {"tokens_embed.weight": "wte.weight", "positions_embed.weight": "wpe.weight"}  # GPT-1's names
TO_GPT1 = {ours: theirs for theirs, ours in TO_OURS.items()}

# The same word means different functions: "gelu" is exact in a GPT-2 folder and the tanh form in a GPT-1 folder.
TANH_GELUS = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
ACTIVATIONS = {
    "gpt2": {**TANH_GELUS, "gelu": "gelu", "relu": "relu"},
    "openai-gpt": {"gelu": "gelu_tanh", "relu": "relu"},
}
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "openai-gpt": "OpenAIGPTLMHeadModel"}

# The values of transformers for keys that config.json leaves out.
COMMON: dict[str, Any] = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "layer_norm_epsilon": 1e-5}
COMMON |= {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {**COMMON, "vocab_size": 50257, "n_positions": 1024, "activation_function": "gelu_new"},
    "openai-gpt": {**COMMON, "vocab_size": 40478, "n_positions": 512, "afn": "gelu"},
}

# Settings of GPT-2 that change the computation, with the only value that is supported.
FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}

# Settings of a `GPTConfig` and their names in config.json.
KEYS = {"vocab_size": "vocab_size", "block_size": "n_positions", "n_layer": "n_layer", "n_head": "n_head"}
KEYS |= {"n_embd": "n_embd", "n_inner": "n_inner", "dropout": "resid_pdrop", "eps": "layer_norm_epsilon"}
KEYS |= {"tie_weights": "tie_word_embeddings"}
# Together with settings that are expressed in other ways. Every other setting must have its default value.
EXPRESSED = {*KEYS, "bias", "norm_first", "activation"}


def read_folder(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read config.json and model.safetensors: the keywords of a `GPTConfig`, and the arrays under our names.

    Raises:
        CheckpointError: a file is missing or damaged, or the folder holds another architecture.
    """
    folder = Path(folder)
    config = read_config(folder)
    path = folder / "model.safetensors"
    if not path.exists():
        found = ", ".join(sorted(p.name for p in folder.glob("*model*"))) or "no weights at all"
        raise CheckpointError(f"{path} does not exist; {folder} holds {found}. One safetensors file is expected")
    return config, rename_arrays(path, load_arrays(path))


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json as the keywords of a `GPTConfig`."""
    path = folder / "config.json"
    theirs = read_json(path)
    kind = theirs.get("model_type")
    if kind not in DEFAULTS:
        raise CheckpointError(f"{path}: model_type is {kind!r}, supported are {', '.join(map(repr, DEFAULTS))}")
    values = {**DEFAULTS[kind], **FIXED, **theirs}
    unsupported = [f"{key} = {values[key]!r}" for key in FIXED if values[key] != FIXED[key]]
    activation = values["activation_function" if kind == "gpt2" else "afn"]
    if activation not in ACTIVATIONS[kind]:
        unsupported.append(f"the activation {activation!r} (known: {', '.join(ACTIVATIONS[kind])})")
    if unsupported:
        raise CheckpointError(f"{path} has unsupported settings: {'; '.join(unsupported)}")
    rates = {key: values[key] for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if len(set(rates.values())) > 1:
        warnings.warn(f"{path} has several dropout rates, {rates}; ours has one: resid_pdrop", stacklevel=4)
    settings = {ours: values[theirs] for ours, theirs in KEYS.items()}
    return {**settings, "norm_first": kind == "gpt2", "activation": ACTIVATIONS[kind][activation]}


def rename_arrays(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays under our names, without the mask buffers of older files."""
    ours: dict[str, np.ndarray] = {}
    for theirs, array in arrays.items():
        name = theirs.removeprefix(PREFIX)
        name = TO_OURS.get(name, name)
        if MASK_BUFFER.fullmatch(name):
            continue
        if name in ours:
            raise CheckpointError(f"{path} holds {name!r} with and without the prefix {PREFIX!r}")
        ours[name] = array
    return ours


def write_folder(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    state: Mapping[str, np.ndarray],
) -> None:
    """Write config.json and model.safetensors, as transformers does, each through a temporary name.

    Args:
        config: the settings of a `GPTConfig`.
        defaults: their default values.
        state: the parameters by name.

    Raises:
        ValueError: neither GPT-1 nor GPT-2 has this configuration; every unsupported setting is named.
    """
    kind, theirs = express_config(config, defaults)
    theirs["dtype"] = str(state["wte.weight"].dtype)
    arrays = {}
    for name, array in state.items():
        their_name = TO_GPT1.get(name, name) if kind == "openai-gpt" else name
        arrays[their_name if name == "lm_head.weight" else PREFIX + their_name] = array
        if not config["bias"] and HAS_BIAS.search(name):
            arrays[PREFIX + name.removesuffix("weight") + "bias"] = np.zeros(array.shape[-1], array.dtype)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(theirs, indent=2) + "\n", encoding="utf-8")
        save_arrays(folder / "model.safetensors", arrays, {"format": "pt"})


def express_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model_type and the config.json for the settings of a `GPTConfig`."""
    if config["n_kv_head"] == config["n_head"]:
        config = {**config, "n_kv_head": None}
    kind = "gpt2" if config["norm_first"] else "openai-gpt"
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS[kind].items())}
    inner, width = config["n_inner"], config["n_embd"]
    wrong = [
        f"{name} = {config[name]!r}, not {default!r}"
        for name, default in defaults.items()
        if name not in EXPRESSED and config[name] != default
    ]
    if config["activation"] not in names:
        wrong.append(f"activation = {config['activation']!r}, not one of {', '.join(map(repr, names))}")
    if kind == "openai-gpt" and inner not in (None, 4 * width):
        wrong.append(f"n_inner = {inner}, not 4 n_embd")
    if wrong:
        raise ValueError(f"a Hugging Face {kind!r} folder cannot hold this GPT: {'; '.join(wrong)}. Use save(path)")
    theirs = {"model_type": kind, "architectures": [ARCHITECTURES[kind]], "bos_token_id": None, "eos_token_id": None}
    theirs |= {their_key: config[key] for key, their_key in KEYS.items() if kind == "gpt2" or key != "n_inner"}
    theirs |= dict.fromkeys(("embd_pdrop", "attn_pdrop"), config["dropout"])
    theirs["activation_function" if kind == "gpt2" else "afn"] = names[config["activation"]]
    return kind, theirs
