"""Draw the pictures of decoding and of the walkthrough page that the code of the pages cannot draw.

    python docs/draw_decoding.py        # writes docs/images/decoding.svg, page_row.png and page_decoding.png

The animation is a run of one head with a cache. The screenshots need Chromium and selenium.
"""

from __future__ import annotations

import shutil
import tempfile
from html import escape
from pathlib import Path

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha.viz.diagram.heat import colour_of, largest_magnitude

IMAGES = Path(__file__).parent / "images"
WORDS = ["the", "cat", "sat", "on", "mats"]
SECONDS = 2.5  # of a step
CELL, LEFT, TOP = 13, 64, 58

STYLE = f"""
text {{ font: 12px Arial, Helvetica, sans-serif; fill: #1b1f24 }}
.title {{ font-weight: bold; font-size: 14px }} .note {{ fill: #57606a }}
.step {{ visibility: hidden; animation: show {SECONDS * len(WORDS)}s infinite step-end }}
.step:last-of-type {{ visibility: visible }}
@keyframes show {{ 0% {{ visibility: visible }} {100 / len(WORDS):g}%, 100% {{ visibility: hidden }} }}
@media (prefers-reduced-motion: reduce) {{ .step {{ animation: none }} }}
"""


def record_steps() -> list[dict[str, np.ndarray]]:
    """Read one word at a time: the rows that each step computes, and the numbers that its cache keeps and reads."""
    mha = tg.nn.MultiHeadAttention(5, n_head=1, d_k=5, d_v=7, rng=0)
    x = np.random.default_rng(0).standard_normal((len(WORDS), 5))
    cache, steps = tg.nn.KVCache(), []
    with tg.no_grad():
        for t in range(len(WORDS)):
            y, trace = mha(x[t : t + 1], causal=True, cache=cache, trace=True)
            found = {"Q": trace.q, "K": trace.k, "V": trace.v, "S": trace.weights, "H": trace.heads}
            rows = {name: tensor.numpy().reshape(-1, tensor.shape[-1])[-1:] for name, tensor in found.items()}
            steps.append({"X": x[t : t + 1], **rows, "Y": y.numpy()})
        whole = mha(x, causal=True).numpy()
    np.testing.assert_allclose(np.concatenate([step["Y"] for step in steps]), whole, rtol=1e-5, atol=1e-6)
    return steps


def draw_step(steps: list[dict[str, np.ndarray]], t: int) -> list[str]:
    """One step: the row that is computed, the rows that were kept, and where rows were thrown away."""
    parts, x = [], LEFT
    for name in steps[0]:
        width = len(WORDS) if name == "S" else steps[0][name].shape[1]
        is_kept = name in ("K", "V")
        most = max(largest_magnitude(step[name]) for step in steps)
        for i, step in enumerate(steps[: t + 1]):
            y = TOP + i * (CELL + 5)
            if i == t or is_kept:
                for j, value in enumerate(step[name][0].tolist()):
                    fill = colour_of(value, most, "attention" if name == "S" else "value")[0]
                    parts.append(
                        f'<rect x="{x + j * CELL}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{fill}"/>'
                    )
            box = f'x="{x - 2}" y="{y - 2}" width="{width * CELL + 3}" height="{CELL + 3}"'
            if i == t:
                parts.append(f'<rect {box} fill="none" stroke="#1b1f24" stroke-width="2"/>')
            elif is_kept:
                parts.append(f'<rect {box} fill="url(#hatch)" stroke="#57606a"/>')
            else:
                parts.append(f'<rect {box} fill="none" stroke="#8c959f" stroke-dasharray="3 3"/>')
        x += width * CELL + 22
    sizes = {name: step.size for name, step in steps[t].items()}
    kept, read = (n * (sizes["K"] + sizes["V"]) for n in (1, t))
    thrown = sum(sizes.values()) - sizes["X"] - sizes["Y"] - kept
    y = TOP + len(WORDS) * (CELL + 5) + 18
    computed = kept + thrown + sizes["Y"]
    lines = [f"Step {t + 1}, “{WORDS[t]}”: {computed} numbers are computed, and {read} are read from the cache."]
    lines += [f"{kept} are kept (K, V), {thrown} are thrown away (Q, S, H), {sizes['Y']} are the result Y."]
    parts += [f'<text x="{LEFT}" y="{y + 18 * i}">{escape(line)}</text>' for i, line in enumerate(lines)]
    return parts


