"""
Puts small faults into the package, one at a time, and counts those that the tests notice.

    python tests/mutations.py [--count 40] [--seed 1] [--list] [-- COMMAND ...]

A fault is drawn at a random place: another comparison, a swapped sign, a number off by one, a negated condition, a
statement that is left out, a wrong key, `and` for `or`. Each is put into a copy of the repository, in which COMMAND
runs; it is caught if the command fails. By default that is the test file of the module, and then all of `make test`.
MUTATED in the environment of the command is the place, as in `hf_vaswani/metrics.py:12`.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SIGNS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}


@dataclass(frozen=True)
class Mutation:
    """A fault: the characters from `start` to `end` of a file replaced by `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    kind: str

    def describe(self, source: str) -> str:
        """Returns place, kind, and what is replaced by what, on one line."""
        before = " ".join(source[self.start : self.end].split())
        return f"{self.path}:{self.line} {self.kind}: {before[:60]} -> {self.text[:60]}"


class _Finder:
    """Lists the mutations of a file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self.tree = ast.parse(source)
        # Columns of ast count bytes.
        lines = source.encode().splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]

    def found(self) -> Iterator[Mutation]:
        """Yields every mutation."""
        for node in self._code(self.tree):
            yield from self._of(node)

    def _code(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the nodes that are executed: no docstrings, annotations, messages of errors, or imports for types."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if child in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                continue
            yield child
            yield from self._code(child)

    def _at(self, node: ast.expr | ast.stmt, text: str, kind: str) -> Mutation:
        start = self._characters(node.lineno, node.col_offset)
        end = self._characters(node.end_lineno or node.lineno, node.end_col_offset or 0)
        return Mutation(self.path, node.lineno, start, end, text, kind)

    def _characters(self, line: int, column: int) -> int:
        return len(self.source.encode()[: self.starts[line - 1] + column].decode())

    def _of(self, node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield self._at(node, f"({left}) {COMPARISONS[type(node.ops[0])]} ({right})", "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS and not isinstance(node.left, ast.Constant):
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            yield self._at(node, f"(({left}) {SIGNS[type(node.op)]} ({right}))", "sign")
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield self._at(node, f"({word.join(f'({ast.unparse(value)})' for value in node.values)})", "and, or")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield self._at(node, str(node.value + 1), "off by one")
        elif isinstance(node, ast.If | ast.While):
            yield self._at(node.test, f"not ({ast.unparse(node.test)})", "condition")
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and type(node.slice.value) is str
        ):
            yield self._at(node.slice, repr(node.slice.value + "_"), "key")
        elif isinstance(node, ast.Expr | ast.AugAssign):
            yield self._at(node, "pass", "dropped")


def draw(count: int, seed: int, root: Path = ROOT) -> list[Mutation]:
    """Draws mutations of the package; each line of code is as likely as any other, and no two share one."""
    places: dict[tuple[str, int], list[Mutation]] = {}
    for file in sorted((root / "hf_vaswani").rglob("*.py")):
        path = str(file.relative_to(root))
        for mutation in _Finder(path, file.read_text("utf-8")).found():
            places.setdefault((path, mutation.line), []).append(mutation)
    rng = random.Random(seed)
    return [rng.choice(places[place]) for place in rng.sample(sorted(places), count)]


def copy_repository(folder: Path, root: Path = ROOT) -> None:
    """Copies the files that git knows, and links what lies beside the repository."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


def apply(mutation: Mutation, folder: Path) -> None:
    """Writes the fault into the copy."""
    path = folder / mutation.path
    source = path.read_text("utf-8")
    path.write_text(source[: mutation.start] + mutation.text + source[mutation.end :], "utf-8")
    ast.parse(path.read_text("utf-8"))


def default_commands(mutation: Mutation) -> list[list[str]]:
    """Returns the test file of the module, if there is one, and then the whole of `make test`."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q"]
    path = Path(mutation.path).relative_to("hf_vaswani")
    test = Path("tests") / path.parent / f"test_{path.stem.removesuffix('_vaswani')}.py"
    own = [[*pytest, str(test)]] if (ROOT / test).is_file() else []
    return [*own, [*pytest, "-n", "2", "--dist", "loadfile"]]


def is_caught(mutation: Mutation, commands: list[list[str]], limit: float) -> bool:
    """Runs the commands in a copy with the fault, and returns whether one of them failed or hung."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "repository"
        folder.mkdir()
        copy_repository(folder)
        apply(mutation, folder)
        environment = os.environ | {
            "PYTHONPATH": str(folder),
            "OMP_NUM_THREADS": "1",
            "MUTATED": f"{mutation.path}:{mutation.line}",
        }
        for command in commands:
            try:
                done = subprocess.run(
                    command, cwd=folder, env=environment, capture_output=True, timeout=limit, check=False
                )
            except subprocess.TimeoutExpired:
                return True
            if done.returncode:
                return True
    return False


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="number of faults; default: 40")
    parser.add_argument("--seed", type=int, default=1, help="draws them; default: 1")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a command hangs; default: 1800")
    parser.add_argument("command", nargs="*", help="command to run; default: the module's own tests, then make test")
    options = parser.parse_args()
    caught = 0
    for number, mutation in enumerate(draw(options.count, options.seed), start=1):
        said = mutation.describe((ROOT / mutation.path).read_text("utf-8"))
        if not options.list:
            began = time.monotonic()
            found = is_caught(
                mutation, [options.command] if options.command else default_commands(mutation), options.limit
            )
            caught += found
            said = f"{'caught' if found else 'MISSED'} {time.monotonic() - began:4.0f} s  {said}"
        print(f"{number:3} {said}", flush=True)
    if not options.list:
        print(f"{caught} of {options.count} faults of seed {options.seed} were caught.")


if __name__ == "__main__":
    main()
