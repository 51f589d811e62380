"""The verbs that show and serve a model: explore, demo, serve."""

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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from ..extras import extra
from ..files import read_json
from .inputs import (
    add_budget,
    add_device,
    add_model,
    add_revision,
    add_search,
    check_counts,
    check_output,
    choose_device,
    engine_of,
    load_models,
    load_one,
    require_file,
    set_beams,
    text_lines,
)

if TYPE_CHECKING:
    from ..serving.static_page import StaticPage

logger = logging.getLogger("hf_vaswani")

MAX_EXAMPLES = 6
HOST, DEMO_PORT = "127.0.0.1", 7860
DIRECTION = re.compile(r"(\w+)-(\w+)")
# In seconds, in which the process ends after SIGTERM. All but the last few are for running requests.
GRACE, LAST = 60, 5
# Connections and requests of a worker at a time.
MAX_CONNECTIONS = 2000
# In seconds, after which a worker that does not answer is replaced. It does not while it imports torch.
WORKER_TIMEOUT = 120
# Variable with the folder that the workers of a server share, set for them alone.
FOLDER_OF_WORKERS = "PROMETHEUS_MULTIPROC_DIR"
# By which a worker says that it has a place among the others.
_locks: list[Any] = []


def add_verbs(verbs: Any) -> None:
    """Adds the verbs to the command line, each with its function under `run`."""
    _add_explore(verbs)
    _add_demo(verbs)
    _add_serve(verbs)


def add_javascript(parser: argparse.ArgumentParser, option: str) -> None:
    """Adds the option that says where the JavaScript library of a static page is."""
    parser.add_argument(
        "--javascript",
        type=Path,
        metavar="FOLDER",
        help=f"with {option}: folder with the JavaScript library; default: npm fetches it once",
    )


def _add_port(parser: argparse.ArgumentParser, port: int, help_of_host: str) -> None:
    parser.add_argument("--host", default=HOST, help=help_of_host)
    parser.add_argument("--port", type=int, default=port, metavar="N", help="port to listen at; default: %(default)s")


# ---- explore -----------------------------------------------------------------------------------------------------


def _add_explore(verbs: Any) -> None:
    explore = verbs.add_parser(
        "explore",
        help="make a page that shows what a model does with a sentence",
        description="Make one HTML file that shows what a model does with a sentence: translation and alignment, the "
        "search step by step, attention of all heads, positions and embeddings. It opens in any browser, and needs no "
        "other file or host.",
        epilog='example: hf-vaswani explore --model runs/my/model "A dog runs." --output page.html',
    )
    add_model(explore)
    explore.add_argument("--num-beams", type=int, metavar="N", help="beam size, e.g. 4; default: the model's own")
    explore.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        default=Path("explorer.html"),
        help="file to write; default: %(default)s",
    )
    explore.add_argument("text", metavar="TEXT", help="the sentence")
    explore.set_defaults(run=_explore)


def _explore(options: argparse.Namespace) -> None:
    from ..model.configuration_vaswani import VaswaniConfig
    from ..model_names import resolve_model, with_revision
    from ..processes import limit_threads
    from ..translation.loading import load_single_stack
    from ..visualization.explorer import explore

    check_counts(options, "num_beams")
    check_output(options.output, "--output")
    (name,) = with_revision([options.model], options.revision)
    text: str = options.text
    device = choose_device(options.device)
    folder = resolve_model(name, "--model")
    kind = read_json(folder / "config.json").get("model_type")
    if kind != "vaswani":
        raise ValueError(
            f"The explorer needs a Vaswani model, but {options.model} is of the type {kind!r}: hf-vaswani convert "
            "turns some into one."
        )
    config = VaswaniConfig.from_pretrained(folder)
    if options.num_beams is not None and config.stacks == ("encoder",):
        raise ValueError(f"--num-beams is for models that write text, but {options.model} does not.")
    if config.is_encoder_decoder:
        translators = load_models([str(folder)], options.target_language, device)
        model, tokenizer = translators.models[0], translators.tokenizer
        (text,) = translators.tagged([text], "The text")
    else:
        if options.target_language is not None:
            raise ValueError(f"--target-language is for models that translate, but {options.model} does not.")
        limit_threads()
        model, tokenizer = load_single_stack(folder)
        model = model.to(device)
    if options.num_beams is not None:
        set_beams(model, options.num_beams)
    page = explore(model, tokenizer, text, name=name)
    page.save(options.output)
    logger.info(f"{options.output}: {len(page.html.encode()) / 1000:,.0f} kB; open it in a browser.")