def draw_animation() -> str:
    """The steps of decoding as an SVG that shows one after the other."""
    steps = record_steps()
    widths = {name: len(WORDS) if name == "S" else row.shape[1] for name, row in steps[0].items()}
    formulas = {"X": "input", "Q": "X W_Q", "K": "X W_K", "V": "X W_V", "S": "softmax", "H": "S V", "Y": "H W_O"}
    parts, x = [], LEFT
    for name, width in widths.items():
        parts.append(
            f'<text class="title" x="{x}" y="24">{name}</text><text class="note" x="{x}" y="42">{formulas[name]}</text>'
        )
        x += width * CELL + 22
    for i, word in enumerate(WORDS):
        parts.append(f'<text x="{LEFT - 10}" y="{TOP + i * (CELL + 5) + 10}" text-anchor="end">{escape(word)}</text>')
    for t in range(len(WORDS)):
        delay = (t - len(WORDS)) * SECONDS
        parts += [f'<g class="step" style="animation-delay:{delay:g}s">', *draw_step(steps, t), "</g>"]
    height = TOP + len(WORDS) * (CELL + 5) + 78
    legend = [
        ("none", "#1b1f24", 'stroke-width="2"', "computed in this step"),
        ("url(#hatch)", "#57606a", "", "kept in the cache"),
    ]
    legend.append(("none", "#8c959f", 'stroke-dasharray="3 3"', "thrown away"))
    for i, (fill, stroke, more, text) in enumerate(legend):
        left = LEFT + i * 190
        parts.append(
            f'<rect x="{left}" y="{height - 22}" width="26" height="13" fill="{fill}" stroke="{stroke}" {more}/>'
        )
        parts.append(f'<text class="note" x="{left + 34}" y="{height - 11}">{text}</text>')
    hatch = '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    hatch += '<line x1="0" y1="0" x2="0" y2="5" stroke="#1b1f24" stroke-opacity=".45" stroke-width="1.6"/></pattern>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x + 10} {height}" role="img">'
    title = "<title>Decoding with a cache: one row of each matrix is computed, rows of K and V are kept</title>"
    return "\n".join(
        [
            head,
            title,
            f"<style>{STYLE}</style><defs>{hatch}</defs>",
            '<rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def photograph_page() -> None:
    """Two screenshots of the walkthrough page: a row that is pointed at, and a step of decoding."""
    from selenium import webdriver
    from selenium.webdriver.common.by import By

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{switch}")
    with tempfile.TemporaryDirectory() as folder:
        mha = tg.nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
        x = np.random.default_rng(0).standard_normal((len(WORDS), 5))
        page = tg.walkthrough(mha, x, tokens=WORDS).save(Path(folder) / "page.html")
        chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            size = {"width": 1100, "height": 840, "deviceScaleFactor": 1, "mobile": False}
            chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            chrome.get(page.as_uri())
            chrome.find_elements(By.CSS_SELECTOR, "#map button.step")[7].click()  # H = S @ V
            row = chrome.find_elements(By.CSS_SELECTOR, "#equations .result .vector")[2]
            webdriver.ActionChains(chrome).move_to_element(row).perform()
            chrome.save_screenshot(str(IMAGES / "page_row.png"))
            slider = chrome.find_element(By.ID, "decode")
            chrome.execute_script("arguments[0].value = 4; arguments[0].dispatchEvent(new Event('input'))", slider)
            chrome.save_screenshot(str(IMAGES / "page_decoding.png"))
        finally:
            chrome.quit()


if __name__ == "__main__":
    (IMAGES / "decoding.svg").write_text(draw_animation(), encoding="utf-8", newline="\n")
    photograph_page()
