"""`python -m tinygrad_mha` runs the command line `tinygrad-mha`."""

import sys

from tinygrad_mha.cli import main

sys.exit(main())