# ---- demo --------------------------------------------------------------------------------------------------------


def _add_demo(verbs: Any) -> None:
    demo = verbs.add_parser(
        "demo",
        help="serve a page to try a model in a browser, or make one that needs no server",
        description="Serve a page to try a translation model in a browser: translations, words in the colours of "
        "their alignment, and the explorer. Needs the extra `demo`. With --static, make a page that translates in the "
        "browser itself, without any server. Needs the extra `convert`, and npm once.",
        epilog="example: hf-vaswani demo --model runs/my/model --static translator.html --single-file",
    )
    add_model(demo)
    demo.add_argument("--num-beams", type=int, metavar="N", help="beam size at first; default: the model's own")
    demo.add_argument(
        "--examples",
        type=Path,
        metavar="FILE",
        help="text file with an example in each line; default: sentences of the test of the model's run",
    )
    _add_port(demo, DEMO_PORT, "address to listen at; 0.0.0.0 for every network; default: %(default)s")
    demo.add_argument(
        "--static",
        type=Path,
        metavar="OUT",
        help="write a page that translates in the browser, and end: a folder for any web server",
    )
    demo.add_argument(
        "--single-file", action="store_true", help="with --static: write one HTML file, which opens by a double click"
    )
    demo.add_argument("--force", action="store_true", help="with --static: replace OUT if it exists")
    add_javascript(demo, "--static")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    if options.static is not None:
        _write_static(options)
        return
    for name in ("single_file", "javascript", "force"):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} is for --static, which is not given.")
    from ..serving.demo import MAX_BEAMS, build_demo, serve_demo

    check_counts(options, "num_beams")
    if options.num_beams is not None and options.num_beams > MAX_BEAMS:
        raise ValueError(f"--num-beams must be from 1 to {MAX_BEAMS}, but it is {options.num_beams}.")
    if not 0 < options.port < 2**16:
        raise ValueError(f"--port must be from 1 to {2**16 - 1}, but it is {options.port}.")
    if options.examples is not None:
        require_file(options.examples)
    translators = load_one(options)
    model = translators.models[0]
    if options.num_beams is not None:
        model.generation_config.num_beams = options.num_beams
    examples = _examples(options.examples, translators.folders[0], translators.tags)
    demo = build_demo(model, translators.tokenizer, options.model, examples, options.target_language)
    logger.info(f"http://{options.host}:{options.port} (Ctrl-C stops it)")
    serve_demo(demo, options.host, options.port)


def _write_static(options: argparse.Namespace) -> None:
    """Writes the page that needs no server."""
    from ..files import atomic_folder, atomic_write_bytes
    from ..interruption import stopped_by_sigterm
    from ..model_names import with_revision

    out: Path = options.static
    for name, default in (
        ("num_beams", None),
        ("examples", None),
        ("host", HOST),
        ("port", DEMO_PORT),
        ("device", "auto"),
    ):
        if getattr(options, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} is for a page with a server, but --static is given.")
    check_static(out, options.single_file, options.force)
    (name,) = with_revision([options.model], options.revision)
    with stopped_by_sigterm():
        page = static_page(name, options.javascript, options.target_language)
        if options.single_file:
            content = page.single_file()
            atomic_write_bytes(out, content)
            logger.info(f"{out}: {len(content) / 1e6:.1f} MB; open it in a browser.")
            return
        files = page.folder()
        with atomic_folder(out) as folder:
            for file, content in files.items():
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_bytes(content)
    size = sum(map(len, files.values()))
    logger.info(
        f"{out}: {size / 1e6:.1f} MB; put it on a web server, or: python -m http.server --directory {quote(str(out))}"
    )


