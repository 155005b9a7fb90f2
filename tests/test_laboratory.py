"""The lab: what it computes, what it refuses, and how a reader uses it in Chromium."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_walkthrough import block, numbers

import tinygrad_mha as tg
from tinygrad_mha.laboratory import MASKS, NORMS, POSITIONS, Experiment, LabServer, Settings
from tinygrad_mha.viz.page.document import read_page_file


@pytest.fixture
def lab():
    server = LabServer()
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.deadline = 0
    thread.join()


def ask(lab, name="compute", body=None, method="POST", path=None, **headers):
    """(status, answer) of a request; headers may be replaced."""
    connection = http.client.HTTPConnection(lab.host, timeout=30)
    given = {"Host": lab.host, "Origin": f"http://{lab.host}"} | headers
    content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    connection.putrequest(method, path or f"/{lab.token}/{name}", skip_host=True)
    for header in (given | {"Content-Length": headers.get("Content-Length", str(len(content)))}).items():
        connection.putheader(*header)
    connection.endheaders(content)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if answer.getheader("Content-Type") == "application/json" else text


CHANGES = {
    "as it begins": {},
    "wide": {"n_head": 3, "d_model": 8, "d_k": 4, "position": "rotary", "norm": "layer", "seed": 7},
    "edited": {"edits": [["X", 1, 2, 0.5], ["W_K2", 3, 1, -2.0], ["W_O", 13, 4, 1.5]], "cut": [2]},
    "identity": {"identity": ["wq", "wo"], "norm": "rms", "position": "alibi"},
    "broken mask": {"mask": "broken", "cut": [1]},
    "no mask": {"mask": "none", "identity": ["wv"]},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_python_lines_compute_what_the_page_shows(changes):
    result = Experiment(Settings.from_json(changes)).run()
    namespace = {}
    exec(result["python"], namespace)
    page = tg.viz.Walkthrough(result["page"], "")
    np.testing.assert_allclose(numbers(page)["Y"], namespace["y"].numpy(), rtol=1e-12)
    assert result["causal"] == (changes.get("mask", "causal") == "causal")
    assert np.array_equal(block(page, "data")["tokens"], ["the", "cat", "sat"])


def test_a_broken_mask_is_named_with_its_path():
    leaks = Experiment(Settings(mask="broken")).run()["leaks"]
    assert [(leak["row"], leak["sees"]) for leak in leaks] == [(0, 1), (1, 2)]
    assert "matmul" in leaks[0]["path"]


@pytest.mark.parametrize("mask", ["causal", "broken", "none"])
def test_a_layer_of_a_model_is_changed_and_the_model_is_not(mask):
    tokenizer = tg.data.CharTokenizer.of("to be or not")
    config = tg.nn.GPTConfig(tokenizer.vocab_size, block_size=16, n_layer=2, n_head=2, n_embd=6)
    model = tg.nn.GPT(config).eval()
    before = model.h[1].attn.c_attn.weight.numpy().copy()
    changes = {"sentence": "to be", "layer": 1, "mask": mask, "cut": [2], "edits": [["W_V1", 0, 1, 3.0]]}
    result = Experiment(Settings.from_json(changes), model, tokenizer).run()
    values = numbers(tg.viz.Walkthrough(result["page"], ""))
    assert result["causal"] == (mask == "causal")
    assert "'cut': [2]" in result["python"]
    alibi = tg.nn.GPT(tg.nn.GPTConfig(tokenizer.vocab_size, 16, n_layer=1, n_head=2, n_embd=6, position="alibi"))
    with pytest.raises(ValueError, match="scores have no bias"):
        Experiment(Settings(sentence="to", mask="none"), alibi, tokenizer)
    assert values["W_V1"][0, 1] == 3.0
    assert np.array_equal(model.h[1].attn.c_attn.weight.numpy(), before)
    with pytest.raises(ValueError, match="layers 1 to 2, got layer 3"):
        Experiment(Settings(sentence="to", layer=2), model, tokenizer)


WRONG = {
    "list": [[1]],
    "unknown": {"eval": "1"},
    "widths": {"d_model": 65},
    "zero": {"n_head": 0},
    "string": {"d_k": "7"},
    "huge": {"d_v": 10**400},
    "seed": {"seed": -1},
    "empty": {"sentence": "  "},
    "long": {"sentence": "a " * 17},
    "mask": {"mask": "__import__('os')"},
    "cut": {"cut": [3]},
    "odd rotary": {"position": "rotary", "d_k": 7},
    "row": {"edits": [["X", 9, 0, 1.0]]},
    "negative": {"edits": [["X", -1, 0, 1.0]]},
    "name": {"edits": [["__class__", 0, 0, 1.0]]},
    "null": {"edits": [["X", 0, 0, None]]},
    "nan": {"edits": [["X", 0, 0, float("nan")]]},
    "nested": {"edits": [[["X"], 0, 0, 1.0]]},
    "many": {"edits": [["X", 0, 0, 1.0]] * 201},
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_wrong_settings_are_answered_with_what_was_expected(lab, body):
    status, answer = ask(lab, body=body)
    assert status == 400
    assert answer["error"]


def test_only_the_page_with_the_token_may_ask(lab):
    assert ask(lab, name="", method="GET")[0] == 200
    assert ask(lab, body={})[0] == 200
    other = {"Host": "evil.example"}, {"Host": "localhost"}, {"Origin": "http://evil.example"}, {"Origin": "null"}
    assert [ask(lab, **headers)[0] for headers in other] == [403] * 4
    wrong = "/", "/compute", f"/{lab.token}x/compute", f"/{lab.token}/../compute", f"/{lab.token}/nothing"
    assert [ask(lab, path=path)[0] for path in wrong] == [403] * 5
    assert ask(lab, path=f"/{lab.token[:-1]}/", method="GET")[0] == 403
    assert ask(lab, body=b"x" * 70_000)[0] == 413
    assert [ask(lab, **{"Content-Length": n})[0] for n in ("-1", "9999999", "x")] == [413] * 3
    assert ask(lab, body=b"[" * 60_000)[0] == 400
    assert ask(lab, body=b"\xff")[0] == 400


def test_too_many_connections_at_a_time_are_closed(lab):
    address = lab.server_address
    held = [socket.create_connection(address) for _ in range(8)]
    deadline = time.monotonic() + 10
    while lab._free._value and time.monotonic() < deadline:
        time.sleep(0.02)
    with socket.create_connection(address) as more:
        more.settimeout(10)
        assert more.recv(1) == b""
    for connection in held:
        connection.close()


def start():
    process = subprocess.Popen([sys.executable, "-m", "tinygrad_mha", "lab"], stdout=subprocess.PIPE, text=True)
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:")
    return process, int(address.split(":")[2].split("/")[0]), address


def is_open(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def test_ctrl_c_ends_the_command_and_frees_the_port():
    process, port, _ = start()
    assert is_open(port)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert not is_open(port)
    process.stdout.close()


@pytest.fixture
def small_model():
    tokenizer = tg.data.CharTokenizer.of("to be or not")
    config = tg.nn.GPTConfig(tokenizer.vocab_size, block_size=16, n_layer=2, n_head=2, n_embd=6)
    return tg.nn.GPT(config).eval(), tokenizer


def test_the_whole_model_is_shown_with_the_changed_layer_in_it(small_model):
    model, tokenizer = small_model
    text = "to be"

    def logits(**changes):
        page = Experiment(Settings.from_json({"sentence": text, "whole": True} | changes), model, tokenizer).run()[
            "page"
        ]
        return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["sampling"]["logits"]

    assert logits() == logits(layer=1)
    assert logits() != logits(layer=1, cut=[1, 2])
    with pytest.raises(ValueError, match="X is computed by the earlier layers"):
        Experiment(Settings(sentence=text, whole=True, edits=[["X", 0, 0, 1.0]]), model, tokenizer)


def test_a_path_is_translated_completely(lab):
    words = json.loads(read_page_file("lab_words.json"))["zh"]["path_words"]
    status, result = ask(lab, body={"mask": "broken"})
    assert status == 200
    text = result["leaks"][0]["path"]
    assert "the first to mix rows" in text
    for english, own in words:
        text = re.sub(english, re.sub(r"\$(\d)", r"\\\1", own), text)
    assert text.startswith("最先混合各行的操作是 matmul（在 attention 中）")
    assert not re.search(r"\b(in|the|over|axis|path|to)\b", text)


def test_both_languages_of_the_lab_say_the_same_things():
    words = json.loads(read_page_file("lab_words.json"))
    assert list(words["en"]) == list(words["zh"])


def test_every_choice_has_a_label_in_both_languages():
    words = json.loads(read_page_file("lab_words.json"))
    for name, values in (("mask", MASKS), ("norm", NORMS), ("position", POSITIONS)):
        for lang in ("en", "zh"):
            labels = [words[lang][f"{name}_{value}"] for value in values]
            assert len(set(labels)) == len(values)


def test_the_lab_opens_in_the_language_that_was_asked_for():
    with LabServer(lang="zh") as server:
        assert re.search(r'"lang": ?"zh"', server.write_page())


def test_a_closed_page_ends_the_lab(monkeypatch):
    monkeypatch.setattr("tinygrad_mha.laboratory.GRACE", 0.1)
    server = LabServer()
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ask(server, "bye")[0] == 200
    thread.join(20)
    assert not thread.is_alive()
    assert not is_open(server.server_address[1])
