"""What the site adds to the pages of this folder: README.md and its like, examples, notebooks, and the API reference.

mkdocs calls the functions whose names begin with `on_`; see mkdocs.yml.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": ROOT / "README.md",
    "zh/index.md": ROOT / "README.zh.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
}

# The modules that the API reference documents, each on a page of its own, and their titles. A name that several of them
# export is documented under the first.
REFERENCE = {
    "tinygrad_mha": "tinygrad_mha: tensors, gradients, generation",
    "tinygrad_mha.ops": "ops: operations",
    "tinygrad_mha.nn": "nn: modules, attention, GPT",
    "tinygrad_mha.optim": "optim: optimizers",
    "tinygrad_mha.data": "data: texts and tokenizers",
    "tinygrad_mha.training": "training: runs",
    "tinygrad_mha.check": "check: checks",
    "tinygrad_mha.viz": "viz: pictures and pages",
    "tinygrad_mha.decoding": "decoding: sampling and beam search",
    "tinygrad_mha.files": "files: reading and writing",
    "tinygrad_mha.kernels": "kernels: what training spends its time on",
}

# What a page may not load, because the site is read without a network. Links that a reader clicks are no resources.
REMOTE = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\ssrc=["']?(?:https?:)?//[^>]*>|
    <link\b(?![^>]*rel=["']?(?:canonical|next|prev))[^>]*href=["']?(?:https?:)?//[^>]*>|@import[^;]*//[^;]*;""",
    re.VERBOSE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files, and the examples and notebooks as files to read."""
    for page, path in PAGES.items():
        files.append(File.generated(config, page, content=move_links(path.read_text(encoding="utf-8"), page)))
    for module, page in write_reference().items():
        files.append(File.generated(config, f"reference/{name_page(module)}", content=page))
    for path in sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside of this folder, as they are in the repository, lead to their copies in the site."""
    if not page.file.generated_by:
        up = "../" * page.file.src_uri.count("/")
        markdown = re.sub(r"\]\((\.\./)+((?:examples|notebooks)/[^)]*)\)", rf"]({up}\2)", markdown)
    return join_chinese_lines(markdown)


def join_chinese_lines(markdown: str) -> str:
    """A line feed between two Chinese characters would become a space; outside of code blocks it is left out."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)  # every second part is code
    parts[::2] = [
        re.sub(r"([\u3000-\u9fff\uff00-\uffef])\n(?=[\u3000-\u9fff\uff00-\uffef])", r"\1", p) for p in parts[::2]
    ]
    return "".join(parts)


def move_links(markdown: str, page: str) -> str:
    """The text of a file of the repository, with its links as they are from the page `page`: docs/x.md is x.md."""
    up = "../" * page.count("/")
    for made, path in PAGES.items():
        markdown = markdown.replace(f"]({path.name})", f"]({up}{made})")
    return re.sub(r"\]\((?:docs/|(?=examples/|notebooks/))", f"]({up}", markdown)


def name_page(module: str) -> str:
    return "index.md" if module == "tinygrad_mha" else module.removeprefix("tinygrad_mha.") + ".md"


def write_reference() -> dict[str, str]:
    """The Markdown of each page: the docstring of the module, and a directive of mkdocstrings for each public name."""
    pages: dict[str, str] = {}
    documented: dict[Any, str] = {}
    for path, title in REFERENCE.items():
        module = importlib.import_module(path)
        links, directives = [], []
        for name in sorted(module.__all__, key=str.lower):
            value, full = getattr(module, name), f"{path}.{name}"
            first = documented.setdefault(id(value) if callable(value) else full, full)
            if full in REFERENCE:
                links.append(f"- [`{full}`]({name_page(full)})")
            elif first != full:
                links.append(f"- `{full}` is [`{first}`][{first}]")
            else:
                directives.append(f"::: {full}")
        pages[path] = "\n\n".join([f"# {title}", (module.__doc__ or "").strip(), "\n".join(links), *directives, ""])
    return pages


class PlainText(griffe.Extension):
    """Docstrings are plain text: outside of `code` and examples, none of their characters is Markdown."""

    def on_instance(self, *, obj: griffe.Object, **options: Any) -> None:
        if obj.docstring:
            text = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )  # as mkdocstrings calls it
            obj.docstring.value = escape_text(text)


def escape_text(docstring: str) -> str:
    lines, example = [], False
    for line in docstring.split("\n"):
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            argument, text = re.fullmatch(r"(\s*\**\w+(?:, \w+)*:)?(.*)", line).groups("")
            argument = argument.replace(", ", ",\u00a0")  # several names, not a name and its type
            parts = re.split(r"(`[^`]*`)", text)  # every second part is code
            parts[::2] = [re.sub(r"([*_\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
            line = argument + "".join(parts)
        lines.append(line)
    return "\n".join(lines)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page loads something from the network, or if a public name is not documented."""
    site = Path(config.site_dir)
    for path in sorted(site.rglob("*.html")):
        found = REMOTE.search(path.read_text(encoding="utf-8"))
        if found:
            raise PluginError(f"{path.relative_to(site)} loads from the network: {found[0][:200]}")
    for module, page in write_reference().items():
        html = (site / "reference" / name_page(module)).with_suffix(".html").read_text(encoding="utf-8")
        missing = [name for name in re.findall("^::: (.*)$", page, re.MULTILINE) if f'id="{name}"' not in html]
        if missing:
            raise PluginError(f"public names without a docstring: {', '.join(missing)}")
