"""Run the real SGLang engine on a CPU, in processes of its own, from a test.

    with start_engine(speculative_num_steps=3) as engine:
        outputs = engine.generate([[1, 5, 9], [7, 7, 7, 7]], max_new_tokens=32)
        outputs[0].token_ids, outputs[0].meta_info["spec_accept_length"]

        long = engine.submit([3, 1, 4], max_new_tokens=500)   # returns at once
        long.wait_for_tokens(10)                              # it is decoding now
        short = engine.submit([2, 7, 1], max_new_tokens=8)    # joins
        short.output()
        long.abort()

`start_engine` takes SGLang's own arguments (fields of its ServerArgs) over the defaults of
`arguments()`, and `candidate_steps` for the adaptive worker. Every wait has a limit: what takes
longer, or dies, raises `EngineFailed` with the end of the log, and no process stays behind.

`start_server` does the same for a server with an HTTP port, and any command that starts one.

SGLang finds a plugin through installed metadata. The project's own is installed in the environment
that `make test-engine` makes, and does nothing unless its variables are in `env`. `write_plugin`
makes a throw-away one for `plugins`.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
TINY = HERE / "tiny"  # the trained target and draft
BOOT_LIMIT_S = 300.0
REPLY_LIMIT_S = 240.0
KILL_LIMIT_S = 20.0
LOG_TAIL_LINES = 60

# A path or an address that the process must not inherit would make a run depend on the machine.
NOT_INHERITED = ("SGLANG_", "SPECGOVERNOR_", "PROMETHEUS_", "OMP_", "PYTHONPATH")


class EngineFailed(Exception):
    """An engine died, took too long or refused a command; the message ends with its log."""


@dataclass(frozen=True)
class Output:
    """What a request generated, and SGLang's account of it."""

    token_ids: tuple[int, ...]
    meta_info: Mapping[str, Any]


def arguments(folder: Path, candidate_steps: object = None, **overrides: Any) -> dict[str, Any]:
    """Return the arguments of an engine that drafts, with `overrides` of SGLang's own names.

    Args:
        folder: where to write the adaptive worker's configuration.
        candidate_steps: switches the adaptive worker on: a list of num_steps for every batch size,
            or SGLang's own table {smallest batch size: {"candidate_steps": [...], ...}}.
        overrides: None removes an argument, speculative_algorithm=None all of speculation.
    """
    given: dict[str, Any] = {
        "model_path": str(TINY / "target"),
        "dtype": "float32",  # fewer near-ties, which two ranks would break differently than one
        "device": "cpu",
        "attention_backend": "intel_amx",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "grammar_backend": "none",
        "mem_fraction_static": 0.3,
        "max_total_tokens": 16384,
        "max_running_requests": 16,
        "context_length": 2048,
        "random_seed": 1,
        "log_level": "info",
    }
    if overrides.get("speculative_algorithm", "EAGLE3") is not None:
        given |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(TINY / "draft"),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
        }
    given |= overrides
    if candidate_steps is not None:
        if not isinstance(candidate_steps, Mapping):
            candidate_steps = {"1": {"candidate_steps": list(candidate_steps)}}
        config = folder / "candidate_steps.json"
        config.write_text(json.dumps(candidate_steps), encoding="utf-8")
        given |= {"speculative_adaptive": True, "speculative_adaptive_config": str(config)}
    if given.get("speculative_num_steps") is not None:
        given.setdefault("speculative_num_draft_tokens", given["speculative_num_steps"] + 1)
    return {name: value for name, value in given.items() if value is not None}


def environment(
    tp_size: int = 1, plugins: Sequence[Path] = (), env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of an engine on a CPU; `env` adds to it."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)
    }
    return inherited | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "llama_models",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "cpu_kernels", *plugins))),
        # Without these: half a minute of compiling, and NCCL, which a CUDA build of torch brings.
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp_size))),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **(env or {}),
    }


