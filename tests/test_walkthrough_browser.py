"""The walkthrough page in Chromium: what it shows when a reader points, steps, decodes, or uses dark mode."""

from __future__ import annotations

import json
import re
import threading
import time

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha.laboratory import LabServer
from tinygrad_mha.nn.positions import Position

pytest.importorskip("selenium.webdriver", reason="selenium is not installed: the page is not tested")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

WORDS = ["the", "cat", "sat", "on", "mats"]


class Page:
    """An open page, with what a reader can see and do."""

    def __init__(self, browser, walkthrough, path):
        self.browser = browser
        path.write_text(walkthrough.html, encoding="utf-8")
        self.url = path.as_uri()
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(self.url)

    def find(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        (element,) = self.find(selector)
        return element

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def go(self, step):
        self.find("#map button.step")[step - 1].click()

    def show(self, what):
        self.run("arguments[0].click()", self.one(f"#modes label:nth-of-type({1 + (what == 'gradients')}) input"))

    def decode(self, step):
        slider = self.one("#decode")
        self.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", slider, step)

    def vectors(self, name, where="#equations", of="values"):
        return self.find(f"{where} figure[data-name='{name}'][data-of='{of}'] .vector")

    def point(self, vector):
        ActionChains(self.browser).move_to_element(vector).perform()

    def rows(self, relation, name, where="#map"):
        """The rows of a matrix that are marked with a relation, counted from 0."""
        script = "return [...document.querySelector(arguments[0]).querySelectorAll('.vector')].map(v => v.className)"
        classes = self.run(script, f"{where} figure[data-name='{name}']")
        return [i for i, c in enumerate(classes) if relation in c.split()]

    def marked(self):
        return self.find(".vector:is(.here, .source, .target, .off)")

    def titles(self, name, of="values"):
        """The numbers of a matrix: as its cells show them, and with all digits."""
        figure = self.find(f"#equations figure[data-name='{name}'][data-of='{of}']:not(.turned)")[0]
        rows = "return [...arguments[0].querySelectorAll('.vector')]"
        cells = ".map(v => [...v.querySelectorAll('.cell')].map(c => c[arguments[1]]))"
        shown, exact = (self.run(rows + cells, figure, what) for what in ("textContent", "title"))
        return [np.array([[number(x) for x in row] for row in rows]) for rows in (shown, exact)]

    def text(self, selector):
        return " ".join(self.one(selector).text.split())

    def errors(self):
        return [entry for entry in self.browser.get_log("browser") if entry["level"] != "INFO"]

    def requests(self):
        """What this page has requested, itself included."""
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent if request["documentURL"] == self.url]


def number(text):
    return float(text.replace("−", "-").replace("∞", "inf"))


@pytest.fixture
def mha():
    return tg.nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)


@pytest.fixture
def x(rng):
    return rng.standard_normal((5, 5)).astype(np.float32)


@pytest.fixture
def opened(browser, tmp_path):
    return lambda walkthrough: Page(browser, walkthrough, tmp_path / "page.html")


@pytest.fixture
def page(opened, mha, x):
    """The page of five words and two heads. After every test it has logged no error and requested nothing."""
    page = opened(tg.walkthrough(mha, x, tokens=WORDS))
    yield page
    assert page.errors() == []
    assert page.requests() == [page.url]


def test_there_are_ten_steps_with_a_title_and_an_explanation_each(page):
    buttons = page.find("#map button.step")
    assert [b.text.replace("\n", "") for b in buttons][:4] == ["1X", "2Q1", "3K1", "4V1"]
    assert len(buttons) == 10
    said = []
    for i in range(10):
        page.go(i + 1)
        assert page.text("#step").startswith(f"Step {i + 1}: ")
        assert page.one("#map .step[aria-current]").text.startswith(str(i + 1))
        said.append(page.text("#why"))
    assert len(set(said)) == 10
    assert min(map(len, said)) > 60


def test_back_and_next_lead_from_x_to_y(page):
    assert not page.one("#back").is_enabled()
    for _ in range(9):
        page.one("#next").click()
    assert page.text("#step").startswith("Step 10: the output")
    assert not page.one("#next").is_enabled()


