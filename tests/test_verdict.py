"""A verdict says the same as text, as JSON and as a table; a person's own file that goes wrong is one line."""

import json
import warnings

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha.check import CheckError, Finding, Verdict
from tinygrad_mha.files.python_files import OwnCodeError, load_object

ROWS = np.arange(15.0).reshape(3, 5)
FAILED = Finding(
    "scale", "failed", "too <large> " * 20, "no 1/sqrt(d_k)", {"x": ROWS, "n": 3}, {"size": np.float32(0.5)}
)
VERDICT = Verdict("mine", [Finding("batch", "passed", "rows agree"), FAILED, Finding("mask", "does not apply", "none")])


def test_only_a_failed_claim_or_a_problem_is_not_ok():
    assert (VERDICT.ok, VERDICT.status, VERDICT.exit_code) == (False, "failed", 1)
    assert VERDICT.failed == [FAILED]
    right = Verdict("mine", [f for f in VERDICT.findings if f is not FAILED])
    assert (right.ok, right.status, right.exit_code) == (True, "passed", 0)
    broken = Verdict("mine", problem="it raised an error")
    assert (broken.ok, broken.status, broken.exit_code) == (False, "could not be run", 2)
    for verdict in (VERDICT, broken):
        with pytest.raises(CheckError, match="mine") as caught:
            verdict.raise_if_failed()
        assert caught.value.verdict is verdict
    right.raise_if_failed()


def test_data_is_plain_json_with_arrays_as_lists_and_nan_as_a_string():
    finding = Finding("nan", "failed", example={"y": np.array([np.nan, 1.0]), "pairs": {(0, 1)}})
    data = json.loads(json.dumps(Verdict("mine", [FAILED, finding]).to_dict(), allow_nan=False))
    assert data["findings"][0]["example"] == {"x": ROWS.tolist(), "n": 3}
    assert data["findings"][0]["details"] == {"size": 0.5}
    assert data["findings"][1]["example"]["y"] == ["nan", 1.0]
    assert (data["subject"], data["status"], data["ok"]) == ("mine", "failed", False)


def test_text_fits_100_columns_and_begins_with_what_failed():
    lines = str(VERDICT).splitlines()
    assert lines[0] == "mine: FAILED (scale)"
    assert lines[1].split()[:2] == ["FAILED", "scale"]
    assert max(map(len, lines)) <= 100
    assert "cause: no 1/sqrt(d_k)" in str(VERDICT)
    assert "x = [[ 0.,  1.,  2.,  3.,  4.]," in str(VERDICT)


def test_claims_of_which_the_same_is_said_share_a_line():
    findings = [Finding(name, "passed", "as in the formula") for name in ("scale", "softmax", "heads")]
    assert "scale    as in the formula (also softmax, heads)" in str(Verdict("mine", findings))


def test_a_table_escapes_what_it_shows():
    html = VERDICT._repr_html_()
    assert html.startswith("<div>mine: failed</div><table>")
    assert "too &lt;large&gt;" in html
    assert "<large>" not in html


def test_a_notebook_lists_what_failed_first_and_white_on_red():
    findings = [Finding("causality", "passed"), Finding("scale", "failed", example={"x": np.eye(2)})]
    rows = Verdict("mine", findings)._repr_html_().split("<tr>")[1:]
    assert ["scale" in row for row in rows] == [True, False]
    assert ["color:#fff;background:#b3261e" in row for row in rows] == [True, False]
    assert '<pre style="font-family:' in rows[0]


# ------------------------------------------------------------------------------------------------------ a person's file

FILES = {
    "it calls sys.exit(3)": "import sys\nsys.exit(3)",
    "line 2: ZeroDivisionError": "x = 1\nx / 0",
    "SyntaxError": "def f(x:",
    "it defines g": "def g(x):\n    return x",
    "ModuleNotFoundError": "import there_is_no_such_module",
}


