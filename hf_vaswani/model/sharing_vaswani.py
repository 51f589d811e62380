"""Models and tokenizers that several threads use at the same time."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

# Held while a tokenizer is called, because calls change its settings, and while a model changes its mode. Pipelines
# can share tokenizers and models, so they share the lock. Translation itself runs without it. The thread that holds it
# can take it again, because a fork takes it, and a tokenizer may fork.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A worker that is forked to read a dataset must not inherit a tokenizer that another thread is calling.
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


_ENDS = threading.local()


@contextmanager
def ended_by(check: Callable[[], object]) -> Iterator[None]:
    """
    Lets this thread end long work beside the search, such as alignments, within the block.

    Args:
        check (`Callable[[], object]`): called every few milliseconds; it raises the error that ends the work.
    """
    before, _ENDS.check = getattr(_ENDS, "check", None), check
    try:
        yield
    finally:
        _ENDS.check = before


def end_if_over() -> None:
    """Raises the error of [`ended_by`] if the work of this thread is to end."""
    if (check := getattr(_ENDS, "check", None)) is not None:
        check()


@dataclass
class _Use:
    """The threads in [`evaluation_mode`] of one model, and its modules that they found in training mode."""

    threads: int = 0
    in_training: list[torch.nn.Module] = field(default_factory=list)


IN_USE: defaultdict[torch.nn.Module, _Use] = defaultdict(_Use)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Puts a model in evaluation mode. The last of several threads to leave gives its modules their modes back."""
    with LOCK:
        use = IN_USE[model]
        use.threads += 1
        use.in_training += [module for module in model.modules() if module.training]
        model.eval()
    try:
        yield
    finally:
        with LOCK:
            use.threads -= 1
            if not use.threads:
                del IN_USE[model]
                for module in use.in_training:
                    module.training = True
