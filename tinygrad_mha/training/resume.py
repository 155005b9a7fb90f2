"""Checkpoints of a run: writing and reading them, resuming a run, and opening a trained model.

A checkpoint contains the weights, the optimizer state, the states of all random generators, the tokenizer and the
configuration, as safetensors and JSON. On one machine, with the same versions, kernels and number of threads, a resumed
run is equal bit for bit to a run that was not interrupted.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha import kernels
from tinygrad_mha.arguments import check_choice
from tinygrad_mha.data import Tokenizer, load_tokenizer, restore_generator
from tinygrad_mha.files import CheckpointError, load_arrays, read_json, save_arrays, write_json
from tinygrad_mha.files.huggingface import find_end_ids
from tinygrad_mha.files.json_files import MOST_BYTES, to_plain
from tinygrad_mha.files.reading import open_file
from tinygrad_mha.files.run_folder import STATE, find_latest, is_plain, remove_others, write_checkpoint
from tinygrad_mha.files.safetensors import read_shapes
from tinygrad_mha.nn import GPT, GPTConfig
from tinygrad_mha.training.config import MODEL_NAMES, TrainConfig, list_differences, preset
from tinygrad_mha.training.run_state import Run
from tinygrad_mha.training.source import open_text, reopen_text

__all__ = ["CHANGEABLE", "load_checkpoint", "load_trained", "resume_run", "save_checkpoint", "seal_state"]

PRETRAINED = Path(__file__).parent.parent / "pretrained"  # a checkpoint without what only training needs

# Options that a resumed run may change: its length, and how often it is observed.
CHANGEABLE = (
    "steps",
    "decay_steps",
    "eval_interval",
    "eval_batches",
    "sample_interval",
    "sample_tokens",
    "checkpoint_interval",
)

# The content of state.json: the type of each value; [type] is a list and {str: type} a dict of such values.
STATE_FORM: dict[str, Any] = {
    "sha256": str,  # of all other keys
    "step": int,
    "files": {str: str},  # the SHA-256 of each
    "model": {"identity": {"class": str, "dtypes": [str]}, "rebuild": bool},
    "config": dict,
    "text": {"source": str, "sha256": str, "characters": int},
    "data": dict,
    "generators": {str: dict},
    "optimizer": {"groups": [dict], "state": {str: dict}},
}
# What "model" has besides if the model is a GPT.
GPT_FORM: dict[str, Any] = {"special_ids": dict, "generation_config": dict}


def save_checkpoint(run: Run) -> Path:
    """Write a checkpoint and return its folder. The one before is kept until the run is finished.

    Raises:
        ValueError: the run has no folder.
        DivergedError: a weight is inf or nan. The previous checkpoint stays.
        OSError: it cannot be written. The previous checkpoint stays.
    """
    if run.folder is None:
        raise ValueError("this run has no folder to save into: pass folder=... to train or Run")
    if not all(np.isfinite(p.data).all() for p in run.optimizer.parameters):
        raise run.diverged("a weight is inf or nan")
    run.log.sync()  # first: a checkpoint must not be newer than the rows on disk, which `rewind` keeps
    run.samples.sync()
    keep = 1 if run.step == run.config.steps else 2
    return write_checkpoint(run.folder, run.step, lambda folder: write_state(run, folder), keep)


def write_state(run: Run, folder: Path) -> None:
    """Write all files of a checkpoint into `folder`."""
    saved = run.optimizer.state_dict()
    # The arrays of the optimizer go into a safetensors file, its numbers (such as step counts) into state.json.
    arrays: dict[str, np.ndarray] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, state in zip(list_parameter_names(run), saved["state"], strict=True):
        numbers[name] = {key: value for key, value in state.items() if not isinstance(value, np.ndarray)}
        arrays |= {f"{name}.{key}": value for key, value in state.items() if key not in numbers[name]}
    run.model.save(folder / "model.safetensors")
    save_arrays(folder / "optimizer.safetensors", arrays)
    run.tokenizer.save(folder)
    state = {
        "step": run.step,
        "kernels": kernels.active,
        "files": {path.name: compute_digest(path) for path in sorted(folder.iterdir())},
        "model": describe_model(run.model),
        "config": run.config.to_dict(),
        "text": run.source.describe(),
        "data": run.batches.state_dict(),
        "generators": {name: rng.bit_generator.state for name, rng in run.model.generators().items()},
        "optimizer": {"groups": saved["groups"], "state": numbers},
    }
    write_json(folder / STATE, seal_state(state))


def compute_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal_state(state: dict[str, Any]) -> dict[str, Any]:
    """The content of a state.json with the SHA-256 of all of it as its first key."""
    content = {name: value for name, value in state.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, default=to_plain)
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), **content}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read state.json, and check its form, its digest, and those of the files in it.

    Raises:
        CheckpointError: it is missing or damaged, or a file is.
    """
    path = checkpoint / STATE
    if not path.exists():
        raise CheckpointError(f"{checkpoint} is not a checkpoint of a run: it contains no {STATE}")
    state = read_json(path)
    wrong = find_misfit(state, STATE_FORM, "it")
    if wrong:
        raise CheckpointError(f"{path} is not the state of a run: {wrong}")
    found = seal_state(state)["sha256"]
    if found != state["sha256"]:
        raise CheckpointError(f"{path} is damaged: the SHA-256 of its content is {found}, in it {state['sha256']}")
    check_files(checkpoint, state)
    return state


