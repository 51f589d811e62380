"""The tasks and classes of transformers 4, as users and other libraries look for them."""

import importlib
import pickle
import subprocess
import sys
from typing import Any

import pytest
import transformers
from transformers import pipelines

import hf_vaswani
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.removed_tasks import MODULE

from .children import python
from .networks import tiny_model

# The type hints of pipeline() list the tasks that transformers brings itself.
pipeline: Any = pipelines.pipeline
TEXT = "abc cab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([TEXT], 20, kind="characters")
    model = tiny_model(3, vocab_size=tokenizer.vocab_size, eos=-1e4)
    model.generation_config.update(max_new_tokens=8, suppress_tokens=[0, 1, 2, 3])
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("task", "name", "key"),
    [
        ("translation", "TranslationPipeline", "translation"),
        ("summarization", "SummarizationPipeline", "summary"),
        ("text2text-generation", "Text2TextGenerationPipeline", "generated"),
    ],
)
def test_each_task_answers_as_in_transformers_4(folder, task, name, key) -> None:
    generator = pipeline(task, model=folder)
    for module in (transformers, pipelines, importlib.import_module(MODULE)):
        assert type(generator) is getattr(module, name)
    assert isinstance(generator, transformers.Text2TextGenerationPipeline)
    others = {"TranslationPipeline", "SummarizationPipeline"} - {name}
    assert not any(isinstance(generator, getattr(transformers, other)) for other in others)
    assert isinstance(generator, hf_vaswani.VaswaniText2TextGenerationPipeline)
    (text,) = hf_vaswani.VaswaniTranslationPipeline(generator.model, generator.tokenizer)(TEXT)
    expected = [{f"{key}_text": text["translation_text"]}]
    assert text["translation_text"]
    assert generator(TEXT) == generator([TEXT]) == expected
    assert generator(TEXT, split_sentences=True) == expected
    assert generator(TEXT, markup="placeholders") == expected
    (found,) = generator(TEXT, return_tensors=True)
    assert list(found) == [f"{key}_token_ids"]


@pytest.mark.process
def test_gradio_makes_an_interface_of_each_task(folder) -> None:
    program = f"""
import gradio, hf_vaswani
from transformers import pipeline
for task in ("translation", "summarization", "text2text-generation"):
    generator = pipeline(task, model={folder!r})
    interface = gradio.Interface.from_pipeline(generator)
    assert interface.fn({TEXT!r}) == next(iter(generator({TEXT!r})[0].values()))
"""
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    end = python("-c", program)
    assert end.code == 0, end.err


@pytest.mark.process
def test_classes_can_be_pickled_and_imported_by_their_old_names() -> None:
    kind = transformers.TranslationPipeline
    assert pickle.loads(pickle.dumps(kind)) is kind
    program = (
        "import hf_vaswani\n"
        "from transformers import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline\n"
        "from transformers.pipelines.text2text_generation import TranslationPipeline as same\n"
        "import transformers.pipelines.text2text_generation\n"
        "assert same is TranslationPipeline"
    )
    end = python("-c", program)
    assert end.code == 0, end.err


@pytest.mark.process
def test_no_name_is_changed_if_the_tasks_are_declined(monkeypatch) -> None:
    monkeypatch.setenv("HF_VASWANI_TRANSLATION_TASK", "0")
    program = (
        "import hf_vaswani, importlib.util, transformers\n"
        "assert not hasattr(transformers, 'TranslationPipeline')\n"
        "assert importlib.util.find_spec('transformers.pipelines.text2text_generation') is None"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
