"""Draw the pictures of gallery.md: run its code blocks in the folder `gallery`."""

import os
import re
from pathlib import Path

here = Path(__file__).parent


def main() -> None:
    page = (here / "gallery.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    os.chdir(here / "gallery")
    exec(compile("\n".join(blocks), "gallery.md", "exec"), {})
    for path in sorted(Path().iterdir()):
        print(f"{path.stat().st_size:9,} bytes  {path}")


if __name__ == "__main__":
    main()
