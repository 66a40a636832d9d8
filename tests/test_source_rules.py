"""Rules that CONTRIBUTING.md states and that no linter of ours knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tightkv.formats.registry import KV_CACHE_DTYPES, UNSCALED_DTYPES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tightkv"
MODULES = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp"})

# "auto", "float16" and their like are strings of other options, too.
_FORMAT_STRINGS = {*KV_CACHE_DTYPES, "int4_per_token_head"} - {"auto", *UNSCALED_DTYPES}
_PYTHON_OR_TORCH = re.compile(r'#\s*include\s*[<"](Python\.h|nanobind|pybind11|torch|ATen|c10)')


def test_only_the_bindings_include_python_or_torch() -> None:
    including = [path.name for path in NATIVE if _PYTHON_OR_TORCH.search(path.read_text())]
    assert including == ["bindings.cpp"]


def test_files_are_short() -> None:
    too_long = {
        _name(path): lines
        for path in MODULES
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert not too_long, "split these files: 500 lines are the most"


def test_functions_are_short() -> None:
    too_long = {
        f"{_name(path)}:{node.lineno} {node.name}": length
        for path, node in _nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > 80
        and PACKAGE / "kernels" not in path.parents
    }
    assert not too_long, "split these functions: 80 lines are the most"


def test_format_strings_are_compared_in_the_registry_only() -> None:
    compared = [
        f"{_name(path)}:{node.lineno} {ast.unparse(node)}"
        for path, node in _nodes()
        if path != PACKAGE / "formats" / "registry.py"
        and isinstance(node, ast.Compare | ast.MatchValue)
        and _names_a_format(node)
    ]
    assert not compared, "ask the TensorFormat, or let formats/registry.py answer"


def test_readme_shows_every_package() -> None:
    readme = (ROOT / "README.md").read_text()
    packages = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    missing = [name for name in packages if not re.search(rf"\b{name}/", readme)]
    assert not missing, "name these folders in the tree of README.md"


def test_no_notes_of_work_left_to_do() -> None:
    note = re.compile(r"\b(TODO|FIXME)\b")
    assert not [_name(path) for path in MODULES + NATIVE if note.search(path.read_text())]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def _names_a_format(comparison: ast.Compare | ast.MatchValue) -> bool:
    """Whether a format's string is an operand, or any string and something `..cache_dtype`."""
    strings = {
        node.value
        for node in ast.walk(comparison)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return bool(strings & _FORMAT_STRINGS) or (
        bool(strings) and "cache_dtype" in ast.unparse(comparison)
    )
