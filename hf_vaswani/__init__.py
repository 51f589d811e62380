"""The Transformer of "Attention Is All You Need" as a Hugging Face plug-in.

Importing the package registers the models with transformers' Auto classes, and the tasks `translation`,
`summarization` and `text2text-generation`, which transformers 5 removed. With
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
)

from .model.configuration_vaswani import VaswaniConfig
from .model.generation_vaswani import FastSearchMixin
from .model.heads_vaswani import (
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)
from .model.modeling_vaswani import VaswaniEncoderModel, VaswaniForConditionalGeneration, VaswaniModel
from .model.pipeline_vaswani import VaswaniText2TextGenerationPipeline, VaswaniTranslationPipeline
from .removed_tasks import VaswaniSummarizationPipeline, restore_tasks
from .translation.alignment import Alignment, alignments
from .translation.budgets import search_limits
from .version import __version__

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
    "VaswaniSummarizationPipeline",
    "VaswaniText2TextGenerationPipeline",
    "VaswaniTranslationPipeline",
    "__version__",
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


def _at_home(name: str) -> Any:
    """Returns what a pipeline asks the package for. It is imported then."""
    if name == "markup":
        from .translation.placement import translator_with_markup

        return translator_with_markup
    from .conversion.engines import prepare_pipeline

    return prepare_pipeline


def _search_at_home(model: Any, input_ids: Any, generation_config: Any, inputs: Any) -> Any:
    """Searches on a GPU by CUDA graphs; returns `None` if the call is left to the search of the model's own code."""
    if input_ids.device.type != "cuda":
        return None
    from .translation.static_search import static_search

    return static_search(model, input_ids, generation_config, inputs)


VaswaniText2TextGenerationPipeline.at_home = staticmethod(_at_home)
VaswaniText2TextGenerationPipeline.limits = staticmethod(search_limits)
FastSearchMixin.at_home = staticmethod(_search_at_home)

if os.environ.get("HF_VASWANI_TRANSLATION_TASK", "").strip().lower() not in {"0", "off", "no", "false"}:
    restore_tasks()
