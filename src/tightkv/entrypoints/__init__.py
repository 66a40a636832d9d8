"""Modules that are run with `python -m`, under the names that other engines gave them."""
