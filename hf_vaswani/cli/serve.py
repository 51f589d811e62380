"""The verb that serves models to other programs: serve."""

import argparse
import asyncio
import atexit
import logging
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..extras import extra
from .inputs import (
    add_device,
    add_revision,
    add_search,
    check_counts,
    choose_device,
    load_models,
    require_file,
    set_beams,
    text_lines,
)

logger = logging.getLogger("hf_vaswani")

DIRECTION = re.compile(r"(\w+)-(\w+)")
# In seconds, in which the process ends after SIGTERM. All but the last few are for running requests.
GRACE, LAST = 60, 5
# Connections and requests of a worker at a time.
MAX_CONNECTIONS = 2000
# In seconds, after which a worker that does not answer is replaced. It does not while it imports torch.
WORKER_TIMEOUT = 120
# Errors that a command may end with in a sentence.
SAID: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, MemoryError, RuntimeError)


@dataclass(frozen=True)
class ServeOptions:
    """
    What a worker serves, and how.

    Attributes:
        models (`tuple[str, ...]`): model folders or Hub ids.
        directions (`tuple[tuple[str, str], ...]`): languages of a model whose config names none.
        num_beams (`int`, *optional*): beam size.
        in_float32 (`bool`): whether weights of other formats are converted to float32.
        settings (`dict[str, Any]`): how the pipelines compute.
        characters (`int`), texts (`int`), waiting (`int`): as in [`Limits`].
        api_keys (`tuple[str, ...]`), origins (`tuple[str, ...]`): as in [`build_server`].
        threads (`int`, *optional*): most threads of torch; by default as many as it takes.
        deadline (`float`): as in [`Limits`].
        device (`str`): as in [`choose_device`].
    """

    models: tuple[str, ...]
    directions: tuple[tuple[str, str], ...]
    num_beams: int | None
    in_float32: bool
    settings: dict[str, Any]
    characters: int
    texts: int
    waiting: int
    api_keys: tuple[str, ...]
    origins: tuple[str, ...]
    threads: int | None
    deadline: float = 30.0
    device: str = "auto"


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    serve = verbs.add_parser(
        "serve",
        help="serve models to other programs, with LibreTranslate's interface",
        description="Serve translation models to other programs: LibreTranslate's interface, metrics for Prometheus, "
        "and a page to translate in a browser. Needs the extra `serve`.",
        epilog="example: hf-vaswani serve --model runs/my/model --port 5000",
    )
    serve.add_argument(
        "--model",
        required=True,
        action="append",
        help="model folder or Hub id; repeat the option to serve several; the first with a pair of languages has it",
    )
    add_revision(serve)
    serve.add_argument(
        "--direction",
        action="append",
        default=[],
        metavar="SOURCE-TARGET",
        help="languages of a model whose config names none, e.g. en-de or pt_BR-en; repeat the option for several",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s, this machine")
    serve.add_argument("--port", type=int, default=5000, metavar="N", help="port to listen at; default: %(default)s")
    serve.add_argument("--workers", type=int, default=1, metavar="N", help="processes; default: %(default)s")
    add_device(serve)
    add_search(serve)
    serve.add_argument(
        "--char-limit", type=int, default=5000, metavar="N", help="most characters of a request; default: %(default)s"
    )
    serve.add_argument(
        "--batch-limit", type=int, default=100, metavar="N", help="most texts of a request; default: %(default)s"
    )
    serve.add_argument(
        "--queue-limit",
        type=int,
        default=1000,
        metavar="N",
        help="most texts that wait in a worker; then requests are answered by 429; default: %(default)s",
    )
    serve.add_argument(
        "--deadline",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="answer a translation that is not ready by then with 503, and end it; default: %(default)g",
    )
    serve.add_argument(
        "--api-keys", type=Path, metavar="FILE", help="file with an API key in each line; default: none is needed"
    )
    serve.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="let pages of this origin use the server from a browser, e.g. https://example.org, or * for all",
    )
    serve.set_defaults(run=_serve)