@pytest.mark.parametrize("of", ["values", "gradients"])
def test_numbers_of_the_page_are_those_of_the_run(page, mha, x, of):
    y, trace = mha(tg.Tensor(x, requires_grad=True), causal=True, trace=True)
    y.backward(y.data)
    page.show(of)
    steps = {
        2: trace.q,
        3: trace.k,
        4: trace.v,
        5: trace.scores,
        6: trace.masked,
        7: trace.weights,
        8: trace.heads,
        10: y,
    }
    names = ["Q_1", "K_1", "V_1", "scores_1", "masked_1", "S_1", "H_1", "Y"]
    for (step, tensor), name in zip(steps.items(), names, strict=True):
        page.go(step)
        expected = tensor.data if of == "values" else tensor.grad
        expected = expected[0] if tensor.ndim == 3 else expected
        shown, exact = page.titles(name, of)
        np.testing.assert_allclose(exact, expected, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(
            shown, expected, rtol=6e-4, atol=0.0051, err_msg=name
        )  # two decimals where it is narrow


def test_a_roomy_cell_has_four_significant_digits(page, mha, x):
    page.go(7)
    weights = mha(x, causal=True, trace=True)[1].weights.data[0]
    shown, _ = page.titles("S_1")
    np.testing.assert_allclose(shown, weights, rtol=5.1e-4, atol=0)


def test_small_and_large_numbers_keep_two_significant_digits(opened, mha, x, page):
    for size in (1e-4, 1.0, 1e4):
        page = opened(tg.walkthrough(mha, size * x, tokens=WORDS))
        page.go(5)
        shown, exact = page.titles("scores_1")
        np.testing.assert_allclose(shown, exact, rtol=0.051)
        overflow = (
            "return [...document.querySelectorAll('.cell')].filter(c => c.scrollWidth > c.clientWidth + 1).length"
        )
        assert page.run(overflow) == 0


def test_attention_weights_add_up_to_one(page):
    page.go(7)
    _, weights = page.titles("S_1")
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    assert not np.triu(weights, 1).any()


def test_pointing_at_a_row_of_y_marks_the_rows_of_x_that_it_depends_on(page):
    page.go(10)
    for i, vector in enumerate(page.vectors("Y")):
        page.point(vector)
        assert page.rows("here", "Y") == [i]
        assert page.rows("source", "X") == list(range(i + 1))
        assert page.rows("off", "X") == list(range(i + 1, 5))
        assert page.rows("source", "Concat", "#equations") == [i]
    assert "depends on X: all rows" in page.text("#status")


def test_without_a_mask_every_row_of_y_depends_on_all_of_x(opened, mha, x):
    page = opened(tg.walkthrough(mha, x, tokens=WORDS, causal=False))
    assert len(page.find("#map button.step")) == 9
    assert not page.one("#decoding").is_displayed()
    page.go(9)
    for vector in page.vectors("Y"):
        page.point(vector)
        assert page.rows("source", "X") == [0, 1, 2, 3, 4]


def test_pointing_at_a_value_marks_related_rows_in_all_matrices(page):
    page.go(8)
    page.point(page.vectors("V_1")[2])
    assert page.rows("source", "X") == [2]
    assert [page.rows("target", name) for name in ("H_1", "Concat", "Y")] == [[2, 3, 4]] * 3
    assert page.rows("target", "H_1", "#equations") == [2, 3, 4]
    assert page.rows("target", "H_2") == page.rows("target", "S_1") == page.rows("source", "K_1") == []
    assert page.text("#status").startswith("“sat” V1")
    page.point(page.one("#why"))
    assert page.marked() == []


def test_pointing_at_a_row_of_a_parameter_marks_what_depends_on_it(page):
    page.go(2)
    page.point(page.vectors("W_Q1")[3])
    assert page.rows("target", "Q_1") == [0, 1, 2, 3, 4]
    assert page.rows("target", "S_1") == [1, 2, 3, 4]  # the weight of a single visible key is 1
    assert page.text("#status").startswith("row 4 WQ1")


def test_pointing_at_a_result_of_a_product_shows_its_sum(page, mha, x):
    page.go(2)
    cell = page.vectors("Q_1")[1].find_elements(By.CSS_SELECTOR, ".cell")[4]
    page.point(cell)
    factors = page.find("#equations figure[data-name='W_Q1'] .cell.factor")
    assert [number(c.get_attribute("title")) for c in factors] == pytest.approx(mha.wq.data[:, 4].tolist(), rel=1e-6)
    status = page.text("#status")
    assert f"{x[1, 0]:#.4g}".replace("-", "−") in status.rpartition("= ")[2]
    assert number(re.search(r"\[2, 5\] = (\S+)", status)[1]) == pytest.approx(
        (x[1] @ mha.wq.data[:, 4]).item(), rel=1e-5
    )


def test_gradients_come_with_the_adjoint_equation(page):
    page.show("gradients")
    page.go(4)
    assert page.text("#step").replace(" ", "").endswith("∂L/∂V1=S1T@∂L/∂H1")
    figures = page.find("#equations .equation:first-child figure")
    assert [f.find_element(By.CSS_SELECTOR, "figcaption b").text for f in figures] == ["5×5", "5×11", "5×11"]
    page.point(page.vectors("V_1", of="gradients")[2])
    assert "its gradient comes from Y: “sat” “on” “mats”" in page.text("#status")
    assert "goes on to X: “sat”" in page.text("#status")
    page.go(10)
    assert "half the sum of the squares of Y" in page.text("#why")


def test_each_decode_step_computes_one_row_and_reads_those_before_from_the_cache(page):
    for t in range(1, 6):
        page.decode(t)
        for name in ("K_1", "V_2"):
            assert page.rows("cached", name) == list(range(t - 1))
            assert page.rows("computed", name) == [t - 1]
            assert page.rows("absent", name) == list(range(t, 5))
        for name in ("X", "Q_1", "S_2", "H_1", "Concat", "Y"):
            assert page.rows("computed", name) == [t - 1]
            assert page.rows("cached", name) == []
            assert page.rows("absent", name) == [i for i in range(5) if i != t - 1]
    page.go(5)
    assert "540 multiplications instead of 2 700: 80 % saved" in page.text("#note")
    page.decode(0)
    assert page.find(".vector:is(.cached, .absent)") == []
    assert not page.one("#note").is_displayed()


def test_cached_rows_differ_from_computed_ones_without_colour(page):
    page.decode(3)
    page.go(3)
    style = "const s = getComputedStyle(arguments[0].querySelector('.cell')); return s[arguments[1]]"
    looks = [page.run(style, v, "backgroundImage") for v in page.vectors("K_1")]
    assert "repeating-linear-gradient" in looks[0] == looks[1]
    assert looks[2] == "none"
    hidden = [page.run(style, v, "visibility") for v in page.vectors("K_1")]
    assert hidden == ["visible"] * 3 + ["hidden"] * 2


def test_decoding_shows_no_keys_of_later_tokens(page):
    page.decode(3)
    page.go(5)
    row = page.vectors("scores_1")[2].find_elements(By.CSS_SELECTOR, ".cell")
    assert [bool(cell.text) for cell in row] == [True, True, True, False, False]


def test_gradients_and_decoding_exclude_each_other(page):
    page.decode(2)
    page.show("gradients")
    assert page.one("#decode").get_property("value") == "0"
    page.decode(2)
    assert page.one("#modes label:nth-of-type(1) input").is_selected()


def test_another_head_can_be_chosen_in_both_places(page):
    page.go(7)
    page.run("arguments[0].click()", page.one("#heads label:nth-of-type(2) input"))
    assert page.text("#step").replace(" ", "").endswith("S2=softmax(masked2)")
    page.one("#map figure[data-name='H_1']").click()
    assert page.text("#step").replace(" ", "").endswith("H1=S1@V1")
    assert page.one("#heads label:nth-of-type(1) input").is_selected()


def test_the_keyboard_can_do_what_the_mouse_can(page):
    keys = lambda *sent: ActionChains(page.browser).send_keys(*sent).perform()  # noqa: E731
    page.one("body").click()
    keys(*[Keys.ARROW_RIGHT] * 4, Keys.ARROW_LEFT)
    assert page.text("#step").startswith("Step 4")
    page.one("#next").send_keys(Keys.TAB)
    assert page.rows("here", "X") == [0]  # the first row of the first matrix: focus counts as pointing
    keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.rows("here", "X") == [2]
    assert page.rows("target", "Y") == [2, 3, 4]
    keys(Keys.TAB)
    assert page.rows("here", "W_V1", "#equations") == [0]
    keys(Keys.ARROW_UP)
    assert page.rows("here", "W_V1", "#equations") == [0]
    keys(Keys.TAB, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert page.text("#step").startswith("Step 5")
    assert page.rows("here", "scores_1") == [1]  # the row is followed into the next step
    keys(Keys.ESCAPE)
    page.run("document.activeElement.blur()")
    assert page.marked() == []


def test_rows_have_names_and_roles_for_screen_readers(page):
    page.go(5)
    tables = page.find("#equations [role=table]")
    labels = [table.get_attribute("aria-label") for table in tables]
    assert labels == ["Q_1, 5 × 7", "K_1, transposed, 7 × 5", "scores_1, 5 × 5"]
    assert [h.text for h in tables[0].find_elements(By.CSS_SELECTOR, "[role=row] [role=rowheader]")] == WORDS
    assert page.one("#decode").accessible_name == "decode with a cache"


HOSTILE = ["</script><b>x", "<img src=x onerror=alert(1)>", " ", "\n", "&lt;"]


def test_hostile_token_text_is_shown_as_text(opened, mha, x):
    page = opened(tg.walkthrough(mha, x, tokens=HOSTILE))
    shown = page.run("return [...document.querySelectorAll('#equations .vector .tag')].map(t => t.textContent)")
    assert shown == ["</script><b>x", "<img src=x onerror=alert(1)>", "␣", "⏎", "&lt;"]
    assert page.find("main b b, img") == []
    page.point(page.vectors("X")[1])
    assert "<img src=x onerror=alert(1)>" in page.text("#status")
    assert page.errors() == []


def test_the_page_opens_in_chinese_and_can_switch_the_language(opened, mha, x):
    page = opened(tg.walkthrough(mha, x, tokens=list("我们去北京"), lang="zh"))
    assert page.text("#title") == "多头注意力，一步一步看"
    assert page.one("html").get_attribute("lang") == "zh-CN"
    page.go(8)
    page.point(page.vectors("H_1")[1])
    assert page.text("#status").startswith("“们” H1 依赖 X：“我” “们”")
    page.one("#language").click()
    assert page.text("#title") == "Multi-head attention, step by step"
    assert page.text("#step").startswith("Step 8")
    assert page.errors() == []


CONTRAST = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const light = c => c.slice(0, 3).map(v => v / 255).map(v => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((a, v, i) => a + v * [0.2126, 0.7152, 0.0722][i], 0);
function behind(e) {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c;
  }
}
return [...document.querySelectorAll('body *')].filter(e => e.offsetParent && !e.matches('button:disabled') &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
  const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className + ' ' + e.textContent.slice(0, 30)];
});
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast_in_light_and_dark(page, scheme):
    page.browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    page.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    try:
        background = page.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
        for of in ("values", "gradients"):
            page.show(of)
            for step in range(1, 11):
                page.go(step)
                weak = [entry for entry in page.run(CONTRAST) if entry[0] < 4.5]
                assert weak == [], (of, step)
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_wide_rows_are_shown_in_colours_and_every_number_can_be_pointed_at(opened, rng):
    mha = tg.nn.MultiHeadAttention(40, n_head=4, bias=True, rng=0)
    x = rng.standard_normal((12, 40)).astype(np.float32)
    page = opened(tg.walkthrough(mha, x))
    for step in range(1, 11):
        page.go(step)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    page.go(1)
    strip = page.vectors("X")[6].find_element(By.CSS_SELECTOR, "canvas")
    page.point(strip)
    row, column, value = re.search(r"\[(\d+), (\d+)\] = (\S+)", page.text("#status")).groups()
    assert row == "7"
    assert number(value) == pytest.approx(x[6, int(column) - 1].item(), rel=1e-6)
    assert page.errors() == []


