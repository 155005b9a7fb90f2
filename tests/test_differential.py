"""Random programs equal torch's: 500 of them here, as many as wanted with `python tests/differential.py`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import differential  # noqa: E402

COUNTS = {
    "attention": 200,
    "gpt": 80,
    "optimizer": 80,
    "training": 6,
    "generation": 60,
    "expression": 60,
    "second order": 20,
}
CHUNK = 20


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_many(kind, seeds):
    for seed in seeds:
        differential.check(kind, seed)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize(
    ("kind", "start"), [(kind, start) for kind, n in COUNTS.items() for start in range(0, n, CHUNK)]
)
def test_random_programs_equal_torch(kind, start):
    check_many(kind, range(20_000 + start, 20_000 + min(start + CHUNK, COUNTS[kind])))


def test_a_disagreement_is_made_smaller(monkeypatch):
    right = differential.twins.attend

    def wrong(q, k, v, allow=None, *rest):
        return right(q, k, v, allow, *rest) * (1 if allow is None or allow.all() else 1.001)

    monkeypatch.setattr(differential.twins, "attend", wrong)
    with pytest.raises(AssertionError, match=r"'cross': False.*'score_bias': False") as caught:
        check_many("attention", range(20))
    assert "'batch': 1" in str(caught.value)


def test_an_error_inside_a_program_is_a_disagreement(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(differential.twins, "gpt", broken)
    with pytest.raises(AssertionError, match="division by zero"):
        differential.check("gpt", 0)