def make_worker(options: ServeOptions) -> Any:
    """
    Returns the application of a worker, which ends when its parent is gone. It also ends when its device has failed,
    and the parent starts another one.
    """
    parent = os.getppid()
    app: Any = None

    def watch() -> None:
        while os.getppid() == parent and not (app and any(each.is_broken for each in app.state.batchers)):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    app = make_app(options)
    atexit.register(_leave, app)
    return app


def _leave(app: Any) -> None:
    """Ends the process at once if a translation does not end: Python would crash under a thread that computes."""
    until = time.monotonic() + LAST
    if not all(each.is_free(within=until - time.monotonic()) for each in app.state.batchers):
        logger.warning("A translation did not end, and was left.")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def make_app(options: ServeOptions) -> Any:
    """Loads the models, and returns the application."""
    import torch
    import transformers

    from ..serving.server import Limits, build_server

    # A process of its own starts with Python's settings.
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    # They warn about texts, and one quotes them.
    transformers.logging.set_verbosity_error()
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    if options.threads is not None:
        # Torch may take fewer: those of the variable OMP_NUM_THREADS.
        torch.set_num_threads(min(options.threads, torch.get_num_threads()))
    return build_server(
        {name: _load(name, options) for name in options.models},
        directions=options.directions,
        limits=Limits(options.characters, options.texts, options.waiting, options.deadline),
        api_keys=options.api_keys,
        origins=options.origins,
    )


def _load(name: str, options: ServeOptions) -> Any:
    """Loads a model and its tokenizer, onto the device that the options name."""
    from ..conversion.engines import EngineOptions, check_search
    from ..model.pipeline_vaswani import VaswaniTranslationPipeline

    chosen = options.settings
    translators = load_models([name], None, choose_device(options.device, chosen["engine"]))
    model = translators.models[0]
    set_beams(model, options.num_beams)
    if chosen["engine"] not in ("torch", "auto"):
        # With an engine that was named, each request would fail.
        engine = EngineOptions(chosen["engine"], chosen["compute_type"], chosen["approximate"])
        check_search(engine, [model], model.generation_config)
    if options.in_float32:
        model = model.float()
    return VaswaniTranslationPipeline(model, translators.tokenizer, device=model.device, **chosen)


def _serve(options: argparse.Namespace) -> None:
    with extra("serve"):
        import uvicorn
    from uvicorn.supervisors import Multiprocess

    from ..interruption import Interrupted, stopped_by_sigterm

    chosen = _checked(options)
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((options.host, options.port))
        except OSError as error:
            raise OSError(
                f"{options.host}:{options.port} cannot be listened at: {error.strerror or error}."
            ) from error
        listening.listen(MAX_CONNECTIONS)
        listening.set_inheritable(True)
        settings: dict[str, Any] = {
            "log_config": None,
            "access_log": False,
            "log_level": "warning",
            "http": "h11",
            "ws": "none",
            "server_header": False,
            "limit_concurrency": MAX_CONNECTIONS,
            "timeout_graceful_shutdown": GRACE - LAST,
            "timeout_worker_healthcheck": WORKER_TIMEOUT,
        }
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{listening.getsockname()[1]} (Ctrl-C stops it)"
        if options.workers == 1:
            # uvicorn raises the signal once more when all requests are finished.
            with suppress(KeyboardInterrupt, Interrupted), stopped_by_sigterm():
                app = make_app(chosen)
                server = uvicorn.Server(uvicorn.Config(app, **settings))
                # A signal would interrupt asyncio while it makes its loop.
                with server.capture_signals():
                    logger.info(address)
                    asyncio.run(server.serve([listening]))
                    _leave(app)
            return
        _check_models(chosen)
        logger.info(address)
        with tempfile.TemporaryDirectory(prefix="hf_vaswani_metrics_") as folder:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
            config = uvicorn.Config(
                partial(make_worker, chosen),
                factory=True,
                workers=options.workers,
                **settings,
            )
            workers = Multiprocess(config, sockets=[listening])
            for number in (signal.SIGINT, signal.SIGTERM):
                # uvicorn's own handler is not heard while a worker does not answer, and waits for all without end.
                signal.signal(number, lambda *_: threading.Thread(target=_end, args=[workers], daemon=True).start())
            workers.run()


