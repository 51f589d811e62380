"""The tasks that transformers 5 removed, with the names and places that their classes had in transformers 4.

Other libraries look for these: Gradio's `Interface.from_pipeline`, for one, asks for classes of
`transformers.pipelines.text2text_generation`, and for pipelines whose class is of that module.
"""

import importlib
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, pipelines

from .model.configuration_vaswani import PipelineTasks
from .model.pipeline_vaswani import Passage, VaswaniText2TextGenerationPipeline, VaswaniTranslationPipeline
from .model.sentences_vaswani import Parts

MODULE = "transformers.pipelines.text2text_generation"
# Modules that Gradio reads as attributes of `transformers.pipelines`, which has them once they are imported.
READ_BY_GRADIO = ("text_classification", "token_classification", "object_detection")


class VaswaniSummarizationPipeline(VaswaniText2TextGenerationPipeline):
    """Summarizes text as [`VaswaniText2TextGenerationPipeline`], into `summary_text` or `summary_token_ids`."""

    return_name = "summary"


class Text2TextGenerationPipeline(VaswaniText2TextGenerationPipeline):
    """
    [`VaswaniText2TextGenerationPipeline`] by its name in transformers 4. A subclass may have a `_forward` as it was
    there, which gets the arguments of `generate()` and returns `output_ids` of shape `(batch, candidates, target)`.
    """

    __module__ = MODULE

    def check_inputs(self, *args: Any, **kwargs: Any) -> bool:
        """Returns `True`: no length of a source and a translation is too strange to be translated."""
        return True

    def preprocess(self, *args: Any, **settings: Any) -> dict[str, Any]:
        """Returns a text as the pipeline reads it, or as transformers 4 did for a subclass with another `_forward`."""
        forward = inspect.unwrap(type(self)._forward)
        # One that calls this pipeline's own gets what that reads.
        if forward is VaswaniText2TextGenerationPipeline._forward or "super" in forward.__code__.co_names:
            return super().preprocess(*args, **settings)
        if settings.get("split_sentences"):
            raise ValueError(f"split_sentences=True is not supported with the _forward of {type(self).__name__}.")
        passage: Passage = super().preprocess(*args, **settings | {"is_whole": True})["passage"]
        # It reads what has no words, too.
        ids = torch.tensor(passage.ids or self.tokenizer(passage.parts.sources)["input_ids"])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **passage.language}

    def postprocess(self, model_outputs: dict[str, Any], *args: Any, **settings: Any) -> Any:
        """Decodes the translations of one text."""
        if "output_ids" in model_outputs:
            if settings.get("in_parts"):
                raise ValueError(f"markup is not supported with the _forward of {type(self).__name__}.")
            ids = model_outputs["output_ids"].reshape(-1, model_outputs["output_ids"].shape[-1])
            model_outputs = {"passage": Passage(Parts("", "", [(0, 0)]), [None], [ids])}
        return super().postprocess(model_outputs, *args, **settings)


class SummarizationPipeline(VaswaniSummarizationPipeline, Text2TextGenerationPipeline):
    """[`VaswaniSummarizationPipeline`] by its name in transformers 4."""

    __module__ = MODULE


class TranslationPipeline(VaswaniTranslationPipeline, Text2TextGenerationPipeline):
    """[`VaswaniTranslationPipeline`] by its name in transformers 4."""

    __module__ = MODULE


TASKS: dict[str, type[Any]] = {
    "text2text-generation": Text2TextGenerationPipeline,
    "summarization": SummarizationPipeline,
    "translation": TranslationPipeline,
}


def transformers_modules() -> list[Any]:
    """
    Returns transformers as all modules know it. It replaces itself while it loads its pipelines, so that who imported
    it before has another object.
    """
    known = [transformers]
    for module in list(sys.modules.values()):
        found = getattr(module, "__dict__", {}).get("transformers")
        if isinstance(found, type(transformers)) and not any(found is each for each in known):
            known.append(found)
    return known


def restore_tasks() -> None:
    """Registers the tasks and names their classes. A version of transformers that has a task or name keeps its own."""
    if MODULE not in sys.modules and importlib.util.find_spec(MODULE) is None:
        module: Any = ModuleType(MODULE, "The classes of hf_vaswani, by their names in transformers 4.")
        # Found by `importlib` where modules are looked up by name.
        module.__spec__ = importlib.util.spec_from_loader(MODULE, loader=None)
        sys.modules[MODULE] = pipelines.text2text_generation = module
    for name in (*READ_BY_GRADIO, "text2text_generation"):
        importlib.import_module(f"transformers.pipelines.{name}")
    registry = pipelines.PIPELINE_REGISTRY
    for task, kind in TASKS.items():
        # Since 5.19 transformers refuses the tasks that it removed by name, before it looks into the registry.
        getattr(pipelines, "REMOVED_TASKS", {}).pop(task, None)
        for place in (*transformers_modules(), pipelines, sys.modules[MODULE]):
            if not hasattr(place, kind.__name__):
                setattr(place, kind.__name__, kind)
        if task in registry.supported_tasks:
            continue
        registry.register_pipeline(task, pipeline_class=kind, pt_model=AutoModelForSeq2SeqLM, type="text")
        # With this attribute the pipeline adds itself to every model that it saves: a Marian would need
        # trust_remote_code.
        del kind._registered_impl
        if task == "translation":
            registry.task_aliases = PipelineTasks(registry.task_aliases)