def find_misfit(value: Any, form: Any, place: str) -> str:
    """Why a value of JSON does not have a form, in words that name the place; "" if it has."""
    kind: Any = form if isinstance(form, type) else type(form)
    if type(value) is not kind:
        return f"{place} is {value!r}, expected {'an' if kind is int else 'a'} {kind.__name__}"
    if isinstance(form, list):
        parts = [(inside, form[0], f"{place}[{i}]") for i, inside in enumerate(value)]
    elif isinstance(form, dict) and str in form:
        parts = [(inside, form[str], f"{name!r} of {place}") for name, inside in value.items()]
    elif isinstance(form, dict):
        missing = [name for name in form if name not in value]
        if missing:
            return f"{place} lacks {', '.join(missing)}"
        parts = [(value[name], form[name], f"{name!r} of {place}") for name in form]
    else:
        parts = []
    return next(filter(None, (find_misfit(*part) for part in parts)), "")


def check_files(checkpoint: Path, state: dict[str, Any]) -> None:
    """Compare the files of a checkpoint with the digests in its state.

    Raises:
        CheckpointError: a file is missing or differs.
    """
    for name, digest in state["files"].items():
        path = checkpoint / name
        if not is_plain(name):
            raise CheckpointError(f"{checkpoint / STATE} names {name!r}, which is not a file of its folder")
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        if path.suffix == ".safetensors":
            read_shapes(path)  # first, since to read a file of any size to its end may take long
        elif path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, expected at most {MOST_BYTES:,}")
        found = compute_digest(path)
        if found != digest:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is {found}, in {checkpoint / STATE} {digest}")


def load_checkpoint(run: Run, checkpoint: Path, state: dict[str, Any]) -> None:
    """Load a checkpoint into `run`, which was made with the same configuration and text.

    `state` is the content of state.json.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another model. The model is unchanged.
    """
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for path, array in load_arrays(checkpoint / "optimizer.safetensors").items():
        name, _, key = path.rpartition(".")
        arrays.setdefault(name, {})[key] = array
    generators = run.model.generators()
    try:
        numbers = state["optimizer"]["state"]
        check_parameter_names(run, numbers)
        states = [numbers[name] | arrays.get(name, {}) for name in list_parameter_names(run)]
        run.optimizer.load_state_dict({"groups": state["optimizer"]["groups"], "state": states})
        run.batches.load_state_dict(state["data"])
        for name, generator in generators.items():
            restore_generator(copy.deepcopy(generator), state["generators"][name])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(f"{checkpoint} does not belong to this run: {reason}") from error
    logs = (run.log, run.samples)
    for log in logs:
        log.read(state["step"])  # all is read before anything is changed
    run.model.load(checkpoint / "model.safetensors")
    for name, generator in generators.items():
        restore_generator(generator, state["generators"][name])
    run.step = state["step"]
    for log in logs:
        log.rewind(run.step)


def list_parameter_names(run: Run) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    return [names[id(p)] for p in run.optimizer.parameters]