def check_static(out: Path, is_single: bool, force: bool) -> None:
    """Raises a `ValueError` if a page must not or cannot be written to `out`."""
    from ..serving.static_page import NAMES

    if out.suffix in (".html", ".htm") and not is_single:
        raise ValueError(f"--static {out} would be a folder: add --single-file for one HTML file.")
    if out.name in ("", ".."):
        raise ValueError(f"--static {str(out)!r} does not name a new folder: give the path of a folder inside it.")
    if is_single or not out.is_dir():
        check_output(out, "--static")
    elif others := [path.name for path in sorted(out.iterdir()) if path.name not in NAMES]:
        raise ValueError(f"--static {out} is a folder with {others[0]!r}, which is not of a page: name another one.")
    if out.exists() and not force:
        raise ValueError(f"--static {out} already exists: use --force to replace it.")
    if out.is_file() and not is_single:
        raise ValueError(f"--static {out} is a file: use --single-file to replace it by one, or name another folder.")


def static_page(name: str, javascript: Path | None, language: str | None = None) -> "StaticPage":
    """
    Makes the page of a model that needs no server.

    Args:
        name (`str`): the model, see [`resolve_model`].
        javascript (`Path`, *optional*): folder with the JavaScript library.
        language (`str`, *optional*): target language that is chosen at first.
    """
    from ..conversion.convert import convert, import_target
    from ..model_names import resolve_model, title_of
    from ..processes import limit_threads
    from ..serving.javascript import javascript_files
    from ..serving.static_page import make_page

    limit_threads()
    # Without the extra, npm fetches nothing, and without the library, no model is downloaded or converted.
    import_target("transformers.js")
    library = javascript_files(javascript)
    source = resolve_model(name, "--model")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        for line in convert(source, folder, "transformers.js"):
            # The page itself sees to what other notes ask of programs.
            if "ignores settings" in line:
                logger.info(line)
        return make_page(folder, title_of(name, source), library, language)


def _examples(path: Path | None, model: Path, tags: Any) -> list[str]:
    """Returns the lines of a file, or the samples of the run's test, without language tags."""
    if path is not None:
        return [line for line in text_lines(path) if line.strip()][:MAX_EXAMPLES]
    result = model.resolve().parent / "test.json"
    if not result.is_file():
        return []
    samples = read_json(result).get("samples") or ()
    return [tags.split(str(sample["source"]))[1] for sample in samples][:MAX_EXAMPLES]


# ---- serve -------------------------------------------------------------------------------------------------------


