"""Requests to the Hub failing in every way: the Hub has the old state or the new one, and the user gets an error.

The requests are those of an undisturbed push and of an undisturbed download, each failing once and for good.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.children import End, run
from tests.hub_server import Access, HubServer

from .judge import Campaign, broken_by
from .verbs import on_the_hub

TOKEN, NAME = "hf_write", "alice/m"
WAYS = {str(status): {"status": status, "message": "A message."} for status in (500, 503, 401, 403, 404, 409, 429)} | {
    "no connection": {"cut": 0},
    "answer lost": {"lose_answer": True},
    "answer cut": {"cut_answer": 10},
    "garbage": {"status": 200, "message": '{"a": [', "headers": {"Content-Type": "application/json"}},
    "another page": {"status": 200, "message": "<html>Log in!</html>", "headers": {"Content-Type": "text/html"}},
    "other JSON": {"status": 200, "message": "[]", "headers": {"Content-Type": "application/json"}},
    "slow": {"delay": 3},
}


def old_state(run_dir: Path) -> dict[str, bytes]:
    """Returns the files of an earlier push: another model of the same kind, with other code."""
    config = json.loads((run_dir / "model" / "config.json").read_text()) | {"d_ff": 48}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": b"old", "older_vaswani.py": b"old"}


def call(hub: HubServer, folder: Path, *arguments: str) -> End:
    """Runs a command with this Hub and an empty cache."""
    shutil.rmtree(folder / "home", ignore_errors=True)
    return run(folder / "out", on_the_hub, list(arguments), hub.environment(folder / "home", TOKEN))


def requests(hub: HubServer) -> list[tuple[str, str]]:
    """Returns the requests in a log, without the commit ids, which differ between Hubs."""
    commits = [commit for repository in hub.repositories.values() for commit in repository.commits]
    found = []
    for method, path, _ in hub.log:
        for commit in commits:
            path = path.split(commit)[-1] or path.split(commit)[0]
        found.append((method, path))
    return list(dict.fromkeys(found))


def faulty_hubs(
    campaign: Campaign, files: dict[str, bytes], asked: list[tuple[str, str]], harmless: str = ""
) -> Iterator[tuple[HubServer, str]]:
    """Yields Hubs with these files on which a request fails, and a description; a 404 for `harmless` is no error."""
    attacks = [(request, way, times) for request in asked for way in WAYS for times in (1, None)]
    if harmless:
        attacks = [each for each in attacks if each[1] != "404" or harmless not in each[0][1]]
    for request, way, times in campaign.drawn(attacks, 3, 60, by=lambda attack: attack[0]):
        with HubServer({TOKEN: Access("alice", "write")}) as hub:
            hub.commit(NAME, files)
            hub.fault(*request, times=times, **WAYS[way])
            yield hub, f"{' '.join(request)}: {way}, {'once' if times else 'for good'}"


def test_a_push_that_fails_leaves_the_old_state_or_the_new(campaign, tmp_path, tiny_run) -> None:
    command = ["push", str(tiny_run), "--repo-id", NAME]
    with HubServer({TOKEN: Access("alice", "write")}) as hub:
        hub.commit(NAME, old_state(tiny_run))
        assert call(hub, tmp_path, *command).code == 0
        new, asked = hub.files(NAME), requests(hub)
    assert len(asked) >= 6
    for hub, attack in faulty_hubs(campaign, old_state(tiny_run), asked):
        old = hub.files(NAME)
        end = call(hub, tmp_path, *command)
        there = hub.files(NAME)
        how = broken_by(end, result=None if there == new else "said to be published, but it is not")
        if how is None and there not in (old, new):
            how = f"a mixture of the old state and the new: {sorted(there)}"
        if campaign.note(f"push, {attack}", how):
            continue
        hub.clear_faults()
        end = call(hub, tmp_path, *command)
        other = None if hub.files(NAME) == new else "published something else"
        campaign.note(f"push, {attack}; then again", broken_by(end, (), other))


def test_a_download_that_fails_is_a_sentence_or_the_right_model(campaign, tmp_path, tiny_run) -> None:
    text = tiny_run.parent / "text.en"
    model = {path.name: path.read_bytes() for path in (tiny_run / "model").iterdir()}
    command = ["translate", "--model", NAME, str(text)]
    with HubServer({TOKEN: Access("alice", "write")}) as hub:
        hub.commit(NAME, model)
        right = call(hub, tmp_path, *command)
        asked = requests(hub)
    assert right.code == 0, right.err
    # A missing generation_config.json is no error, because it is optional.
    for hub, attack in faulty_hubs(campaign, model, asked, harmless="generation_config"):
        end = call(hub, tmp_path, *command)
        other = None if end.out == right.out else "another text, and no word"
        campaign.note(f"translate, {attack}", broken_by(end, result=other))
