"""The Transformer of "Attention Is All You Need" as a Hugging Face plug-in: importing it registers everything.

With `HF_VASWANI_TRANSLATION_TASK=0` in the environment (or `off`, `no`, `false`) the models are registered, and the
tasks of transformers stay as they are: `VaswaniTranslationPipeline(model, tokenizer)` is then the way to translate.
"""

import os
import re
import sys

# As long as Python looks for the module of `python -m`, that is the program's name: the command line starts here.
if sys.argv[:1] == ["-m"] and "hf_vaswani.cli" in sys.orig_argv:
    from hf_vaswani_start import before_imports

    before_imports()

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding, pipelines

from .model.configuration_vaswani import VaswaniConfig
from .model.modeling_vaswani import VaswaniEncoderModel, VaswaniForConditionalGeneration, VaswaniModel
from .model.pipeline_vaswani import VaswaniTranslationPipeline

__version__ = "0.1.0"
__all__ = [
    "VaswaniConfig",
    "VaswaniEncoderModel",
    "VaswaniForConditionalGeneration",
    "VaswaniModel",
    "VaswaniTranslationPipeline",
]

AutoConfig.register("vaswani", VaswaniConfig, exist_ok=True)
AutoModel.register(VaswaniConfig, VaswaniModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration, exist_ok=True)
AutoModelForTextEncoding.register(VaswaniConfig, VaswaniEncoderModel, exist_ok=True)


class _TranslationAliases(dict[str, str]):
    """The pipeline aliases of transformers, and `translation_xx_to_yy` for every pair of languages."""

    def __contains__(self, task: object) -> bool:
        pair = isinstance(task, str) and re.fullmatch(r"translation_[^_]+_to_[^_]+", task) is not None
        return pair or super().__contains__(task)

    def __missing__(self, task: str) -> str:
        if task in self:
            return "translation"
        raise KeyError(task)


def _register_translation_task() -> None:
    """Gives transformers its `translation` task back; a transformers that still has the task keeps its own."""
    # Since 5.19 transformers refuses the tasks that it dropped by name, before it asks the registry.
    getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)
    registry = pipelines.PIPELINE_REGISTRY
    if "translation" in registry.supported_tasks:
        return
    registry.register_pipeline(
        "translation", pipeline_class=VaswaniTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
    )
    # By this mark a pipeline writes itself into any model that it saves: a Marian would then need trust_remote_code.
    del VaswaniTranslationPipeline._registered_impl
    registry.task_aliases = _TranslationAliases(registry.task_aliases)


if os.environ.get("HF_VASWANI_TRANSLATION_TASK", "").strip().lower() not in {"0", "off", "no", "false"}:
    _register_translation_task()