def check_parameter_names(run: Run, saved: Iterable[str]) -> None:
    """Check that the optimizer's parameters have the names in a checkpoint.

    Raises:
        ValueError: missing or unexpected names; the message gives all of them and the class of the attention.
    """
    names, saved = list_parameter_names(run), list(saved)
    wrong = [f"missing {name}" for name in names if name not in saved]
    wrong += [f"unexpected {name}" for name in saved if name not in names]
    if wrong:
        model = type(run.model).__name__
        if isinstance(run.model, GPT):
            model += f" with attention {type(run.model.h[0].attn).__name__}"
        raise ValueError(
            f"the saved parameters do not fit those to train of {model}: {'; '.join(wrong)}. Pass a model with the "
            "modules and frozen parameters of the run"
        )


def describe_model(model: Any) -> dict[str, Any]:
    """What a checkpoint says about its model besides the weights.

    "identity" is what a model that is passed again must agree with; of a GPT it includes the configuration. "rebuild"
    says whether it determines all modules and dtypes.
    """
    dtypes = sorted({str(p.dtype) for p in model.parameters()})
    identity = {"class": type(model).__qualname__, "dtypes": dtypes}
    if not isinstance(model, GPT):
        return {"identity": identity, "rebuild": False}
    tied = getattr(model.lm_head, "weight", None) is model.wte.weight
    # All blocks are alike, so a GPT of one block has all module types that the configuration can give.
    twin = GPT(replace(model.config, n_layer=1, vocab_size=1))
    types, expected = ({type(module) for _, module in m.named_modules()} for m in (model, twin))
    return {
        "identity": {**identity, **model.config.to_dict(), "tie_weights": tied},
        "rebuild": types == expected and len(dtypes) == 1,
        "special_ids": model.special_ids,
        "generation_config": model.generation_config,
    }


def rebuild_model(checkpoint: Path, state: dict[str, Any]) -> GPT:
    """The GPT of a checkpoint, before its weights are loaded.

    Raises:
        CheckpointError: the checkpoint is of a model that the caller must pass.
    """
    saved = state["model"]
    config = dict(saved["identity"])
    kind, dtypes = config.pop("class"), config.pop("dtypes")
    try:
        if not saved["rebuild"]:
            raise ValueError(f"a {kind} with modules of your own")
        if wrong := find_misfit(saved, GPT_FORM, "model"):
            raise ValueError(wrong)
        find_end_ids(saved["special_ids"], saved["generation_config"])
        check_choice(dtypes[0] if len(dtypes) == 1 else dtypes, ("float32", "float64", "float16"), "dtypes")
        model_config = GPTConfig.from_dict(config)
        model_config.check_size(read_shapes(checkpoint / "model.safetensors"))
        model = GPT(model_config).astype(*dtypes)
    except (TypeError, ValueError, OverflowError) as error:
        reason = f"{checkpoint} is of a model that cannot be rebuilt ({error})"
        raise CheckpointError(
            f"{reason}: in Python, pass it again as model=, as in tg.training.load_trained(folder, model=...)"
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in state["optimizer"]["state"]
    model.special_ids, model.generation_config = saved["special_ids"], saved["generation_config"]
    return model


def read_state_and_model(checkpoint: Path, model: Any = None) -> tuple[dict[str, Any], TrainConfig, Any]:
    """Read state.json, and return its content, the configuration in it, and the model.

    A given model is checked against the checkpoint; without one a GPT is rebuilt. Its weights are not loaded yet.

    Raises:
        CheckpointError: not a checkpoint, or one of another model than the given one, or of one that must be given.
    """
    state = read_state(checkpoint)
    if model is None:
        model = rebuild_model(checkpoint, state)
    elif wrong := list_differences(state["model"]["identity"], describe_model(model)["identity"]):
        raise CheckpointError(f"{checkpoint} is of another model than the given one: {wrong}")
    options = state["config"]
    if isinstance(model, GPT):  # objects of the caller's own, such as a position, cannot be read from JSON
        options |= {name: getattr(model.config, name) for name in MODEL_NAMES if name != "block_size"}
    try:
        return state, TrainConfig(**options), model
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{checkpoint / STATE} is not the state of a run: {error}") from error


def resume_run(
    checkpoint: Path,
    config: TrainConfig | str | None,
    text: str | Path | None,
    tokenizer: Tokenizer | None,
    model: Any,
    workers: int | None,
    changes: dict[str, Any],
) -> Run:
    """Resume a run from a checkpoint: check that the arguments fit it, rebuild the run and restore its state.

    The arguments are those of `train`. Only CHANGEABLE options may differ from the stored ones. Other checkpoints in
    the folder, such as the incomplete one of a process that was killed, are deleted.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another configuration, model or text.
        ValueError: fewer steps than the run has taken, or a text that must be given again.
    """
    state, stored, model = read_state_and_model(checkpoint, model)
    config = combine_configs(stored, config, changes)
    fixed = {name: value for name, value in stored.to_dict().items() if name not in CHANGEABLE}
    wrong = list_differences(fixed, config.to_dict())
    if wrong:
        raise CheckpointError(
            f"{checkpoint} has another configuration: {wrong}. Leave these options out to resume it, or "
            f"choose another folder; only {', '.join(CHANGEABLE)} may change"
        )
    step, described = state["step"], state["text"]
    source = reopen_text(described["source"]) if text is None else open_text(text)
    if config.steps < step:
        raise ValueError(
            f"steps must be at least {step}, the number of steps that the run in {checkpoint} has taken, got "
            f"{config.steps}"
        )
    found = source.describe()
    if found["sha256"] != described["sha256"]:
        raise CheckpointError(
            f"{checkpoint} was trained on another text: {described['characters']} characters, SHA-256 "
            f"{described['sha256']}; now {found['characters']}, {found['sha256']}"
        )
    try:
        run = Run(config, source, tokenizer or load_tokenizer(checkpoint), checkpoint.parent, model, workers)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} cannot be resumed: {error}") from error
    load_checkpoint(run, checkpoint, state)
    run.note = "; ".join(list_changes(stored, config, state))
    if run.folder is not None:
        remove_others(run.folder, checkpoint, keep=1 if run.step == config.steps else 2)
    return run


