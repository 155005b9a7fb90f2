"""Read and write Hugging Face folders of GPT-1, GPT-2 and Llama as a configuration and arrays by name.

Each kind of model is one `Format`: the keys of its config.json, and the names and layouts of its parameters. Our own
names are those of GPT-2, and our linear weights are stored (in, out).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.arguments import is_integer
from tinygrad_mha.files.atomic import replacing, setting_aside
from tinygrad_mha.files.json_files import read_json
from tinygrad_mha.files.reading import CheckpointError
from tinygrad_mha.files.safetensors import load_arrays, save_arrays

__all__ = ["FORMATS", "Folder", "Format", "Key", "find_end_ids", "read_folder", "write_folder"]

IS_LINEAR = re.compile(r"(^|\.)c_\w+\.weight$")
HAS_BIAS = re.compile(r"(^|\.)(ln_|c_)\w+\.weight$")  # norms and linear layers
WRAPPERS = ("_orig_mod.", "module.")
# Arrays of older files that are not parameters: causal masks (not h.0.attn.c_attn.bias), and frequencies of Llama.
BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class Folder(NamedTuple):
    """The content of a Hugging Face folder."""

    settings: dict[str, Any]  # keywords of a `GPTConfig`
    arrays: dict[str, np.ndarray]  # the parameters, in our names and layout
    special_ids: dict[str, Any]  # bos_token_id, eos_token_id, ... of config.json
    generation_config: dict[str, Any]  # generation_config.json, or {} if there is none


class Key(NamedTuple):
    """A key of config.json, and what transformers assumes where it is missing."""

    name: str
    default: Any


@dataclass(frozen=True, kw_only=True)
class Format:
    """How Hugging Face stores one kind of model.

    Every setting of a `GPTConfig` is in `keys` or in `settings`, or must have its default value. In a `biased` format
    `bias` may also be False: zeros are written.

    Args:
        model_type, architecture: what config.json says.
        keys: the settings of a `GPTConfig` that config.json expresses.
        dropout_keys: the names of further dropout rates, which should equal that in `keys`.
        activations: their names of activations and ours; the first of several with one meaning is written.
        settings: the settings that all models of this format share, where they differ from the default.
        required: keys of config.json that change the computation, and the only supported value of each.
        prefix: stands in front of the name of every parameter except the head.
        names: our names of parameters and theirs; `*` is the number of the block. With several names, each array
            contains some of our columns, in this order.
        transposed: whether linear weights are stored (out, in).
        biased: whether norms and linear layers always have a bias.
        flatten: rewrites a config.json so that `keys` and `required` find their values at the top.
        complete: adds to a config.json what other programs need.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, Key]
    dropout_keys: tuple[str, ...] = ()
    activations: Mapping[str, str]
    settings: Mapping[str, Any]
    required: Mapping[str, Any]
    prefix: str
    names: Mapping[str, tuple[str, ...]]
    transposed: bool = False
    biased: bool = True
    flatten: Callable[[dict[str, Any]], dict[str, Any]] = dict
    complete: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def read_config(self, path: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json as keywords of a `GPTConfig`."""
        values = self.flatten({**self.required, **dict(self.keys.values()), **theirs})
        settings = {ours: values[key.name] for ours, key in self.keys.items()}
        unsupported = [f"{key} = {values[key]!r}" for key, value in self.required.items() if values[key] != value]
        if settings["activation"] not in list(self.activations):
            unsupported.append(f"the activation {settings['activation']!r} (known: {', '.join(self.activations)})")
        if unsupported:
            raise CheckpointError(f"{path} has unsupported settings: {'; '.join(unsupported)}")
        rates = {key: values.get(key, self.keys["dropout"].default) for key in self.dropout_keys}
        if any(rate != settings["dropout"] for rate in rates.values()):
            used = self.keys["dropout"].name
            rates[used] = settings["dropout"]
            warnings.warn(f"{path} has several dropout rates, {rates}; ours has one: {used}", stacklevel=4)
        return {**self.settings, **settings, "activation": self.activations[settings["activation"]]}

    def write_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a `GPTConfig` as a config.json."""
        theirs = {key.name: config[ours] for ours, key in self.keys.items()}
        theirs |= dict.fromkeys(self.dropout_keys, config["dropout"])
        words = {ours: word for word, ours in reversed(list(self.activations.items()))}
        theirs[self.keys["activation"].name] = words[config["activation"]]
        return self.complete({"model_type": self.model_type, "architectures": [self.architecture], **theirs})

    def find_unsupported(self, content: Folder, defaults: Mapping[str, Any]) -> list[str]:
        """The settings that this format cannot express or, if there are none, the parameters that it cannot hold."""
        config = content.settings
        expressed = {*self.keys, "bias"} if self.biased else {*self.keys}
        fixed = {name: value for name, value in {**defaults, **self.settings}.items() if name not in expressed}
        wrong = [f"{name} = {config[name]!r}, not {value!r}" for name, value in fixed.items() if config[name] != value]
        known = dict.fromkeys(self.activations.values())
        if config["activation"] not in known:
            wrong.append(f"activation = {config['activation']!r}, not {' or '.join(map(repr, known))}")
        return wrong or [f"the parameter {name}" for name in content.arrays if split_block(name)[0] not in self.names]

    def read_arrays(self, path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Their parameters in our names and layout. Unknown names are kept."""
        for wrapper in WRAPPERS:
            if arrays and all(name.startswith(wrapper) for name in arrays):
                raise CheckpointError(
                    f"{path}: all names begin with {wrapper!r}, which torch.compile or DataParallel puts in front: "
                    f"save the model that was wrapped, or rename the arrays"
                )
        origins = {name: (ours, i) for ours, names in self.names.items() for i, name in enumerate(names)}
        found: dict[str, dict[int, np.ndarray]] = {}
        for full_name, array in arrays.items():
            name = full_name.removeprefix(self.prefix)
            if BUFFER.fullmatch(name):
                continue
            pattern, block = split_block(name)
            ours, i = origins.get(pattern, (pattern, 0))
            parts = found.setdefault(ours.replace("*", block), {})
            if i in parts:
                raise CheckpointError(f"{path} holds {name!r} with and without the prefix {self.prefix!r}")
            parts[i] = array.T if self.transposed and IS_LINEAR.search(ours) else array
        return {name: self._join(path, name, parts) for name, parts in found.items()}

    def _join(self, path: Path, name: str, parts: Mapping[int, np.ndarray]) -> np.ndarray:
        """One parameter of ours from the arrays with its columns."""
        pattern, block = split_block(name)
        names = self.names.get(pattern, (name,))
        if len(names) == 1:
            return parts[0]
        shapes = [parts[i].shape if i in parts else () for i in range(len(names))]
        if {len(shape) for shape in shapes} != {2} or len({shape[0] for shape in shapes}) > 1 or shapes[1] != shapes[2]:
            phrases = [
                f"{self.prefix}{n.replace('*', block)} {shape[::-1]}" for n, shape in zip(names, shapes, strict=True)
            ]
            raise CheckpointError(f"{path}: missing arrays or shapes that do not fit together: {', '.join(phrases)}")
        return np.concatenate([parts[i] for i in range(len(names))], axis=1)

    def write_arrays(self, content: Folder) -> dict[str, np.ndarray]:
        """Our parameters in their names and layout."""
        arrays = {}
        for ours, array in content.arrays.items():
            pattern, block = split_block(ours)
            names = self.names[pattern]
            parts = [array] if len(names) == 1 else np.split(array, find_starts(content.settings), axis=1)
            for name, part in zip(names, parts, strict=True):
                full_name = ("" if ours == "lm_head.weight" else self.prefix) + name.replace("*", block)
                arrays[full_name] = part.T if self.transposed and IS_LINEAR.search(ours) else part
                if self.biased and HAS_BIAS.search(ours):
                    zeros = np.zeros(part.shape[-1], part.dtype)
                    arrays.setdefault(full_name.removesuffix("weight") + "bias", zeros)
        return arrays


def split_block(name: str) -> tuple[str, str]:
    """Split off the number of the block: "h.3.ln_1.weight" -> ("h.*.ln_1.weight", "3")."""
    match = re.search(r"(?<=\.)\d+(?=\.)", name)
    return (name, "") if match is None else (name[: match.start()] + "*" + name[match.end() :], match[0])


def find_starts(config: Mapping[str, Any]) -> list[int]:
    """The first columns of keys and of values in c_attn."""
    width, n_head = config["n_embd"], config["n_head"]
    return [width, width + width // n_head * (config["n_kv_head"] or n_head)]


# --------------------------------------------------------------------------------------------------------------------
# The formats


def flatten_llama(values: dict[str, Any]) -> dict[str, Any]:
    """Move the settings of rotary positions to the top, and drop a head_dim that says nothing new."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    rope = rope if isinstance(rope, Mapping) else {"rope_type": rope}
    width, n_head, head_dim = (values[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if is_integer(n_head) and is_integer(head_dim) and n_head * head_dim == width:
        head_dim = None
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", values["rope_theta"])
    return {**values, "rope_theta": theta, "rope_type": rope_type, "head_dim": head_dim}


def complete_llama(theirs: dict[str, Any]) -> dict[str, Any]:
    """Write out what is a default of ours only, and rotary positions as newer programs read them."""
    return {
        **theirs,
        "intermediate_size": theirs["intermediate_size"] or 4 * theirs["hidden_size"],
        "num_key_value_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": theirs["rope_theta"]},
    }


LAYERS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
GPT_NAMES = ["wte.weight", "wpe.weight", *(f"h.*.{layer}.{part}" for layer in LAYERS for part in ("weight", "bias"))]
GPT_NAMES += ["ln_f.weight", "ln_f.bias", "lm_head.weight"]
TANH_GELUS = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")

GPT2 = Format(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "vocab_size": Key("vocab_size", 50257),
        "block_size": Key("n_positions", 1024),
        "n_layer": Key("n_layer", 12),
        "n_head": Key("n_head", 12),
        "n_embd": Key("n_embd", 768),
        "n_inner": Key("n_inner", None),
        "dropout": Key("resid_pdrop", 0.1),
        "activation": Key("activation_function", "gelu_new"),
        "eps": Key("layer_norm_epsilon", 1e-5),
        "tie_weights": Key("tie_word_embeddings", True),
    },
    dropout_keys=("embd_pdrop", "attn_pdrop"),
    activations={**TANH_GELUS, "gelu": "gelu", "relu": "relu"},
    settings={},
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    prefix="transformer.",
    names={name: (name,) for name in GPT_NAMES},
)

GPT1_KEYS = {
    "vocab_size": Key("vocab_size", 40478),
    "block_size": Key("n_positions", 512),
    "activation": Key("afn", "gelu"),
}
GPT1 = dataclasses.replace(
    GPT2,
    model_type="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    keys={ours: key for ours, key in GPT2.keys.items() if ours != "n_inner"} | GPT1_KEYS,
    activations={"gelu": "gelu_tanh", "relu": "relu"},  # the same word as in GPT-2, for another function
    settings={"norm_first": False},
    required={},
    names={**GPT2.names, "wte.weight": ("tokens_embed.weight",), "wpe.weight": ("positions_embed.weight",)},
)

LLAMA = Format(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={
        "vocab_size": Key("vocab_size", 32000),
        "block_size": Key("max_position_embeddings", 2048),
        "n_layer": Key("num_hidden_layers", 32),
        "n_head": Key("num_attention_heads", 32),
        "n_kv_head": Key("num_key_value_heads", None),
        "n_embd": Key("hidden_size", 4096),
        "n_inner": Key("intermediate_size", 11008),
        "activation": Key("hidden_act", "silu"),
        "eps": Key("rms_norm_eps", 1e-6),
        "rope_base": Key("rope_theta", 10000.0),
        "tie_weights": Key("tie_word_embeddings", False),
    },
    activations={"silu": "swiglu", "swish": "swiglu"},
    settings={"norm": "rms", "position": "rotary", "bias": False},
    required={
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rope_type": "default",
        "head_dim": None,  # unless it is hidden_size / num_attention_heads
    },
    prefix="model.",
    names={
        "wte.weight": ("embed_tokens.weight",),
        "h.*.ln_1.weight": ("layers.*.input_layernorm.weight",),
        "h.*.attn.c_attn.weight": tuple(f"layers.*.self_attn.{part}_proj.weight" for part in "qkv"),
        "h.*.attn.c_proj.weight": ("layers.*.self_attn.o_proj.weight",),
        "h.*.ln_2.weight": ("layers.*.post_attention_layernorm.weight",),
        "h.*.mlp.c_gate.weight": ("layers.*.mlp.gate_proj.weight",),
        "h.*.mlp.c_fc.weight": ("layers.*.mlp.up_proj.weight",),
        "h.*.mlp.c_proj.weight": ("layers.*.mlp.down_proj.weight",),
        "ln_f.weight": ("norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
    },
    transposed=True,
    biased=False,
    flatten=flatten_llama,
    complete=complete_llama,
)

FORMATS = {form.model_type: form for form in (GPT2, GPT1, LLAMA)}


# --------------------------------------------------------------------------------------------------------------------
# Folders


def read_folder(folder: str | os.PathLike[str]) -> Folder:
    """Read config.json, model.safetensors and, if there is one, generation_config.json.

    Raises:
        CheckpointError: a file is missing or damaged, or the folder holds a model of another kind or a training run.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.exists() and any((folder / name).is_file() for name in ("LATEST", "state.json")):
        raise CheckpointError(
            f"{folder} is a training run, not a Hugging Face folder: open it with tg.training.load_trained(folder)"
        )
    theirs = read_json(path)
    kind = theirs.get("model_type")
    if kind not in list(FORMATS):
        raise CheckpointError(f"{path}: model_type is {kind!r}, supported are {', '.join(map(repr, FORMATS))}")
    settings = FORMATS[kind].read_config(path, theirs)
    special_ids = {key: value for key, value in theirs.items() if key.endswith("_token_id") and value is not None}
    generation_path = folder / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    try:
        find_end_ids(special_ids, generation_config)
    except TypeError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    path = folder / "model.safetensors"
    if not path.exists():
        found = ", ".join(sorted(p.name for p in folder.glob("*model*"))) or "no weights at all"
        raise CheckpointError(f"{path} does not exist; {folder} holds {found}. One safetensors file is expected")
    return Folder(settings, FORMATS[kind].read_arrays(path, load_arrays(path)), special_ids, generation_config)


def write_folder(folder: str | os.PathLike[str], content: Folder, defaults: Mapping[str, Any]) -> None:
    """Write config.json, model.safetensors and, unless it is empty, generation_config.json.

    Args:
        defaults: the default values of a `GPTConfig`.

    Raises:
        ValueError: no format can hold the model; the reasons are given for each.
    """
    is_tied = "lm_head.weight" not in content.arrays  # whatever the settings say
    content = content._replace(settings=simplify({**content.settings, "tie_weights": is_tied}))
    reasons = {kind: form.find_unsupported(content, defaults) for kind, form in FORMATS.items()}
    form = next((FORMATS[kind] for kind, wrong in reasons.items() if not wrong), None)
    if form is None:
        lines = [f"{kind}: {'; '.join(wrong)}" for kind, wrong in reasons.items()]
        raise ValueError("\n  ".join(["no Hugging Face folder can hold this GPT. Use save(path)", *lines]))
    find_end_ids(content.special_ids, content.generation_config)
    ids = {"bos_token_id": None, "eos_token_id": None, **content.special_ids}
    theirs = {**form.write_config(content.settings), **ids, "dtype": str(content.arrays["wte.weight"].dtype)}
    texts = [to_json(theirs), to_json(content.generation_config)]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config_path, generation_path = folder / "config.json", folder / "generation_config.json"
    weights_path = folder / "model.safetensors"
    with (
        ExitStack() as old_files,
        replacing(config_path) as config_file,
        replacing(generation_path) as generation_file,
        replacing(weights_path) as weights_file,
    ):
        config_file.write_text(texts[0], encoding="utf-8")
        generation_file.write_text(texts[1], encoding="utf-8")
        save_arrays(weights_file, form.write_arrays(content), {"format": "pt"})
        # Without config.json, which goes first and comes last, a folder does not open. So if the process is killed
        # in between, new weights are not read with old settings.
        for path in (config_path, generation_path, weights_path):
            old_files.enter_context(setting_aside(path))
    if not content.generation_config:
        generation_path.unlink()


def simplify(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings, with the default value wherever it means the same."""
    config = dict(config)
    if config["n_inner"] == 4 * config["n_embd"]:
        config["n_inner"] = None
    if config["n_kv_head"] == config["n_head"]:
        config["n_kv_head"] = None
    if isinstance(config["position"], Mapping) and config["position"].keys() == {"name", "base"}:
        config["position"], config["rope_base"] = config["position"].values()
    return config


def find_end_ids(special_ids: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids after which a text ends: eos_token_id of generation_config.json if there is one, else of config.json.

    Raises:
        TypeError: eos_token_id is neither an id nor a list of ids.
    """
    eos = (generation_config or special_ids).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, (list, tuple)) else [eos]
    if not all(is_integer(i) for i in ids):
        raise TypeError(f"eos_token_id must be a token id or a list of token ids, got {eos!r}")
    return tuple(map(int, ids))


def to_json(content: Mapping[str, Any]) -> str:
    """JSON text; scalars of NumPy are written as numbers."""
    return json.dumps(content, indent=2, default=np.generic.item) + "\n"
