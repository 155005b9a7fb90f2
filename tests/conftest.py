"""What every test may ask for."""

from __future__ import annotations

import os

# Small arrays: the threads of a BLAS pool cost more than they bring, and would disturb tests that run side by side.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["COLUMNS"] = "100"  # verdicts and matrices are as wide as the terminal

import shutil
from pathlib import Path

import numpy as np
import pytest
from recorded_data import find_data

import tinygrad_mha as tg
from tinygrad_mha import kernels


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
    """The folder of small real models and recorded results; skips where it is missing."""
    return find_data()


@pytest.fixture(scope="session")
def reference():
    """The folder of what is too large for the repository: the recorded run of nanoGPT, its model and its text."""
    folder = os.environ.get("TINYGRAD_MHA_REFERENCE")
    if not folder:
        pytest.skip("TINYGRAD_MHA_REFERENCE is not set: no reference data to compare with")
    return Path(folder)


@pytest.fixture(params=["numpy", "numba"])
def kind(request, monkeypatch):
    """Both kinds of kernels, one after the other, as far as they are installed."""
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(kernels, "active", request.param)
    return request.param


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium, driven by selenium; skips where one of them is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium with chromedriver on PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    switches = """headless=new no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-background-networking
        disable-component-update disable-sync window-size=1400,1000"""
    for switch in switches.split():
        options.add_argument(f"--{switch}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def transformers(monkeypatch):
    """The transformers package without network; skips where it or torch is not installed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")