WALK = """return [...document.querySelectorAll('#map button.step')].map(button => {
  button.click();
  return [document.getElementById('why').textContent, document.body.innerText];
})"""


class Squared(Position):
    """A position of the user's own: its formula is written out."""

    rotates = True

    def rotate(self, x, positions):
        return x**2 + 1.0


class Scaled(tg.nn.MultiHeadAttention):
    """A variant with another output, in forward and per_head."""

    def forward(self, x, **options):
        return super().forward(x, **options) * 0.3

    def per_head(self, x, **options):
        return super().per_head(x, **options) * 0.3


def test_every_kind_of_attention_is_shown_without_an_error(opened, rng):
    rotary = tg.nn.MultiHeadAttention(8, n_head=4, n_kv_head=2, bias=True, position="rotary", d_k=6, rng=0)
    alibi = tg.nn.MultiHeadAttention(8, n_head=1, position="alibi", rng=0)
    relative = tg.nn.MultiHeadAttention(8, n_head=2, position="relative", rng=0)
    x = rng.standard_normal((4, 8))
    x_broken = np.where(np.eye(4, 8) > 0, np.nan, x)
    for walkthrough in (
        tg.walkthrough(rotary, x),
        tg.walkthrough(alibi, x),
        tg.walkthrough(alibi, x, causal=False),
        tg.walkthrough(alibi, x[:1]),
        tg.walkthrough(rotary, x_broken),
        tg.walkthrough(relative, x),
        tg.walkthrough(Scaled(8, n_head=2, position=Squared(), rng=0), x),
    ):
        page = opened(walkthrough)
        for of in ("values", "gradients"):
            page.show(of)
            for said, everything in page.run(WALK):
                assert len(said) > 40
                assert not set("{[") & set(said)
                assert "undefined" not in everything
        assert page.errors() == []