def write_plugin(folder: Path, source: str, name: str = "throwaway") -> Path:
    """Write a plugin that SGLang loads, with `source` for its module, and return its folder.

    The module must define `register()`, which SGLang calls in every process of the engine.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{name} = {name}:register\n", encoding="utf-8"
    )
    return folder


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs; the container may leave dead ones in its table for a while."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class EngineProcess:
    """A process, all that it starts, and the log that they write."""

    def __init__(self, command: Sequence[object], log: Path, env: Mapping[str, str], **popen: Any):
        self._log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=dict(env),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **popen,
            )

    def log(self) -> str:
        """Return all that the processes have written to standard output and error."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def failure(self, what: str) -> EngineFailed:
        """Return the error to raise, with the end of the log."""
        tail = "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
        return EngineFailed(f"{what}\n--- the end of the log ---\n{tail}")

    def wait_for_log(self, text: str, limit_s: float = REPLY_LIMIT_S) -> None:
        """Wait until the log holds a text."""
        end = time.monotonic() + limit_s
        while text not in self.log():
            if self.process.poll() is not None:
                raise self.failure(f"the process ended before it logged {text!r}")
            if time.monotonic() > end:
                raise self.failure(f"after {limit_s:.0f} s the log has no {text!r}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End the process and all that it started."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        # Also those whose parent is gone: they are still of the process group that began here.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        end = time.monotonic() + KILL_LIMIT_S
        while any(map(alive, family)) and time.monotonic() < end:
            time.sleep(0.05)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


class Request:
    """A request that was submitted: it may be waiting, running or done."""

    def __init__(self, engine: "Engine", rid: str):
        self.rid = rid
        self._engine = engine
        self._changed = threading.Condition()
        self._num_tokens = 0
        self._reply: dict[str, Any] | None = None

    def take(self, reply: dict[str, Any]) -> None:
        """Take note of a reply; called by the thread that reads them."""
        with self._changed:
            if "num_tokens" in reply:
                self._num_tokens = reply["num_tokens"]
            else:
                self._reply = reply
            self._changed.notify_all()

    @property
    def num_tokens(self) -> int:
        """How many tokens are known to be generated."""
        return self._num_tokens

    @property
    def done(self) -> bool:
        """Whether the output is there."""
        return self._reply is not None

    def wait_for_tokens(self, count: int, limit_s: float = REPLY_LIMIT_S) -> None:
        """Wait until at least `count` tokens are generated, or the request is done."""
        self._wait(lambda: self.num_tokens >= count or self.done, f"{count} tokens", limit_s)

    def result(self, limit_s: float = REPLY_LIMIT_S) -> Any:
        """Wait for the last reply and return its result."""
        self._wait(lambda: self.done, "the result", limit_s)
        assert self._reply is not None
        if "error" in self._reply:
            raise self._engine.failure(self._reply["error"])
        return self._reply["result"]

    def output(self, limit_s: float = REPLY_LIMIT_S) -> Output:
        """Wait for the end of the request and return what it generated."""
        return _output(self.result(limit_s))

    def abort(self) -> None:
        """Ask SGLang to end the request; its output is what it had generated."""
        self._engine.call("abort", rid=self.rid)

    def _wait(self, condition: Any, what: str, limit_s: float) -> None:
        with self._changed:
            reached = self._changed.wait_for(condition, limit_s)
        if not reached:
            raise self._engine.failure(f"after {limit_s:.0f} s there is no {what} of {self.rid!r}")


class Engine(EngineProcess):
    """An SGLang engine in a process of its own; made by `start_engine`."""

    def __init__(self, given: Mapping[str, Any], log: Path, env: Mapping[str, str]):
        replies, theirs = os.pipe()
        command = (sys.executable, HERE / "worker.py", theirs, json.dumps(dict(given)))
        super().__init__(
            command, log, env, stdin=subprocess.PIPE, text=True, pass_fds=(theirs,), cwd=log.parent
        )
        os.close(theirs)
        self._lock = threading.Lock()
        self._ready = Request(self, "boot")
        self._pending: dict[int, Request] = {0: self._ready}
        self._ids, self._rids = itertools.count(1), itertools.count(1)
        self._reader = threading.Thread(target=self._read, args=(replies,), daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """End the process and all that it started, and read its last replies."""
        super().kill()
        self._reader.join(10)

    def wait_until_ready(self, limit_s: float = BOOT_LIMIT_S) -> None:
        """Wait until the engine has loaded its models."""
        self._ready.result(limit_s)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 32,
        limit_s: float = REPLY_LIMIT_S,
        options: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Output]:
        """Generate for all prompts as one batch, greedily unless told otherwise.

        `options` are SGLang's own beside the sampling's, such as return_logprob.
        """
        params = _sampling(max_new_tokens, sampling)
        requests = [{"input_ids": list(ids), "sampling_params": params} for ids in prompts]
        found = self.call("generate", limit_s, requests=requests, options=dict(options or {}))
        return [_output(output) for output in found]

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 32, **sampling: Any) -> Request:
        """Send one request and return without waiting for it."""
        rid = f"request-{next(self._rids)}"
        request = {
            "rid": rid,
            "input_ids": list(prompt),
            "sampling_params": _sampling(max_new_tokens, sampling),
        }
        return self._send("submit", rid, request=request)

    def server_info(self) -> dict[str, Any]:
        """Return SGLang's resolved arguments and, as internal_states, each scheduler's report."""
        return self.call("server_info")

    def set_state(self, **values: float) -> bool:
        """Change numeric settings of the running schedulers, as POST /set_internal_state does."""
        return self.call("set_state", values=values)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; nothing may be running."""
        return self.call("flush_cache")

    def call(self, op: str, limit_s: float = REPLY_LIMIT_S, **fields: Any) -> Any:
        """Carry out a command of `worker.py` and return its result."""
        return self._send(op, op, **fields).result(limit_s)

    def _send(self, op: str, name: str, **fields: Any) -> Request:
        request = Request(self, name)
        with self._lock:
            command = {"id": next(self._ids), "op": op, **fields}
            self._pending[command["id"]] = request
            try:
                self.process.stdin.write(json.dumps(command) + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                raise self.failure(f"the engine had ended before {name!r}") from None
        return request

    def _read(self, replies: int) -> None:
        with os.fdopen(replies, encoding="utf-8") as stream:
            for line in stream:
                reply = json.loads(line)
                self._pending[reply["id"]].take(reply)
        for request in list(self._pending.values()):
            if not request.done:
                request.take({"error": f"the engine ended before the end of {request.rid!r}"})


def _sampling(max_new_tokens: int, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **more}


def _output(output: Mapping[str, Any]) -> Output:
    return Output(tuple(output["output_ids"]), output["meta_info"])


@contextlib.contextmanager
def start_engine(
    *,
    candidate_steps: object = None,
    plugins: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    boot_limit_s: float = BOOT_LIMIT_S,
    **overrides: Any,
) -> Iterator[Engine]:
    """Start an engine and end it; see the module's docstring.

    Args:
        candidate_steps: see `arguments`.
        plugins: folders made by `write_plugin`.
        env: further variables of its environment.
        boot_limit_s: how long it may take to start.
        overrides: SGLang's arguments, such as tp_size=2 or disable_radix_cache=False.
    """
    with _folder() as folder:
        given = arguments(folder, candidate_steps, **overrides)
        variables = environment(given.get("tp_size", 1), plugins, env)
        engine = Engine(given, folder / "engine.log", variables)
        try:
            engine.wait_until_ready(boot_limit_s)
            yield engine
        finally:
            engine.kill()


class Server(EngineProcess):
    """A server with an HTTP port on this machine; made by `start_server`."""

    def __init__(self, command: Sequence[object], port: int, log: Path, env: Mapping[str, str]):
        super().__init__(command, log, env, cwd=log.parent)
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self, limit_s: float = BOOT_LIMIT_S) -> None:
        """Wait until /health answers."""
        end = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self.get("/health", limit_s=5.0)
                return
            if self.process.poll() is not None:
                raise self.failure("the server ended before it was ready")
            if time.monotonic() > end:
                raise self.failure(f"after {limit_s:.0f} s the server is not ready")
            time.sleep(0.5)

    def get(self, path: str, limit_s: float = REPLY_LIMIT_S) -> str:
        """Return the body of a page."""
        with urllib.request.urlopen(self.url + path, timeout=limit_s) as answer:
            return answer.read().decode()

    def post(self, path: str, body: object, limit_s: float = REPLY_LIMIT_S) -> Any:
        """Send a JSON body and return the JSON answer."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return json.loads(answer.read())

    def generate(self, prompt: Sequence[int], max_new_tokens: int = 32, **sampling: Any) -> Output:
        """Generate for one prompt, greedily unless told otherwise."""
        params = _sampling(max_new_tokens, sampling)
        return _output(
            self.post("/generate", {"input_ids": list(prompt), "sampling_params": params})
        )


@contextlib.contextmanager
def start_server(
    command: Sequence[object] = ("-m", "sglang.launch_server"),
    *,
    candidate_steps: object = None,
    plugins: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    boot_limit_s: float = BOOT_LIMIT_S,
    **overrides: Any,
) -> Iterator[Server]:
    """Start an HTTP server and end it; like `start_engine`.

    Args:
        command: what Python runs; SGLang's arguments follow it.
        candidate_steps, plugins, env, boot_limit_s, overrides: see `start_engine`.
    """
    with _folder() as folder:
        port = _free_port()
        given = arguments(folder, candidate_steps, **overrides)
        words = [sys.executable, *command, "--host", "127.0.0.1", "--port", port]
        words.append("--skip-server-warmup")
        for name, value in given.items():
            if value is not False:
                words.append("--" + name.replace("_", "-"))
                words += [] if value is True else [value]
        variables = environment(given.get("tp_size", 1), plugins, env)
        server = Server(words, port, folder / "server.log", variables)
        try:
            server.wait_until_ready(boot_limit_s)
            yield server
        finally:
            server.kill()


def _free_port() -> int:
    """Return a port that nothing has, and that the system gives to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Give a folder of its own, short enough for the paths of sockets."""
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
