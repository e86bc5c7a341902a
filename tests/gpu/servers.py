"""Starts SGLang servers for the measurements, and sends them requests."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POLICY = ROOT / "checkpoints/h200-llama3-8b-eagle3-fa3"
BOOT_LIMIT_S = 400.0


def h200(kv_share, steps=None):
    """Return the arguments and the environment of a server on an H200, as FA3 runs it.

    Args:
        kv_share: SGLang's `mem_fraction_static`, of what is free when the server starts.
        steps: draft steps; None for a server without speculation.
    """
    arguments = {
        "model-path": HERE / "models/target",
        "load-format": "dummy",
        "skip-tokenizer-init": True,
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "attention-backend": "fa3",
        "cuda-graph-backend-prefill": "disabled",
        "cuda-graph-bs-decode": [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256],
        "mem-fraction-static": kv_share,
        "max-running-requests": 256,
        "random-seed": 1,
        "enable-metrics": True,
    }
    if steps is not None:
        arguments |= {
            "speculative-algorithm": "EAGLE3",
            "speculative-draft-model-path": HERE / "models/draft",
            "speculative-num-steps": steps,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": steps + 1,
        }
    # Three tokens a round, unless the control says otherwise: the weights are random.
    return arguments, {"SGLANG_SIMULATE_ACC_LEN": "3.0"} if steps is not None else {}


def cpu(kv_share, steps=None):
    """Return the same for the engine on a CPU with the tests' tiny pair, for a rehearsal."""
    sys.path[:0] = [str(ROOT / "tests/engine")]
    import harness

    more = {} if steps is not None else {"speculative_algorithm": None}
    if steps is not None:
        more = {"speculative_num_steps": steps}
    arguments = harness.arguments(Path("/tmp"), enable_metrics=True, **more)
    arguments["disable_radix_cache"] = False
    return {k.replace("_", "-"): v for k, v in arguments.items()}, harness.environment()


def plugins(folder, control="control_plugin"):
    """Make folders from which SGLang finds a control plugin, and ours if it is not installed.

    It loads them in the order of the path: the control plugin first.
    """
    wanted = {control: f"{control}:register"}
    try:
        importlib.metadata.distribution("specgovernor")
    except importlib.metadata.PackageNotFoundError:
        wanted["specgovernor"] = "engine_hooks.plugin:register"
    for name, target in wanted.items():
        metadata = folder / name / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
    return [*(folder / name for name in wanted), HERE, ROOT]


def free_port():
    """Return a port that nothing has, and that the system gives to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A server in processes of its own."""

    def __init__(
        self,
        folder,
        name,
        arguments,
        env,
        module="sglang.launch_server",
        ours=(),
        control="control_plugin",
    ):
        port = free_port()
        words = [sys.executable, "-m", module, *ours, "--host", "127.0.0.1", "--port", port]
        words += ["--skip-server-warmup"]
        for key, value in arguments.items():
            if value is False:
                continue
            words.append(f"--{key}")
            if value is not True:
                words += value if isinstance(value, list) else [value]
        path = [
            env.get("PYTHONPATH"),
            *plugins(folder / "plugins", control),
            os.environ.get("PYTHONPATH"),
        ]
        env = {**os.environ, **env, "PYTHONPATH": ":".join(str(p) for p in path if p)}
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        started_s = time.monotonic()
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                [str(word) for word in words],
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )
        asyncio.run(self._wait())
        print(f"{name} is up after {time.monotonic() - started_s:.0f} s", flush=True)

    async def _wait(self):
        end_s = time.monotonic() + BOOT_LIMIT_S
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                taken = b"address already in use" in self.log.read_bytes()
                if self._process.poll() is not None or taken or time.monotonic() > end_s:
                    self.close()
                    tail = self.log.read_text(errors="replace").splitlines()[-60:]
                    raise SystemExit("\n".join(["the server did not start", *tail]))
                await asyncio.sleep(0.5)

    def close(self):
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def session():
    """Return an HTTP session for many requests at a time."""
    return aiohttp.ClientSession(
        # A connection of its own for each request: an idle one may just be being closed.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=600),
    )


async def generate(http, server, prompt, num_tokens, **sampling):
    """Send a request; return SGLang's answer."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True, **sampling}
    body = {"input_ids": prompt, "sampling_params": params}
    async with http.post(f"{server.url}/generate", json=body) as answer:
        answer.raise_for_status()
        return await answer.json()


async def get(http, server, path):
    """Return a page."""
    async with http.get(server.url + path) as answer:
        return await answer.text()


class ControlFile:
    """Tells the control plugin what to do."""

    def __init__(self, path):
        self.path = path
        self.say("policy")

    def say(self, tiers, accept_rate=None, blocks=None, log=True):
        """Write what shall be so, and wait until it is."""
        said = {"tiers": tiers, "accept_rate": accept_rate, "blocks": blocks, "log": log}
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(said))
        unfinished.rename(self.path)
        time.sleep(0.25)