@pytest.mark.parametrize("says", FILES)
def test_a_file_that_goes_wrong_is_one_line_with_its_name(says, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILES[says])
    with pytest.raises(OwnCodeError) as caught:
        load_object(f"{path}:f")
    assert says in str(caught.value)
    assert "mine.py" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["mine", ":f"])
def test_a_target_without_a_file_is_refused_with_its_form(target):
    with pytest.raises(OwnCodeError, match=f"expected FILE.py:NAME, got '{target}'"):
        load_object(target)


@pytest.mark.parametrize("target", ["mine.py", "mine.py:"])
def test_for_a_file_alone_its_functions_are_listed(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def attend(q, k, v): return v\nclass Heads: pass")
    with pytest.raises(OwnCodeError, match=r"as in mine.py:attend; it defines attend, Heads"):
        load_object(target)


def test_what_a_file_prints_goes_to_standard_error(tmp_path, capsys):
    path = tmp_path / "prints.py"
    path.write_text("from dataclasses import dataclass\n@dataclass\nclass A:\n    n: int = 0\nprint('hello')\nf = len")
    assert load_object(f"{path}:f") is len
    assert capsys.readouterr() == ("", "hello\n")
    with pytest.raises(TypeError, match=r"is a class.*A = A\(\.\.\.\)|is a class, expected a function or an object"):
        load_object(f"{path}:A")
    assert load_object(f"{path}:A", with_classes=True).__name__ == "A"


# ------------------------------------------------------------------------------------------------- inputs of attention


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((np.ones((0, 5)),), "finite numbers"),
        ((np.full((3, 5), np.nan),), "finite numbers"),
        ((np.array([["a", "b"]]),), "finite numbers"),
        ((np.ones(5),), "finite numbers"),
        ((np.ones((3, 5)), np.ones((3, 5))), "three, q, k and v"),
    ],
)
def test_inputs_that_are_no_rows_are_refused(inputs, says):
    verdict = tg.check.attention(lambda *xs: xs[0], *inputs)
    assert verdict.exit_code == 2
    assert says in verdict.problem


def test_a_gpt_is_sent_to_the_checks_of_models():
    model = tg.nn.GPT(tg.nn.GPTConfig(11, 8, 1, 2, 6), seed=0)
    assert "kv_cache" in tg.check.attention(model).problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tg.check.attention(model.h[0].attn).ok


def test_inputs_that_are_edited_in_place_are_reported():
    def edits(q, k, v):
        k *= 0.5
        return tg.nn.attention(q, k, v).numpy()

    (finding,) = tg.check.attention(edits).failed
    assert "in place" in finding.cause


def test_a_notebook_shows_a_gradient_check_a_trace_and_a_run_as_tables(tmp_path):
    report = tg.gradcheck(lambda x: (x * x.detach()).sum(), np.arange(1.0, 4.0), raises=False)
    assert "<div>gradcheck of &lt;lambda&gt;: FAILED</div><table>" in report._repr_html_()
    assert "analytic" in report._repr_html_()
    assert repr(report) == str(report)  # at the prompt of Python, too
    assert repr(VERDICT) == str(VERDICT)
    model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=11, block_size=7, n_layer=2, n_head=2, n_embd=6))
    trace = model([3, 1, 4], trace=True)[1]
    assert '<td style="text-align:left">2×3×3</td>' in trace.attention[0]._repr_html_()
    assert len(repr(trace)) < 600
    assert trace._repr_html_().count("<table>") == 3
    options = {"steps": 2, "eval_interval": 1, "sample_interval": 0, "eval_batches": 1, "block_size": 8}
    run = tg.training.train("tiny", "abcdefgh " * 40, tmp_path / "run", show="quiet", **options)
    assert repr(run).startswith("Run at step 2 of 2")
    assert run._repr_html_().count("<tr>") == 1 + 3


def test_the_text_of_a_verdict_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, str(VERDICT).splitlines())) <= 60
