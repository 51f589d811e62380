"""The faults of `tests/mutations.py` are faults: code that parses, and is not what it was."""

import ast

import pytest

from .conftest import ROOT
from .mutations import Mutation, _Finder, default_commands, draw


def faults(source: str) -> set[str]:
    """The lines of a file with each of its faults."""
    found = _Finder("x.py", source).found()
    return {source[: each.start] + each.text + source[each.end :] for each in found}


def test_every_kind_of_fault() -> None:
    assert faults("if a < b:\n    pass\n") == {"if not (a < b):\n    pass\n", "if (a) <= (b):\n    pass\n"}
    assert faults("c = 'ä' if d else e - 2\n") == {"c = 'ä' if d else ((e) + (2))\n", "c = 'ä' if d else e - 3\n"}
    assert faults("x = a and b\n") == {"x = ((a) or (b))\n"}
    assert faults("y = z['key']\nw()\n") == {"y = z['key_']\nw()\n", "y = z['key']\npass\n"}
    # Words for people, types and imports are left alone.
    assert not faults('"""Text 1."""\nimport a\nb: int\nraise ValueError(f"{1 + 1} of {c}")\n')


@pytest.mark.slow
def test_faults_of_the_package_parse_and_change_it() -> None:
    drawn = draw(60, seed=7)
    assert len({(each.path, each.line) for each in drawn}) == 60 and drawn == draw(60, seed=7)
    for each in drawn:
        source = (ROOT / each.path).read_text("utf-8")
        changed = source[: each.start] + each.text + source[each.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), each


def test_the_tests_of_the_module_come_first() -> None:
    own, everything = default_commands(Mutation("hf_vaswani/model/search_vaswani.py", 1, 0, 1, "", "sign"))
    assert own[-1] == "tests/model/test_search.py" and "-n" in everything
