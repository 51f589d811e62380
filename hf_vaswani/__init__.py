"""The Transformer of "Attention Is All You Need" as a Hugging Face plug-in.

Importing the package registers the models with transformers' Auto classes, and the `translation` task. With
`HF_VASWANI_TRANSLATION_TASK=0` in the environment (or `off`, `no`, `false`) transformers' tasks stay as they are: use
`VaswaniTranslationPipeline(model, tokenizer)` to translate.
"""

import os
import sys
from typing import Any

# The program's name is `-m` while Python looks for the module of `python -m`: the command line starts here.
if sys.argv[:1] == ["-m"] and "hf_vaswani.cli" in sys.orig_argv:
    from hf_vaswani_start import before_imports

    before_imports()

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    pipelines,
)

from .model.alignment_vaswani import Alignment, alignments
from .model.configuration_vaswani import PipelineTasks, VaswaniConfig
from .model.heads_vaswani import (
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)
from .model.modeling_vaswani import VaswaniEncoderModel, VaswaniForConditionalGeneration, VaswaniModel
from .model.pipeline_vaswani import VaswaniTranslationPipeline

__version__ = "0.1.0"
__all__ = [
    "Alignment",
    "VaswaniConfig",
    "VaswaniEncoderModel",
    "VaswaniForCausalLM",
    "VaswaniForConditionalGeneration",
    "VaswaniForMaskedLM",
    "VaswaniForPreTraining",
    "VaswaniForSequenceClassification",
    "VaswaniForTokenClassification",
    "VaswaniModel",
    "VaswaniTranslationPipeline",
    "alignments",
]

AutoConfig.register("vaswani", VaswaniConfig, exist_ok=True)
AutoModel.register(VaswaniConfig, VaswaniModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration, exist_ok=True)
AutoModelForTextEncoding.register(VaswaniConfig, VaswaniEncoderModel, exist_ok=True)
AutoModelForCausalLM.register(VaswaniConfig, VaswaniForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(VaswaniConfig, VaswaniForMaskedLM, exist_ok=True)
AutoModelForPreTraining.register(VaswaniConfig, VaswaniForPreTraining, exist_ok=True)
AutoModelForSequenceClassification.register(VaswaniConfig, VaswaniForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(VaswaniConfig, VaswaniForTokenClassification, exist_ok=True)


def _make_engine(*arguments: Any) -> Any:
    """Prepares an engine of a pipeline, see [`pipeline_engine`]."""
    # Engines are imported where one is asked for.
    from .conversion.engines import pipeline_engine

    return pipeline_engine(*arguments)


VaswaniTranslationPipeline.make_engine = staticmethod(_make_engine)


def _register_translation_task() -> None:
    """Registers the `translation` task, unless transformers has one of its own."""
    # Since 5.19 transformers refuses the tasks that it removed by name, before it looks into the registry.
    getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)
    registry = pipelines.PIPELINE_REGISTRY
    if "translation" in registry.supported_tasks:
        return
    registry.register_pipeline(
        "translation", pipeline_class=VaswaniTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
    )
    # With this attribute the pipeline adds itself to every model that it saves: a Marian would need trust_remote_code.
    del VaswaniTranslationPipeline._registered_impl
    registry.task_aliases = PipelineTasks(registry.task_aliases)


if os.environ.get("HF_VASWANI_TRANSLATION_TASK", "").strip().lower() not in {"0", "off", "no", "false"}:
    _register_translation_task()
