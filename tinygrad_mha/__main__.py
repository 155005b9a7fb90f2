"""`python -m tinygrad_mha` is `tinygrad-mha`."""

import sys

from tinygrad_mha.cli import main

sys.exit(main())
