"""`python -m tightkv` is `tightkv`."""

import sys

from tightkv.cli.main import main

sys.exit(main())