def test_a_notebook_can_show_it_twice(browser, tmp_path, mha, x):
    frame = tg.walkthrough(mha, x, tokens=WORDS)._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{frame}{frame}", encoding="utf-8")
    browser.get_log("browser")
    browser.get(path.as_uri())
    for inner in browser.find_elements(By.TAG_NAME, "iframe"):
        browser.switch_to.frame(inner)
        browser.find_element(By.ID, "next").click()
        assert browser.find_element(By.ID, "step").text.startswith("Step 2")
        browser.switch_to.default_content()
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []


# --------------------------------------------------------------------------------------------------------------------
# A whole GPT


@pytest.fixture
def model_page(browser, tmp_path):
    tokenizer = tg.data.CharTokenizer.of("</script> is not html")
    config = tg.nn.GPTConfig(tokenizer.vocab_size, block_size=13, n_layer=3, n_head=2, n_embd=14)
    model = tg.nn.GPT(config, seed=0)
    return Page(browser, tg.walkthrough(model, "</script>", tokenizer=tokenizer), tmp_path / "model.html")


def test_a_reader_follows_a_token_samples_and_enters_a_head(model_page):
    page = model_page
    assert page.errors() == []
    assert page.requests() == [page.url]
    assert "A GPT" in page.text("h1")
    page.find("#tokens button")[2].click()
    assert page.find("#tokens button")[2].get_attribute("aria-pressed") == "true"
    assert len(page.find(".lens")) == 7
    page.run("document.querySelectorAll('#temperature input')[0].click()")
    assert "100.0 %" in page.text("#next table")
    page.find("#heads [data-layer='2']")[1].click()
    page.browser.switch_to.frame(page.one("#frame"))
    deadline = time.monotonic() + 20
    while not page.find("#equations .cell") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "S2" in page.text("#step").replace(" ", "")
    page.browser.switch_to.default_content()
    page.one("#leave").click()
    assert not page.one("#room").is_displayed()
    page.one("#language").click()
    assert "残差流" in page.text("#stream h2")
    page.run("document.querySelectorAll('#modes input')[1].click()")
    page.find("[data-matrix]")[0].click()
    assert len(page.find("dialog td")) == 9 * 14
    assert page.errors() == []


