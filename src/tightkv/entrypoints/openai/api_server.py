"""`tightkv serve` by vLLM's name, as in `python -m tightkv.entrypoints.openai.api_server`."""

from __future__ import annotations

import sys

from tightkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
