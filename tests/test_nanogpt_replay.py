"""A training run of nanoGPT, replayed from its initial weights and batches and compared with the recorded numbers."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "replay_nanogpt.py"


@pytest.fixture
def replay(reference):
    spec = importlib.util.spec_from_file_location("replay_nanogpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Replay(reference, "first_100_iterations.npz")


def check(replay, iterations):
    for i in range(iterations):
        loss, norm = replay.update()
        assert loss == pytest.approx(replay.recorded["loss"][i], rel=0, abs=3e-6), f"loss of iteration {i}"
        assert norm == pytest.approx(replay.recorded["gradnorm"][i], rel=1e-5), f"gradient norm of iteration {i}"


def test_the_first_eleven_updates_are_those_of_nanogpt(replay):
    assert replay.model.count() == 804_096
    check(replay, 11)


@pytest.mark.slow
def test_the_first_hundred_and_one_updates_are_those_of_nanogpt(replay):
    assert replay.iterations == 101
    check(replay, 101)
    assert replay.distance("final") < 1e-5


@pytest.mark.slow
def test_the_evaluation_of_the_untrained_model_is_that_of_nanogpt(replay):
    assert replay.evaluate() == pytest.approx((4.1676, 4.1649), abs=1e-4)


def test_the_optimizer_has_each_parameter_once_and_decays_matrices_only(replay):
    decayed, rest = replay.optimizer.groups
    assert len(decayed["params"]) + len(rest["params"]) == 27
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in rest["params"]} == {1}
    assert sum(p.size for p in replay.optimizer.parameters) == 804_096
    assert any(p is replay.model.lm_head.weight is replay.model.wte.weight for p in decayed["params"])


def test_recorded_weights_are_transposed_and_the_head_is_tied(replay):
    recorded = replay.recorded["init.transformer.h.2.attn.c_proj.weight"]
    assert np.array_equal(dict(replay.model.named_parameters())["h.2.attn.c_proj.weight"].numpy(), recorded.T)
    assert not np.array_equal(recorded, recorded.T)
    assert np.array_equal(replay.recorded["init.lm_head.weight"], replay.model.wte.weight.numpy())
