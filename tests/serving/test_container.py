"""The files for containers, as far as they can be checked without Docker."""

import json
import re
import shlex
import tomllib

import yaml

from hf_vaswani.cli.main import _parser
from hf_vaswani.cli.serve import GRACE

from ..conftest import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["translate"]


def instructions(name: str) -> list[str]:
    return re.findall(rf"^\s*{name} (.+)$", DOCKERFILE, re.MULTILINE)


def test_the_image_has_what_the_build_needs() -> None:
    copied = [path for line in instructions("COPY") for path in line.split()[:-1]]
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for path in copied:
        assert (ROOT / path).exists() and f"!{path}" in allowed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {path.removeprefix("/") for path in build["include"]}
    assert needed <= set(copied)
    (install,) = (line for line in instructions("RUN") if line.startswith("pip install"))
    extras = re.search(r"\.\[([\w,]+)\]", install)[1].split(",")
    assert set(extras) <= project["project"]["optional-dependencies"].keys() and "serve" in extras
    assert "constraints.txt" in shlex.split(install)


def test_the_command_is_one() -> None:
    (entry,) = instructions("ENTRYPOINT")
    # The other is that of the health check.
    (command,) = (line for line in instructions("CMD") if line.startswith('["--'))
    start = json.loads(entry)
    assert start[0] == "hf-vaswani"
    for arguments in (json.loads(command), COMPOSE["command"]):
        options = _parser().parse_args([*start[1:], *arguments])
        assert options.host == "0.0.0.0" and options.model == ["/model"]
        assert f"EXPOSE {options.port}" in DOCKERFILE and f":{options.port}/health" in DOCKERFILE
        assert COMPOSE["ports"] == [f"127.0.0.1:{options.port}:{options.port}"]


def test_requests_have_time_to_finish() -> None:
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > GRACE
