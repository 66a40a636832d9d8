"""The command line: `tightkv generate` and what follows."""