def list_changes(stored: TrainConfig, config: TrainConfig, state: dict[str, Any]) -> Iterator[str]:
    """What a resumed run computes differently from before, in words."""
    step = state["step"]
    before, now = stored.lr(step), config.lr(step)
    if now != before:
        yield (
            f"the learning rate is {now:.3g} at step {step}, where it was {before:.3g} with {stored.steps} steps: pass "
            f"decay_steps={stored.decay_steps or stored.steps} to keep the schedule"
        )
    used = state.get("kernels", kernels.active)  # a checkpoint of an earlier version does not say
    if used != kernels.active:
        yield (
            f"the kernels were {used} before step {step} and are {kernels.active} now, so results may differ in the "
            f"last bits: set TINYGRAD_MHA_KERNELS={used} to keep them"
        )


def combine_configs(stored: TrainConfig, config: TrainConfig | str | None, changes: dict[str, Any]) -> TrainConfig:
    """The configuration requested for a resumed run.

    Options of the model that were not given, and the CHANGEABLE options of a preset, are the stored ones.
    """
    if isinstance(config, str):
        config = replace(preset(config), **{name: getattr(stored, name) for name in CHANGEABLE})
    return replace(stored if config is None else config.adapt(stored.model_options), **changes)


def load_trained(folder: str | os.PathLike[str] | None = None, model: Any = None) -> tuple[GPT, Tokenizer]:
    """Open the model, in eval mode, and the tokenizer of the latest checkpoint of a run.

    Args:
        folder: the folder of the run, or of one checkpoint. None: the small GPT that is part of this package.
        model: receives the weights. Needed for a model with modules of your own, which is not rebuilt.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, of another model, or of one that must be given.

    Example:
        >>> model, tokenizer = load_trained()
        >>> tokenizer.decode(tg.generate(model, tokenizer.encode("The "), 8, temperature=0)[0])
        'The same as '
    """
    folder = PRETRAINED if folder is None else folder
    checkpoint = find_latest(folder) or Path(folder)
    _, _, model = read_state_and_model(checkpoint, model)
    tokenizer = load_tokenizer(checkpoint)
    model.load(checkpoint / "model.safetensors")
    return model.eval(), tokenizer
