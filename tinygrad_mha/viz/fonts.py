"""Which font draws Chinese text in plots, and in graphs that are PNG or PDF.

Windows and macOS have one; small Linux machines have no font at all. On Linux, the extras `plot` and `render` install
the package pylopdf-fonts-zh-cn (17 MB), which contains Noto Sans SC. Where there is no other font, graphs take Latin
letters and symbols from DejaVu Sans, which matplotlib contains, or from Noto Sans SC.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = [
    "CHINESE_FONTS",
    "chinese_font",
    "has_chinese",
    "lacks_chinese",
    "make_fontconfig",
    "symbol_fonts",
    "warn_of_boxes",
]

CHINESE_FONTS = """Noto Sans CJK SC,Noto Sans SC,Source Han Sans SC,PingFang SC,Hiragino Sans GB,Microsoft YaHei,SimHei,
    WenQuanYi Micro Hei,WenQuanYi Zen Hei,Noto Sans CJK JP,Noto Sans CJK TC,Droid Sans Fallback,Arial Unicode MS"""

SETTINGS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <include ignore_missing="yes">fonts.conf</include>
{folders}
</fontconfig>
"""


FOLDER = """\
  <dir>{folder}</dir>
  <selectfont><rejectfont><glob>{folder}/*</glob></rejectfont></selectfont>
  <selectfont><acceptfont><glob>{folder}/{family}</glob></acceptfont></selectfont>"""


def has_chinese(text: str) -> bool:
    """Whether the text has characters that fonts for Latin letters lack: Chinese, Japanese, Korean."""
    return any("\u2e80" <= c <= "\uffef" or c >= "\U00020000" for c in text)


def chinese_font() -> Path | None:
    """The file of Noto Sans SC in the package pylopdf-fonts-zh-cn; None without it."""
    try:
        from pylopdf_fonts_zh_cn import sans_path  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return Path(sans_path())


def symbol_fonts() -> Path | None:
    """The folder of DejaVu Sans in matplotlib, which has symbols that Noto Sans SC lacks: ᵀ, say; None without it."""
    spec = importlib.util.find_spec("matplotlib")
    return Path(spec.origin).parent / "mpl-data/fonts/ttf" if spec and spec.origin else None


def warn_of_boxes(stacklevel: int) -> None:
    """Say that Chinese text becomes boxes, and what to install."""
    warnings.warn(
        "no font with Chinese characters was found, so they are drawn as boxes: pip install pylopdf-fonts-zh-cn, "
        "or install a font such as Noto Sans CJK (the package fonts-noto-cjk of Debian and Ubuntu)",
        stacklevel=stacklevel + 1,
    )


def make_fontconfig(folder: Path) -> dict[str, str] | None:
    """The environment in which programs that use fontconfig find the fonts of the system and those of packages.

    Its settings are written into `folder`. None, the environment as it is: without that font, on systems that have one,
    and where FONTCONFIG_FILE names settings of the user's own.
    """
    font = chinese_font()
    if font is None or sys.platform != "linux" or "FONTCONFIG_FILE" in os.environ:
        return None
    file = folder / "with_chinese.conf"
    found = {"NotoSansSC*": font.parent, "DejaVuSans*": symbol_fonts()}
    folders = [FOLDER.format(folder=escape(str(path)), family=family) for family, path in found.items() if path]
    file.write_text(SETTINGS.format(folders="\n".join(folders)), encoding="utf-8")
    return {**os.environ, "FONTCONFIG_FILE": str(file)}


def lacks_chinese() -> bool:
    """Whether fontconfig knows no font with Chinese characters. False where its program fc-list is not installed."""
    program = shutil.which("fc-list")
    if program is None or chinese_font() is not None:
        return False
    listed = subprocess.run([program, ":lang=zh"], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return listed.returncode == 0 and not listed.stdout.strip()
