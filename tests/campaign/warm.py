"""Work done once, before children are forked."""

import functools

from docstring_parser.attrdoc import AttributeDocstrings

from hf_vaswani.recipe_file import load_recipe

# Reading a recipe parses the docstrings of its sections, which takes half a second.
_read = AttributeDocstrings.get_attr_docs
_once = functools.cache(lambda component: _read(AttributeDocstrings(), component))
AttributeDocstrings.get_attr_docs = lambda _, component: _once(component)
load_recipe(["--run_dir=warm"])
