"""Draw the pictures in `gallery`: run the code of each page that shows one, and keep the pictures that it shows.

python docs/gallery.py [PAGE ...]
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main(*names: str) -> None:
    pages = [HERE / name for name in names] or sorted(HERE.rglob("*.md"))
    for page in pages:
        draw_pictures(page)


def draw_pictures(page: Path) -> None:
    """Run the code blocks of a page in an empty folder, if the page shows pictures of the gallery, and copy these."""
    text = page.read_text(encoding="utf-8")
    pictures = sorted(set(re.findall(r"\]\((?:\.\./)?gallery/([^)]*)\)", text)))
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if pictures:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n".join(blocks), page.name, "exec"), {})
        for name in pictures:
            if os.path.exists(name):  # another page may draw it
                shutil.copyfile(name, HERE / "gallery" / name)
                print(f"{os.path.getsize(name):9,} bytes  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
