"""Runs JavaScript in Node.js with the library that translates there, for tests that compare it with ours."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

# Where `make test-browser` installs it; another folder with `node_modules` can be given.
FOLDER = Path(os.environ.get("HF_VASWANI_JAVASCRIPT", Path(__file__).parent.parent / ".venv" / "javascript"))
NODE = shutil.which("node")
# In front of each script, which writes `found`.
BEGIN = """
import { createRequire } from "node:module";
import fs from "node:fs";
const { given, library } = JSON.parse(fs.readFileSync(0));
const { AutoTokenizer, env, pipeline } = createRequire(library + "/")("@huggingface/transformers");
env.allowRemoteModels = false;
let found;
"""
END = "\nfs.writeSync(1, JSON.stringify(found));\n"


def in_node(script: str, **given: Any) -> Any:
    """
    Returns what a script assigns to `found`. The test is skipped without Node.js or the library.

    Args:
        script (`str`): lines of a module, in which `AutoTokenizer`, `env` and `pipeline` are the library's.
        given: values that it finds under `given`.
    """
    if NODE is None:
        pytest.skip("needs Node.js, and there is none")
    if not (FOLDER / "node_modules" / "@huggingface" / "transformers").is_dir():
        pytest.skip(f"needs @huggingface/transformers in {FOLDER}, which `make test-browser` installs")
    done = subprocess.run(
        [NODE, "--input-type=module", "--eval", BEGIN + script + END],
        input=json.dumps({"given": given, "library": str(FOLDER.resolve())}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
