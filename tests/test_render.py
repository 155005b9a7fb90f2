"""Every installed Graphviz draws every box, broken ones are skipped, and files are written whole or not at all."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import graphviz
import numpy as np
import pytest
from test_graph import IDS, ODD_NAMES, boxes, gpt, swept, two_heads

import tinygrad_mha as tg
from tinygrad_mha import modes, nn, ops
from tinygrad_mha.viz import NoEngineError, fonts
from tinygrad_mha.viz.diagram import closing
from tinygrad_mha.viz.diagram import graphviz_engines as render

SVG = "{http://www.w3.org/2000/svg}"
posix = pytest.mark.skipif(os.name == "nt", reason="the engines made up here are scripts with a #! line")


@pytest.fixture(params=list(render.ENGINES))
def engine(request):
    """Each engine that works on this machine."""
    try:
        command = render.ENGINES[request.param]()
    except render.EngineFailedError as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    if command is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture
def no_engine(monkeypatch, tmp_path):
    """A machine without Graphviz in any form."""
    empty = tmp_path / "empty path"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setitem(sys.modules, "pygraphviz", None)


@pytest.fixture
def fake_dot(monkeypatch, tmp_path):
    """`fake_dot(body)` puts a Python program `dot` first on PATH; `outputs` in the body is {format: path}."""

    def make(body):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "dot"
        head = f"""\
            #!{sys.executable}
            import re, sys, time
            if "-V" in sys.argv: sys.exit(print("dot - graphviz version 0.0", file=sys.stderr))
            flags = [a[2:] for a in sys.argv if a.startswith("-T")]
            files = [b for a, b in zip(sys.argv, sys.argv[1:]) if a == "-o"]
            outputs, source = dict(zip(flags, files)), open(sys.argv[-1], encoding="utf-8").read()
        """
        program.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.fixture
def good_second(monkeypatch, tmp_path):
    """Replaces the second engine by one that works: it writes the boxes of the DOT text."""
    program = tmp_path / "good.py"
    program.write_text(
        textwrap.dedent("""\
            import re, sys
            source, outputs = open(sys.argv[1], encoding="utf-8").read(), dict(zip(sys.argv[2::2], sys.argv[3::2]))
            ids = re.findall(r"^\\t*(\\w+) \\[label", source, re.M)
            box = '<g class="node"><title>{}</title><text>second</text><text>engine</text></g>'
            boxes = "".join(map(box.format, ids))
            for name, path in outputs.items():
                svg = f'<svg xmlns="http://www.w3.org/2000/svg">{boxes}</svg>'
                open(path, "w").write(svg if name == "svg" else "second engine")
        """)
    )

    def command(source, outputs):
        return [sys.executable, str(program), str(source), *(str(x) for pair in outputs.items() for x in pair)]

    monkeypatch.setitem(render.ENGINES, "pygraphviz", lambda: command)


def texts(svg):
    """The lines of text of each box, by its id."""
    groups = [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("class") == "node"]
    return {g.findtext(f"{SVG}title"): [t.text for t in g.iter(f"{SVG}text")] for g in groups}


# --------------------------------------------------------------------------------------------------------------------
# Every engine


def test_every_engine_draws_every_box_with_its_name_and_shape(engine, capfd):
    graph = tg.graph(swept(two_heads()), engine=engine)
    drawn = texts(graph.svg())
    assert set(drawn) == {node.id for node in graph.picture.nodes}
    for node in graph.picture.nodes:
        assert drawn[node.id][:2] == [node.title, node.shape]
        assert " ".join(node.lines) in " ".join(drawn[node.id])
    assert capfd.readouterr().err == ""


def test_every_engine_shows_any_name(engine):
    y = None
    names = [*ODD_NAMES, "new\nline", "tab\there", "\x00\x1b", "\ud800", "é" * 200, "x" * 1000]
    for name in names:
        x = tg.Tensor([1.0], requires_grad=True, name=name)
        y = x if y is None else ops.maximum(y, x).named("m" + name)
    graph = tg.graph(y, depth=None, engine=engine)
    shown = [" ".join(lines) for lines in texts(graph.svg()).values()]
    assert len(shown) == len(graph.picture.nodes) == 2 * len(names) - 1
    for name in ODD_NAMES:
        assert any(text.startswith(f"{name} 1 ") for text in shown), name
    assert any(text.startswith("new line 1 ") for text in shown)
    assert any(text.startswith("\ufffd\ufffd 1 ") for text in shown)


@pytest.mark.parametrize("options", [{"backward": True}, {"ops": "separate"}, {"direction": "LR"}, {"fold": False}])
def test_every_engine_draws_every_kind_of_graph(engine, options):
    graph = tg.graph(swept(two_heads()), engine=engine, **options)
    assert len(texts(graph.svg())) == len(graph.picture.nodes)


def test_every_engine_draws_modules_differences_and_what_is_not_finite(engine):
    model = gpt()
    closed = tg.graph(model(IDS), depth=2, engine=engine)
    assert len(texts(closed.svg())) == len(closed.picture.nodes)
    diff = tg.graph_diff(closed, tg.graph(gpt(norm_first=False)(IDS), depth=2))
    assert len(texts(diff.svg())) == len(diff.picture.nodes)
    odd = tg.graph(tg.Tensor([[np.nan, np.inf, -np.inf, 0.0]], name="x"), engine=engine)
    assert texts(odd.svg())["t0"][4:] == ["nan", "∞", "−∞", "0"]


def test_files_have_the_format_of_their_suffix(engine, tmp_path):
    graph = tg.graph(swept(two_heads()), engine=engine)
    for name, magic in (("x.png", b"\x89PNG\r\n\x1a\n"), ("x.pdf", b"%PDF"), ("x.svg", b"<?xml"), ("x.html", b"<!DOC")):
        written = graph.save(tmp_path / name)
        content = written.read_bytes()
        assert content.startswith(magic)
        assert len(content) > 5_000
    width, height = np.frombuffer((tmp_path / "x.png").read_bytes()[16:24], ">u4")
    assert width > 1_000
    assert height > 1_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.pdf", "x.png", "x.svg"]


def test_the_picture_is_the_same_twice(engine, tmp_path):
    first, second = (tg.graph(swept(two_heads()), engine=engine) for _ in range(2))
    assert first.svg() == second.svg()
    assert first.save(tmp_path / "a.html").read_bytes() == second.save(tmp_path / "b.html").read_bytes()


def test_a_png_has_two_pixels_for_each_point(engine, tmp_path):
    graph = tg.graph(two_heads(), engine=engine)
    png, svg = (graph.save(tmp_path / name).read_bytes() for name in ("x.png", "x.svg"))
    points = float(ElementTree.fromstring(svg).get("width").removesuffix("pt"))
    assert int.from_bytes(png[16:20], "big") == pytest.approx(2 * points, rel=0.02)


def test_a_picture_loads_nothing_from_the_network(engine, tmp_path):
    text = tg.graph(two_heads(), engine=engine).save(tmp_path / "x.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    addresses = {part.split('"')[0] for part in text.split('"http')[1:]}
    assert addresses <= {"://www.w3.org/2000/svg", "://www.w3.org/1999/xlink"}
    assert "<script src" not in text  # the one script is part of the page
    assert "<a " not in text


def test_boxes_have_tooltips(engine):
    svg = tg.graph(two_heads(), engine=engine).svg()
    told = [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert any("X, 3×5, float64\nmin" in text for text in told)
    assert not any("%3" in text for text in told)


def test_a_notebook_shows_a_graph_twice_with_different_ids_scaled_and_scrolling(engine):
    graph = tg.graph(two_heads(), engine=engine)
    first, second = (graph._repr_mimebundle_() for _ in range(2))
    assert list(first) == ["text/html", "text/plain"]
    html = first["text/html"]
    assert "overflow:auto" in html
    assert "max-width:100%" in html
    assert "viewBox" in html
    assert "<?xml" not in html
    assert "<!DOCTYPE" not in html

    def ids(html):
        svg = ElementTree.fromstring(html)
        return {element.get("id") for element in svg.iter() if element.get("id")}

    assert ids(html)
    assert not ids(html) & ids(second["text/html"])


# --------------------------------------------------------------------------------------------------------------------
# No engine


def test_without_an_engine_there_is_the_text_and_an_error_that_names_the_fixes(no_engine, tmp_path):
    graph = tg.graph(two_heads())
    assert graph.dot.startswith("digraph")
    for ask in (graph.svg, lambda: graph.save(tmp_path / "x.png"), lambda: graph.save(tmp_path / "x.html")):
        with pytest.raises(NoEngineError, match=r'pip install "tinygrad_mha\[render\]"') as caught:
            ask()
        assert isinstance(caught.value, graphviz.ExecutableNotFound)
        for word in ("dot is not installed", "pygraphviz is not installed", "apt", 'save("x.dot")'):
            assert word in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["empty path"]


def test_without_an_engine_dot_files_are_written(no_engine, tmp_path):
    graph = tg.graph(two_heads())
    for name in ("x.dot", "x.gv"):
        assert graph.save(tmp_path / name).read_text(encoding="utf-8") == graph.dot


def test_without_an_engine_a_notebook_shows_the_text_and_the_hint(no_engine):
    shown = tg.graph(tg.Tensor([1.0], name="a<b"))._repr_mimebundle_()
    assert "pip install" in shown["text/plain"]
    assert "digraph" in shown["text/plain"]
    assert "image/svg+xml" not in shown
    assert "<TABLE" not in shown["text/html"]
    assert "&lt;TABLE" in shown["text/html"]


def test_an_engine_requested_by_name_has_no_substitute(no_engine, good_second):
    assert "second" in tg.graph(two_heads()).svg()
    with pytest.raises(NoEngineError, match="dot is not installed"):
        tg.graph(two_heads(), engine="dot").svg()


def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"\.svg, \.png, \.pdf, \.html, \.dot, \.gv, got .*x\.jpg"):
        tg.graph(two_heads()).save(tmp_path / "x.jpg")
    with pytest.raises(ValueError, match="got"):
        tg.graph(two_heads()).save(tmp_path / "svg")
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------------------
# Broken engines

BROKEN = {
    "fails": ("print('no memory', file=sys.stderr); sys.exit(3)", "status 3: no memory"),
    "writes nothing": ("", "no usable output"),
    "writes half": ("open(outputs['svg'], 'w').write('<svg><g class=')", "no usable output"),
    "drops labels": (
        """
        ids = re.findall(r"^\\t*(\\w+) \\[label", source, re.M)
        boxes = "".join(f'<g class="node"><title>{i}</title><text>{i}</text></g>' for i in ids)
        open(outputs["svg"], "w").write(f'<svg xmlns="http://www.w3.org/2000/svg">{boxes}</svg>')
        """,
        "label of box t0 was lost",
    ),
    "loses boxes": (
        """open(outputs["svg"], "w").write('<svg xmlns="http://www.w3.org/2000/svg"></svg>')""",
        "are not in the picture",
    ),
    "says error": ("print('Error: lost a label', file=sys.stderr)", "lost a label"),
    "hangs": ("time.sleep(60)", "did not answer"),
}


@posix
@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("name", ["x.svg", "x.png"])
def test_a_broken_dot_is_skipped_with_one_warning(fault, name, fake_dot, good_second, monkeypatch, tmp_path):
    body, reason = BROKEN[fault]
    fake_dot(body)
    monkeypatch.setattr(render, "LAYOUT_SECONDS", 2.0)
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        content = tg.graph(two_heads()).save(tmp_path / name).read_text()
    assert len(caught) == 1
    assert "pygraphviz is used instead" in str(caught[0].message)
    assert "second" in content


@posix
@pytest.mark.parametrize(
    "answer",
    ["import time; time.sleep(60)", "import sys; sys.exit(1)", "print('another program')", "this is no Python"],
)
def test_a_dot_that_does_not_answer_is_probed_once_and_skipped(answer, good_second, monkeypatch, tmp_path):
    program = tmp_path / "dot"
    program.write_text(f"#!{sys.executable}\nopen({str(tmp_path / 'asked')!r}, 'a').write('x')\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(render, "PROBE_SECONDS", 1.0)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="dot is not usable"):
            assert "second" in tg.graph(two_heads()).svg()
    asked = tmp_path / "asked"
    assert not asked.exists() or asked.read_text() == "x"


@posix
def test_when_all_engines_are_broken_the_error_has_the_reasons(no_engine, fake_dot, tmp_path):
    fake_dot("sys.exit(5)")
    with pytest.raises(NoEngineError, match="status 5") as caught:
        tg.graph(two_heads()).save(tmp_path / "x.png")
    assert "pygraphviz is not installed" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "empty path"]


def test_a_package_that_cannot_be_imported_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "pygraphviz.py").write_text("raise OSError('a library is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pygraphviz", raising=False)
    with pytest.raises(NoEngineError, match="a library is missing"):
        tg.graph(two_heads(), engine="pygraphviz").svg()


@pytest.mark.parametrize("file", ["pygraphviz.py", "pygraphviz/__init__.py"])
def test_pygraphviz_is_imported_from_where_this_process_finds_it(file, tmp_path, monkeypatch):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pygraphviz", raising=False)
    command = render.find_pygraphviz()
    assert command(Path("a.dot"), {"svg": Path("a.svg")})[3] == str(tmp_path)


@pytest.fixture
def no_fonts(monkeypatch, tmp_path):
    """Settings of fontconfig that know no font."""
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "fonts.conf").write_text("<fontconfig></fontconfig>")
    monkeypatch.setenv("FONTCONFIG_PATH", str(tmp_path / "settings"))
    monkeypatch.delenv("FONTCONFIG_FILE", raising=False)


def test_without_fonts_on_the_system_a_graph_is_drawn_with_the_font_of_the_extra(no_fonts, engine, tmp_path):
    pytest.importorskip("pylopdf_fonts_zh_cn", reason="only Linux has the font of the extras plot and render")
    graph = tg.graph(tg.Tensor([1.0], name="猫ᵀ"), engine=engine)
    fonts_of_it = set(re.findall(rb"/FontName */\w+\+([\w-]+)", graph.save(tmp_path / "x.pdf").read_bytes()))
    symbols = {b"DejaVuSans"} if fonts.symbol_fonts() else set()
    assert {name.split(b"-")[0] for name in fonts_of_it} == {b"NotoSansSC"} | symbols


def test_settings_of_fontconfig_that_the_user_names_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(fonts, "chinese_font", lambda: Path("/fonts & more/Font.otf"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("FONTCONFIG_FILE", raising=False)
    settings = Path(fonts.make_fontconfig(tmp_path)["FONTCONFIG_FILE"])
    assert ElementTree.parse(settings).findtext("dir") == "/fonts & more"
    monkeypatch.setenv("FONTCONFIG_FILE", "mine.conf")
    assert fonts.make_fontconfig(tmp_path) is None


@posix
def test_a_png_of_chinese_text_without_a_font_is_one_warning_that_says_what_to_install(
    no_fonts, good_second, monkeypatch, tmp_path
):
    if shutil.which("fc-list") is None:
        pytest.skip("fc-list is not installed, which says what fonts there are")
    monkeypatch.setattr(fonts, "chinese_font", lambda: None)
    graph = tg.graph(tg.Tensor([1.0], name="猫"), engine="pygraphviz")
    with pytest.warns(UserWarning, match="pip install pylopdf-fonts-zh-cn") as caught:
        graph.save(tmp_path / "x.png")
    assert len(caught) == 1
    graph.save(tmp_path / "x.svg")  # whose text is drawn where it is opened
    tg.graph(tg.Tensor([1.0], name="cat"), engine="pygraphviz").save(tmp_path / "y.png")


def test_a_failed_save_keeps_the_old_file(no_engine, tmp_path):
    (tmp_path / "x.svg").write_text("old")
    with pytest.raises(NoEngineError):
        tg.graph(two_heads()).save(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text() == "old"


# --------------------------------------------------------------------------------------------------------------------
# In a browser


def test_a_browser_shows_the_page_without_errors(browser, engine, tmp_path):
    browser.set_window_size(700, 900)
    page = tg.graph(swept(two_heads()), engine=engine).save(tmp_path / "x.html")
    browser.get(page.as_uri())
    width = browser.execute_script("return document.querySelector('svg').getBoundingClientRect().width")
    assert 500 < width <= 700  # drawn wider than the window, shown as wide as the window
    shown = browser.execute_script("return [...document.querySelectorAll('.node text')].map(t => t.textContent)")
    assert {"X", "S_1", "scaled: Q_1 @ K_1ᵀ / √7"} < set(shown)
    assert browser.get_log("browser") == []


def test_a_page_opens_and_closes_modules_and_finds_names(browser, tmp_path):
    browser.set_window_size(900, 900)
    model = nn.GPT(nn.GPTConfig(vocab_size=13, block_size=7, n_layer=2, n_head=2, n_embd=6), seed=0)
    page = tg.graph(model([[1, 2, 3]]).named("<b>logits")).save(tmp_path / "x.html")
    assert page.stat().st_size < 600_000
    assert "http:" not in re.sub(r"http://www\.w3\.org/\S+", "", page.read_text("utf-8"))

    def wait_for(state):
        script = "return document.body.dataset.state"
        deadline = time.monotonic() + 5
        while browser.execute_script(script) != state and time.monotonic() < deadline:
            time.sleep(0.02)
        assert browser.execute_script(script) == state
        return browser.execute_script("return [...document.querySelectorAll('.node text')].map(t => t.textContent)")

    browser.get(page.as_uri())
    browser.find_element("css selector", "[data-state=none]").click()
    assert "wte.weight" not in wait_for("none")
    browser.find_element("css selector", "g.node[role=button]").send_keys("\n")  # by keyboard: GPT, then its blocks
    assert any("×2" in text for text in wait_for("cluster_0"))
    block = browser.find_elements("css selector", "g.node[role=button]")[0]
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", block)
    assert "ln_1.weight" in wait_for("cluster_1")
    browser.find_element("id", "find").send_keys("gelu\n")
    assert "gelu" in wait_for("cluster_3")
    assert len(browser.find_elements("css selector", ".found")) == 1
    browser.find_element("css selector", "g.cluster[role=button]").send_keys("\n")
    assert "wte.weight" not in wait_for("none")
    assert browser.get_log("browser") == []


def test_every_state_of_a_page_closes_what_it_says():
    model = nn.GPT(nn.GPTConfig(vocab_size=13, block_size=7, n_layer=2, n_head=2, n_embd=6), seed=0)
    picture = tg.graph(model([[1, 2, 3]]), depth=None).picture
    frames = {cluster.id for cluster in picture.clusters}
    for closed in closing.list_states(picture, 40).values():
        drawn = closing.close_frames(picture, closed)
        ids = {node.id for node in drawn.nodes}
        assert {cluster.id for cluster in drawn.clusters}.isdisjoint(closed)
        assert ids & frames <= closed
        assert all({edge.source, edge.target} <= ids for edge in drawn.edges)
        assert {node.cluster for node in drawn.nodes} <= {None, *(cluster.id for cluster in drawn.clusters)}
    assert closing.close_frames(picture, set()) == picture


def test_text_is_no_reference():
    x = tg.Tensor([1.0], requires_grad=True, name="url(#x)")
    svg = tg.graph((x * 2).named('<g a="url(#x)" href="#y">')).svg()
    assert escape('<g a="url(#x)" href="#y">') in svg
    assert ">url(#x)<" in svg
    assert "#e8f2fd" in svg  # colours are no references either


def test_names_of_any_length_are_drawn():
    x = tg.Tensor([1.0], requires_grad=True, name="<B>" * 9_000)
    with modes.scope(nn.Scope("m" * 17_000)):
        y = (x * 2).named("y" * 17_000) * x
    assert "yyy…yyy" in tg.graph(y).svg()


def test_a_picture_that_graphviz_refuses_is_no_missing_program():
    with pytest.raises(ValueError, match="Graphviz refuses this picture"):
        render.render("digraph { a [ }", "svg", ["a"])


def test_a_large_png_is_limited_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "MOST_PIXELS", 500)
    with pytest.warns(UserWarning, match="limited to 500 pixels a side"):
        path = tg.graph(two_heads()).save(tmp_path / "x.png")
    width, height = (int.from_bytes(path.read_bytes()[i : i + 4], "big") for i in (16, 20))
    assert max(width, height) <= 510


def test_the_title_of_a_page_is_the_name_of_the_output(engine, tmp_path):
    x = tg.Tensor([1.0], requires_grad=True)
    text = tg.graph((x * 2).named("</title><b>y\x00"), engine=engine).save(tmp_path / "x.html").read_text("utf-8")
    assert "<title>graph of &lt;/title&gt;&lt;b&gt;y\ufffd</title>" in text
    assert boxes(tg.graph(x, names={"x": x}))["x"].title == "x"


def read_layout(dot):
    """The layout of Graphviz: the boxes (x0, y0, x1, y1) of the titles of frames, and points along the drawn arrows."""
    program = shutil.which("dot")
    if program is None:
        pytest.skip("no dot on PATH")
    layout = json.loads(subprocess.run([program, "-Tjson"], input=dot.encode(), capture_output=True, check=True).stdout)
    titles = {}
    for item in layout["objects"]:
        if item["name"].startswith("cluster") and "lp" in item:
            (x, y), w, h = map(float, item["lp"].split(",")), 36 * float(item["lwidth"]), 36 * float(item["lheight"])
            titles[item["name"]] = x - w + 8, y - h + 3, x + w - 8, y + h - 3
    arrows = []
    for edge in layout["edges"]:
        if edge.get("style") == "invis":
            continue
        points = np.array([p.split(",") for p in edge["pos"].split() if p[0] not in "es"], dtype=float)
        t = np.linspace(0, 1, 50)[:, None]
        bends = [points[i : i + 4] for i in range(0, len(points) - 3, 3)]
        curve = [
            (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d for a, b, c, d in bends
        ]
        arrows.append((edge, np.concatenate(curve)))
    return titles, arrows


def count_crossed_titles(graph):
    """How many residual arrows there are, and how often one crosses the title of a frame."""
    titles, arrows = read_layout(graph.dot)
    residual = [points for edge, points in arrows if "residual" in edge.get("headlabel", "")]
    crossed = sum(
        ((x > x0) & (x < x1) & (y > y0) & (y < y1)).any()
        for x, y in (points.T for points in residual)
        for x0, y0, x1, y1 in titles.values()
    )
    return len(residual), crossed


@pytest.mark.parametrize("options", [{}, {"position": "sinusoidal"}, {"position": "alibi"}, {"norm_first": False}])
def test_no_residual_arrow_of_a_gpt_crosses_the_title_of_a_frame(options):
    model = gpt(**options)
    for depth in (None, 2):
        assert count_crossed_titles(tg.graph(model.loss(IDS[:, :-1], IDS[:, 1:]), depth=depth)) == (2, 0)


@pytest.mark.parametrize("position", ["rotary", "relative", "none"])
def test_every_engine_draws_queries_keys_and_values_from_left_to_right(position, engine):
    mha = nn.MultiHeadAttention(8, n_head=2, position=position, rng=0)
    graph = tg.graph(mha(tg.Tensor(np.ones((3, 8)), name="X"), causal=True), engine=engine)
    groups = {g.findtext(f"{SVG}title"): g for g in ElementTree.fromstring(graph.svg()).iter(f"{SVG}g")}
    for row in (("Q", "K", "V"), ("W_Q", "W_K", "W_V")):
        left = [float(next(groups[boxes(graph)[name].id].iter(f"{SVG}text")).get("x")) for name in row]
        assert left == sorted(left)


def test_the_titles_of_frames_are_above_the_arrows_that_cross_them(engine):
    svg = tg.graph(gpt(position="relative")(IDS), engine=engine).svg()
    titles = [group for group in ElementTree.fromstring(svg)[0] if "paint-order" in group.get("style", "")]
    assert [text.text for text in titles[0]][:2] == ["GPT", "2,194 parameters"]
    assert svg.index("paint-order") > svg.rindex('class="edge"')


def test_no_residual_arrow_of_a_translator_crosses_the_title_of_a_frame():
    model = nn.Transformer(11, 13, d_model=12, n_head=3, n_layer=2, d_ff=17, max_len=16, seed=0)
    assert count_crossed_titles(tg.graph(model.loss(np.arange(5)[None], np.arange(6)[None]))) == (5, 0)