def _end(workers: Any) -> None:
    """Ends all workers, those that have not ended by themselves after the grace period as well."""
    workers.should_exit.set()
    time.sleep(GRACE)
    for worker in workers.processes:
        worker.process.kill()
        # The parent may wait for its answer.
        with suppress(OSError):
            worker.child_conn.send(False)


def _check_models(options: ServeOptions) -> None:
    """
    Raises the error of models that cannot be served, in words: a worker could only die of it. They are loaded in a
    process of their own, whose memory is free again afterwards, on an accelerator as well.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try_models, args=(options, sender), daemon=True)
    process.start()
    sender.close()
    try:
        error = receiver.recv()
    except EOFError:
        process.join()
        error = RuntimeError(f"Loading the models ended the process that tried it, with exit code {process.exitcode}.")
    process.join()
    if error is not None:
        raise error


def _try_models(options: ServeOptions, sender: Any) -> None:
    """Loads the models, and sends the error or `None`."""
    # Ctrl-C reaches all processes, and is answered by the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    error = None
    try:
        make_app(options)
    except SAID as raised:
        # Errors with arguments of their own cannot be sent as they are.
        error = next(kind for kind in SAID if isinstance(raised, kind))(str(raised))
        error.add_note(traceback.format_exc())
    # The parent may have been killed.
    with suppress(BrokenPipeError):
        sender.send(error)


def _checked(options: argparse.Namespace) -> ServeOptions:
    """Returns what the workers need, after checking the options."""
    from ..conversion.engines import EngineOptions
    from ..model_names import with_revision
    from ..processes import processors

    check_counts(options, "num_beams", "workers", "char_limit", "batch_limit", "queue_limit")
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port must be from 0 to {2**16 - 1}, but it is {options.port}.")
    if not 0 < options.deadline < math.inf:
        raise ValueError(f"--deadline must be a number of seconds above 0, but it is {options.deadline:g}.")
    directions = []
    for text in options.direction:
        match = DIRECTION.fullmatch(text)
        if match is None:
            raise ValueError(f"--direction must be a source and a target language, as en-de, but it is {text!r}.")
        directions.append((match[1], match[2]))
    keys: Sequence[str] = ()
    if options.api_keys is not None:
        require_file(options.api_keys)
        keys = [line.strip() for line in text_lines(options.api_keys) if line.strip()]
        if not keys:
            raise ValueError(f"{options.api_keys} has no API key: write one in each line.")
    EngineOptions(options.engine, options.compute_type, options.approximate, shortlist=options.shortlist).check()
    if options.dtype and options.engine != "torch":
        raise ValueError(f"--dtype is for torch, but --engine is {options.engine}: use --compute-type.")
    settings: dict[str, Any] = {"autocast": options.dtype if options.dtype != "float32" else None}
    settings |= {name: getattr(options, name) for name in ("engine", "compute_type", "approximate", "shortlist")}
    return ServeOptions(
        models=tuple(with_revision(options.model, options.revision)),
        directions=tuple(directions),
        num_beams=options.num_beams,
        in_float32=options.dtype in ("float32", "bfloat16"),
        settings=settings,
        characters=options.char_limit,
        texts=options.batch_limit,
        waiting=options.queue_limit,
        api_keys=tuple(keys),
        origins=tuple(options.allow_origin),
        threads=max(1, processors() // options.workers),
        deadline=options.deadline,
        device=options.device,
    )