def _add_serve(verbs: Any) -> None:
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
        help="folder of a run or a model, or Hub id; repeat the option to serve several; the first with a pair of "
        "languages has it",
    )
    add_revision(serve)
    serve.add_argument(
        "--direction",
        action="append",
        default=[],
        metavar="SOURCE-TARGET",
        help="languages of a model whose config names none, e.g. en-de or pt_BR-en; repeat the option for several",
    )
    _add_port(serve, 5000, "address to listen at; default: %(default)s, this machine")
    serve.add_argument("--workers", type=int, default=1, metavar="N", help="processes; default: %(default)s")
    add_device(serve)
    add_budget(serve)
    add_search(serve)
    serve.add_argument(
        "--char-limit", type=int, default=5000, metavar="N", help="most characters of a text; default: %(default)s"
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


def make_worker(options: argparse.Namespace) -> Any:
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


def make_app(options: argparse.Namespace) -> Any:
    """Loads the models, and returns the application."""
    import transformers

    from ..model_names import with_revision
    from ..processes import limit_threads
    from ..serving.server import build_server

    # A process of its own starts with Python's settings.
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    # They warn about texts, and one quotes them.
    transformers.logging.set_verbosity_error()
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    limit_threads(options.workers)
    device, sharing = _place(options)
    return build_server(
        {name: _load(name, options, device, sharing) for name in with_revision(options.model, options.revision)},
        directions=_directions(options.direction),
        limits=_limits(options),
        api_keys=_api_keys(options.api_keys),
        origins=options.allow_origin,
    )


def _place(options: argparse.Namespace) -> tuple[Any, int]:
    """
    Returns the device of a worker, and how many workers share it: unless its number is given, the accelerators of the
    machine have equally many. A worker that takes the place of another takes its device, too.
    """
    import torch
    from filelock import FileLock, Timeout

    device = choose_device(options.device, options.engine)
    folder = os.environ.get(FOLDER_OF_WORKERS)
    if folder is None or device.type == "cpu" or device.index is not None:
        return device, options.workers
    count = torch.accelerator.device_count()
    for number in range(options.workers):
        lock = FileLock(Path(folder) / f"worker_{number}.lock")
        with suppress(Timeout):
            lock.acquire(timeout=0)
            # It is released when the process ends.
            _locks.append(lock)
            return torch.device(device.type, number % count), -(-options.workers // count)
    return device, options.workers


def _limits(options: argparse.Namespace) -> Any:
    from ..serving.requests import Limits

    return Limits(options.char_limit, options.batch_limit, options.queue_limit, options.deadline)


def _load(name: str, options: argparse.Namespace, device: Any, sharing: int = 1) -> Any:
    """Loads a model and its tokenizer onto a device, which so many workers share."""
    from ..conversion.engines import check_search
    from ..model.pipeline_vaswani import VaswaniTranslationPipeline
    from ..translation.budgets import search_limits

    translators = load_models([name], None, device)
    model = translators.models[0]
    set_beams(model, options.num_beams)
    if options.engine not in ("torch", "auto"):
        # With an engine that was named, each request would fail.
        check_search(engine_of(options), [model], model.generation_config)
    if options.dtype in ("float32", "bfloat16"):
        model = model.float()
    chosen = {name: getattr(options, name) for name in ("engine", "compute_type", "approximate", "shortlist")}
    chosen["autocast"] = options.dtype if options.dtype != "float32" else None
    pipeline = VaswaniTranslationPipeline(model, translators.tokenizer, device=model.device, **chosen)
    pipeline.limits = partial(search_limits, tokens_per_batch=options.tokens_per_batch, processes=sharing)
    engine: Any = pipeline.engine
    if engine is not None:
        engine.translator.tokens_per_batch = options.tokens_per_batch
    return pipeline


def _directions(names: Sequence[str]) -> list[tuple[str, str]]:
    matches = {name: DIRECTION.fullmatch(name) for name in names}
    for name, match in matches.items():
        if match is None:
            raise ValueError(f"--direction must be a source and a target language, as en-de, but it is {name!r}.")
    return [(match[1], match[2]) for match in matches.values() if match]


def _api_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    require_file(path)
    keys = [line.strip() for line in text_lines(path) if line.strip()]
    if not keys:
        raise ValueError(f"{path} has no API key: write one in each line.")
    return keys


def _check(options: argparse.Namespace) -> None:
    """Checks the options of serve, before a model is loaded."""
    from ..model_names import with_revision

    check_counts(options, "num_beams", "workers", "tokens_per_batch", "char_limit", "batch_limit", "queue_limit")
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port must be from 0 to {2**16 - 1}, but it is {options.port}.")
    if not 0 < options.deadline < math.inf:
        raise ValueError(f"--deadline must be a number of seconds above 0, but it is {options.deadline:g}.")
    _directions(options.direction)
    _api_keys(options.api_keys)
    engine_of(options)
    with_revision(options.model, options.revision)


def _serve(options: argparse.Namespace) -> None:
    with extra("serve"):
        import uvicorn
    from uvicorn.supervisors import Multiprocess

    from ..interruption import Interrupted, stopped_by_sigterm

    _check(options)
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
            # Some programs send text in the address.
            "h11_max_incomplete_event_size": _limits(options).max_bytes,
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
                app = make_app(options)
                server = uvicorn.Server(uvicorn.Config(app, **settings))
                # A signal would interrupt asyncio while it makes its loop.
                with server.capture_signals():
                    logger.info(address)
                    asyncio.run(server.serve([listening]))
                    _leave(app)
            return
        _check_models(options)
        logger.info(address)
        with tempfile.TemporaryDirectory(prefix="hf_vaswani_metrics_") as folder:
            os.environ[FOLDER_OF_WORKERS] = folder
            config = uvicorn.Config(
                partial(make_worker, options),
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


def _check_models(options: argparse.Namespace) -> None:
    """
    Raises the error of models that cannot be served: a worker could only die of it. They are loaded in a process of
    their own, whose memory is free again afterwards, on an accelerator as well.
    """
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches all processes, and is answered by the parent.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=ignore) as process:
        try:
            process.submit(_try_models, options).result()
        except BrokenProcessPool as error:
            raise RuntimeError("Loading the models ended the process that tried it.") from error


def _try_models(options: argparse.Namespace) -> None:
    try:
        make_app(options)
    except (ValueError, OSError, ImportError) as error:
        # Errors with arguments of their own cannot be sent as they are.
        kind = next(kind for kind in (ValueError, OSError, ImportError) if isinstance(error, kind))
        raise kind(str(error)) from error
