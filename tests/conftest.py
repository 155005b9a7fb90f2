"""What every test may ask for."""

from __future__ import annotations

import os

# Small arrays: the threads of a BLAS pool cost more than they bring, and would disturb tests that run side by side.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import numpy as np
import pytest

import tinygrad_mha as tg


@pytest.fixture
def rng():
    return np.random.default_rng(20170612)


@pytest.fixture
def own_primitives():
    """The registry, put back afterwards: primitives that a test makes are gone when it ends."""
    before = dict(tg.ops.REGISTRY)
    yield tg.ops.REGISTRY
    tg.ops.REGISTRY.clear()
    tg.ops.REGISTRY.update(before)


@pytest.fixture(scope="session")
def data():
    """The folder of small real models and recorded results, which is a part of the repository."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def reference():
    """The folder of what is too large for the repository: the recorded run of nanoGPT, its model and its text."""
    folder = os.environ.get("TINYGRAD_MHA_REFERENCE")
    if not folder:
        pytest.skip("TINYGRAD_MHA_REFERENCE is not set: no reference data to compare with")
    return Path(folder)


@pytest.fixture
def transformers(monkeypatch):
    """The transformers package without network; skips where it or torch is not installed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")