# --------------------------------------------------------------------------------------------------------------------
# The lab


class Lab(Page):
    """The lab in the browser, served by a thread."""

    def __init__(self, browser, server):
        self.browser = browser
        browser.get_log("browser")
        browser.get(server.address)
        self.wait_for("causal")

    def wait_for(self, verdict):
        deadline = time.monotonic() + 20
        while self.run("return document.querySelector('#verdict').className") != verdict:
            assert time.monotonic() < deadline, self.text("#verdict")
            time.sleep(0.02)

    def choose(self, name, value):
        find = "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
        self.run(find + "field.dispatchEvent(new Event('change'))", name, value)

    def in_frame(self, script):
        """The result of a script in the page of the attention, as soon as that is there."""
        deadline = time.monotonic() + 20
        ready = "const d = document.getElementById('frame').contentDocument;"
        ready += "if (!d?.querySelector('#equations .cell')) return null;"
        while (found := self.run(ready + script)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found


@pytest.fixture
def lab(browser):
    server = LabServer()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Lab(browser, server)
    finally:
        server.deadline = 0
        thread.join()


CELL = 'd.querySelector(\'#equations figure[data-name=X] .vector[data-row="1"] .cell[data-column="2"]\')'


def test_in_the_lab_a_number_is_edited_and_the_verdict_follows_the_mask(lab):
    assert "Causal" in lab.text("#verdict")
    before = lab.in_frame(f"return {CELL}.title")
    lab.in_frame(f"{CELL}.click(); return true")
    assert lab.text("#chosen") == "X[2, 3]"
    lab.choose("value", "-0.125")
    deadline = time.monotonic() + 20
    while (after := lab.in_frame(f"return {CELL}.title")) == before:
        assert time.monotonic() < deadline
    assert number(after) == -0.125
    lab.choose("mask", "broken")
    lab.wait_for("leak")
    assert "Not causal. Row 1 depends on token 2" in lab.text("#verdict")
    lab.one("#code_button").click()
    assert "x[1, 2] = -0.125" in lab.text("#code pre")
    lab.run("document.getElementById('code').close()")
    lab.choose("mask", "causal")
    lab.wait_for("causal")
    lab.choose("d_k", "65")
    lab.wait_for("error")
    assert "d_k is at most 64" in lab.text("#verdict")
    lab.choose("d_k", "4")
    lab.wait_for("causal")
    lab.choose("sentence", "<img src=x onerror=alert(1)> </script>")
    lab.wait_for("causal")
    errors = [e for e in lab.errors() if "400 (Bad Request)" not in e["message"]]  # the refused d_k
    assert errors == []


@pytest.fixture
def narrow(browser):
    """A phone: 390 pixels wide."""
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("n", [5, 23])
def test_on_a_phone_operators_brackets_and_divisors_stay_beside_their_matrix(narrow, opened, mha, rng, n):
    page = opened(tg.walkthrough(mha, rng.standard_normal((n, 5))))
    box = "box = e => ({text: e.textContent, ...e.getBoundingClientRect().toJSON()})"
    groups = "[...document.querySelectorAll('.group')].map(g => [...g.children].map(box))"
    signs = []
    for step in range(1, 11):
        page.go(step)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        for group in page.run(f"const {box}; return {groups}"):
            assert [part["x"] for part in group] == sorted(part["x"] for part in group)
            (matrix,) = [part for part in group if part["height"] > 40]
            for sign in (part for part in group if part is not matrix):
                assert matrix["y"] < sign["y"] + sign["height"] / 2 < matrix["y"] + matrix["height"]
                signs.append(" ".join(sign["text"].split()))
    assert {"@", "=", "|", "/ √7", "mask(", "softmax(", ")"} == set(signs)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_back_and_next_stay_in_their_place(browser, opened, mha, x, lang):
    page = opened(tg.walkthrough(mha, x, lang=lang))
    for width, height in ((360, 740), (1200, 600)):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        places = set()
        for step in range(1, 11):
            page.go(step)
            boxes = "['back', 'next'].map(id => get(id).getBoundingClientRect()).map(b => [b.x, b.y + scrollY])"
            places.add(str(page.run(f"return {boxes}")))
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert len(places) == 1


def test_chinese_names_over_narrow_columns_stand_upright(narrow, opened, mha, rng):
    page = opened(tg.walkthrough(mha, rng.standard_normal((23, 5)), tokens=["词元"] * 22 + ["word"]))
    page.go(7)
    turned = page.run("return [...document.querySelectorAll('.axis .upright')].map(e => getComputedStyle(e).transform)")
    assert turned[0] == "none"
    assert turned[22] != "none"


def test_on_a_phone_a_matrix_shows_its_numbers_if_they_fit(narrow, opened, mha, x):
    page = opened(tg.walkthrough(mha, x))
    page.go(10)  # Y = Concat @ W_O: the 22 columns of Concat leave no room for numbers, the 5 of the others do
    shown = {
        f.get_attribute("data-name"): len(f.find_elements(By.CSS_SELECTOR, ".cell"))
        for f in page.find("#equations figure")
    }
    assert shown == {"Concat": 0, "W_O": 22 * 5, "Y": 5 * 5}


def test_on_a_phone_the_hint_does_not_cover_the_page(narrow, opened, mha, x):
    page = opened(tg.walkthrough(mha, x))
    assert page.run("return getComputedStyle(document.getElementById('status')).position") == "static"


def test_negative_numbers_are_marked_where_only_colours_are_shown(narrow, opened, mha, x):
    page = opened(tg.walkthrough(mha, x))
    page.go(10)
    marked = page.run(
        """const row = document.querySelector('#equations figure[data-name=Concat] canvas'), side = row.height;
        const pixels = row.getContext('2d').getImageData(0, 0, row.width, side).data;
        const pixel = (x, y) => pixels.slice(4 * (y * row.width + x), 4 * (y * row.width + x) + 3).join();
        return Array.from({length: row.width / side}, (_, j) => pixel(j * side + 3, 4) !== pixel(j * side + 3, 1));"""
    )
    assert marked == (mha(x, causal=True, trace=True)[1].concat.numpy()[0] < 0).tolist()
