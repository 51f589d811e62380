"""A saved folder loads where this package cannot be imported, and only with trust_remote_code=True."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, pipeline

from hf_vaswani import (
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniTranslationPipeline,
)
from hf_vaswani.model import configuration_vaswani
from hf_vaswani.model.configuration_vaswani import AUTO_MAP, AUTO_MAP_OF_HEADS, travelling_files

from ..conftest import ROOT
from ..networks import tiny_config

IDS = torch.arange(4, 12)[None]
SENTENCE = "one two three"
TRAVELLING = {path.name for path in travelling_files(AUTO_MAP)}
WITH_HEADS = {path.name for path in travelling_files(AUTO_MAP_OF_HEADS)}

# Run where `import hf_vaswani` fails; says what it got as JSON.
STRANGER = """
import json, sys
sys.modules["hf_vaswani"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForTextEncoding, pipeline
folder, ids, sentence = sys.argv[1], torch.tensor(json.loads(sys.argv[2])), sys.argv[3]
trust = {"trust_remote_code": True}
model = AutoModelForSeq2SeqLM.from_pretrained(folder, **trust)
translators = [
    pipeline("translation", model=folder, **trust),
    pipeline("translation_en_to_de", model=folder, **trust),
    pipeline("translation", model=folder, config=model.config, **trust),
    pipeline(model=folder, **trust),
]
try:
    AutoModelForCausalLM.from_pretrained(folder, **trust)
except ValueError as error:
    refused = str(error)
model.generate(ids, max_new_tokens=1)
model.save_pretrained(sys.argv[4] + "/model")
translators[0].save_pretrained(sys.argv[4] + "/pipeline")
(find_change,) = (module.find_change for name, module in sys.modules.items() if name.endswith(".cache_vaswani"))
print(json.dumps({
    "module": type(model).__module__,
    "logits": model(input_ids=ids, decoder_input_ids=ids).logits.tolist(),
    "base": AutoModel.from_pretrained(folder, **trust)(input_ids=ids, decoder_input_ids=ids)[0].tolist(),
    "encoder": AutoModelForTextEncoding.from_pretrained(folder, **trust)(ids)[0].tolist(),
    "texts": [translator(sentence, max_new_tokens=12)[0]["translation_text"] for translator in translators],
    "refused": refused,
    "task": translators[1].task,
    "fast": find_change(model) is None,
    "loss": model(input_ids=ids, labels=ids, epsilon_ls=0.1, loss_only=True).loss.item(),
    "files": [name.split(".")[-1] + ".py" for name in sys.modules if name.startswith("transformers_modules.")],
}))
"""


def run(program: str, *arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process and a cache of its own, away from the repository, offline."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=home,
        env=os.environ | {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"} | environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize("saved_by", ["model", "pipeline"])
def test_a_stranger_gets_the_same_logits_and_the_same_text(tiny_run, tmp_path, saved_by) -> None:
    translator = pipeline("translation", model=str(tiny_run / "model"))
    model, folder = translator.model, tmp_path / "saved"
    if saved_by == "pipeline":
        translator.save_pretrained(folder)
    else:
        model.save_pretrained(folder)
        translator.tokenizer.save_pretrained(folder)
    assert {path.name for path in folder.glob("*.py")} == TRAVELLING
    done = run(STRANGER, str(folder), json.dumps(IDS.tolist()), SENTENCE, str(tmp_path), home=tmp_path)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["module"].startswith("transformers_modules.")
    with torch.no_grad():
        whole = model(input_ids=IDS, decoder_input_ids=IDS, output_hidden_states=True)
    assert got["logits"] == whole.logits.tolist()
    assert got["base"] == whole.decoder_hidden_states[-1].tolist()
    assert got["encoder"] == whole.encoder_last_hidden_state.tolist()
    assert got["texts"] == [translator(SENTENCE, max_new_tokens=12)[0]["translation_text"]] * 4
    assert got["task"] == "translation_en_to_de"
    assert "Unrecognized configuration class" in got["refused"]
    assert got["fast"]
    assert got["loss"] == model(input_ids=IDS, labels=IDS, epsilon_ls=0.1, loss_only=True).loss.item()
    # All code came with the folder, the kernels of the loss among it.
    assert set(got["files"]) >= TRAVELLING >= {"modeling_vaswani.py", "kernels_vaswani.py"}
    # What the stranger saved is as good as the first folder.
    for again in ("model", "pipeline"):
        assert {path.name for path in (tmp_path / again).glob("*.py")} == TRAVELLING
        config = json.loads((tmp_path / again / "config.json").read_text("utf-8"))
        assert config["auto_map"] == AUTO_MAP
        assert list(config["custom_pipelines"]) == ["translation"]
        reloaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / again)
        assert reloaded(input_ids=IDS, decoder_input_ids=IDS).logits.tolist() == got["logits"]


@pytest.mark.process
@pytest.mark.parametrize("what", ["a subclass", "a config"])
def test_whatever_is_saved_has_the_files_that_it_names(tmp_path, what) -> None:
    """A class of a script cannot travel, but what it was made of can."""
    program = (
        "from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration as Model\n"
        "class Mine(Model): pass\n"
        "config = VaswaniConfig(vocab_size=9, d_model=8, d_ff=8, num_heads=2, encoder_layers=1, decoder_layers=1)\n"
        f"(Mine(config) if {what == 'a subclass'} else config).save_pretrained('saved')"
    )
    done = run(program, home=tmp_path)
    assert done.returncode == 0 and "WARNING" not in done.stderr and "can't save" not in done.stderr, done.stderr
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == TRAVELLING
    program = (
        "import sys; sys.modules['hf_vaswani'] = None\n"
        "from transformers import AutoConfig, AutoModelForSeq2SeqLM as Auto\n"
        "trust = {'trust_remote_code': True}\n"
        "config = AutoConfig.from_pretrained('saved', **trust)\n"
        + {
            "a subclass": "print(Auto.from_pretrained('saved', **trust).num_parameters())",
            "a config": "print(Auto.from_config(config, **trust).num_parameters())",
        }[what]
    )
    done = run(program, home=tmp_path)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) > 500, done.stderr


def test_the_copies_are_writable_where_the_package_is_not(tmp_path, monkeypatch) -> None:
    package = tmp_path / "package"
    shutil.copytree(ROOT / "hf_vaswani", package)
    for path in (package / "model").glob("*.py"):
        path.chmod(0o444)
    monkeypatch.setattr(configuration_vaswani, "__file__", str(package / "model" / "configuration_vaswani.py"))
    configuration_vaswani.VaswaniConfig().save_pretrained(tmp_path / "saved")
    copies = list((tmp_path / "saved").glob("*.py"))
    assert {path.name for path in copies} == TRAVELLING
    assert all(path.stat().st_mode & 0o200 for path in copies)


@pytest.mark.parametrize("trust_remote_code", [None, False, True])
def test_with_the_package_the_folder_needs_no_trust(tiny_run, trust_remote_code) -> None:
    translator = pipeline("translation", model=str(tiny_run / "model"), trust_remote_code=trust_remote_code)
    assert type(translator.model) is VaswaniForConditionalGeneration
    # Not the folder's own.
    assert isinstance(translator, VaswaniTranslationPipeline)
    assert not hasattr(translator.model.config, "custom_pipelines")
    decoder = AutoModelForCausalLM.from_pretrained(tiny_run / "model", trust_remote_code=trust_remote_code)
    assert type(decoder) is VaswaniForCausalLM


@pytest.mark.process
def test_without_trust_and_without_the_package_no_code_runs(tiny_run, tmp_path) -> None:
    VaswaniForConditionalGeneration.from_pretrained(tiny_run / "model").save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "saved").glob("*.py"):
        path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + path.read_text("utf-8"), encoding="utf-8")
    for call in ("AutoModelForSeq2SeqLM.from_pretrained(folder)", "pipeline('translation', model=folder)"):
        program = (
            "import sys; sys.modules['hf_vaswani'] = None; folder = sys.argv[1]\n"
            f"from transformers import AutoModelForSeq2SeqLM, pipeline\n{call}"
        )
        done = run(program, str(tmp_path / "saved"), home=tmp_path)
        assert done.returncode == 1 and "trust_remote_code=True" in done.stderr.splitlines()[-1], done.stderr
        assert not (tmp_path / "ran").exists()


@pytest.mark.process
def test_the_family_travels_too(tmp_path) -> None:
    kinds = {
        "AutoModelForMaskedLM": VaswaniForMaskedLM,
        "AutoModelForPreTraining": VaswaniForPreTraining,
        "AutoModelForCausalLM": VaswaniForCausalLM,
        "AutoModelForSequenceClassification": VaswaniForSequenceClassification,
        "AutoModelForTokenClassification": VaswaniForTokenClassification,
        "AutoModelForTextEncoding": VaswaniEncoderModel,
    }
    expected = {}
    for name, kind in kinds.items():
        model = kind(tiny_config()).eval()
        model.save_pretrained(tmp_path / name)
        assert {path.name for path in (tmp_path / name).glob("*.py")} == WITH_HEADS
        assert "custom_pipelines" not in json.loads((tmp_path / name / "config.json").read_text("utf-8"))
        expected[name] = model(IDS)[0].tolist()
        if kind is VaswaniForCausalLM:
            written = model.generate(IDS, max_new_tokens=5).tolist()
    program = (
        "import json, sys, torch, transformers; sys.modules['hf_vaswani'] = None\n"
        "ids = torch.tensor(json.loads(sys.argv[1]))\n"
        "load = lambda name: getattr(transformers, name).from_pretrained(name, trust_remote_code=True)\n"
        "models = {name: load(name) for name in sys.argv[2:]}\n"
        "gpt = models['AutoModelForCausalLM']\n"
        "written = gpt.generate(ids, max_new_tokens=5).tolist()\n"
        "cache = next(name for name in sys.modules if name.endswith('.cache_vaswani'))\n"
        "written = written, sys.modules[cache].find_change(gpt) is None\n"
        "print(json.dumps([{name: model(ids)[0].tolist() for name, model in models.items()}, *written]))"
    )
    done = run(program, json.dumps(IDS.tolist()), *kinds, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [expected, written, True]


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_processes_load_at_once_what_one_has_loaded_before(tiny_run, tmp_path) -> None:
    """Into an empty cache transformers copies each file in place, and another process may find half of it."""
    VaswaniForConditionalGeneration.from_pretrained(tiny_run / "model").save_pretrained(tmp_path / "saved")
    program = (
        "import sys, torch; sys.modules['hf_vaswani'] = None\n"
        "from multiprocessing import get_context\n"
        "from transformers import AutoModelForSeq2SeqLM\n"
        "fork = get_context('fork'); four = fork.Barrier(4)\n"
        "def load(barrier=None):\n"
        "    if barrier: barrier.wait()\n"
        "    AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "alone, together = [fork.Process(target=load)], [fork.Process(target=load, args=(four,)) for _ in range(4)]\n"
        "for processes in (alone, together):\n"
        "    for process in processes: process.start()\n"
        "    for process in processes: process.join()\n"
        "    assert not any(process.exitcode for process in processes)\n"
    )
    done = run(program, str(tmp_path / "saved"), home=tmp_path)
    assert done.returncode == 0, done.stderr
