"""SGLang, as far as it is known here: its versions, and every symbol of it that is used.

No other file names one. :data:`SYMBOLS` says where each stands and how it is called;
``engine_hooks.symbol_check`` compares that with the installed source. The functions below it read
SGLang's objects for the decision path: only values that are equal on all tensor-parallel ranks,
and never a tensor that lives on the GPU.
"""

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_hooks.symbol_check import find_package, missing_symbols

FIRST_SUPPORTED = "0.5.15.post1"
LAST_SUPPORTED = "0.5.23"

PARAMS = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
"""The policy that SGLang asks for the steps of a round; the governor replaces it."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
INIT = f"{SCHEDULER}.__init__"
RUN_BATCH = f"{SCHEDULER}.run_batch"
PROCESS_RESULT = f"{SCHEDULER}.process_batch_result"
ON_IDLE = f"{SCHEDULER}.on_idle"
SET_STATE = f"{SCHEDULER}.set_internal_state"
"""What a request to ``/set_internal_state`` ends in, on every rank before the same round."""
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
WORKER_LOGGER = "sglang.srt.speculative.eagle_worker_v2"
"""Logger that prints a line at every switch; its lines begin with :data:`SWITCH_MESSAGE`."""
SWITCH_MESSAGE = "Switch adaptive runtime state"
SKIP_DRAFT_EXTEND = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
"""Environment flag, read every round: whether zero-step rounds leave the draft's KV behind."""
WAITING_TIMEOUT = "SGLANG_REQ_WAITING_TIMEOUT"
DEFAULT_MAX_RUNNING_REQUESTS = 48
"""What SGLang sets with speculation when the user does not."""


@dataclass(frozen=True)
class Symbol:
    """One name that must exist.

    Attributes:
        path: Dotted path; several separated by ``|`` if any one of them will do.
        parameters: First parameters of a function, in order; further ones must be optional. None
            for anything that is not called, such as an attribute that a method sets.
    """

    path: str
    parameters: tuple[str, ...] | None = None


_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"
_MODE = "sglang.srt.model_executor.forward_batch_info.ForwardMode"
_RESULT = "sglang.srt.managers.utils.GenerationBatchResult"
_SPECULATIVE = "sglang.srt.speculative"
_REGISTRY = "sglang.srt.plugins.hook_registry"

SYMBOLS = (
    Symbol(f"{_REGISTRY}.HookRegistry.register", ("cls", "target", "hook", "hook_type")),
    Symbol(f"{_REGISTRY}.HookType.AROUND"),
    Symbol(f"{_REGISTRY}.HookType.REPLACE"),
    Symbol(f"{PARAMS}.__init__", ("self", "initial_steps", "cfg_path")),
    Symbol(f"{PARAMS}.candidate_steps", ("self",)),
    Symbol(f"{PARAMS}.set_cuda_graph_bs", ("self", "cuda_graph_bs")),
    Symbol(f"{PARAMS}.get_steps_for_batch", ("self", "batch_size")),
    Symbol(f"{PARAMS}.on_verify_complete", ("self", "num_correct_drafts_per_req", "batch_size")),
    Symbol(f"{PARAMS}.cuda_graph_bs_for_step", ("self", "step")),
    Symbol(f"{_SPECULATIVE}.adaptive_spec_params.adaptive_unsupported_reason", ("server_args",)),
    Symbol(
        f"{_SPECULATIVE}.adaptive_spec_params.resolve_candidate_steps_from_config", ("cfg_path",)
    ),
    Symbol(
        f"{_SPECULATIVE}.adaptive_runtime_state.AdaptiveController.activate_step_by_batch",
        ("self", "batch_size"),
    ),
    Symbol(f"{_SPECULATIVE}.adaptive_runtime_state.AdaptiveController.params"),
    Symbol(f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2.adaptive_controller"),
    Symbol(f"sglang.srt.environ.Envs.{SKIP_DRAFT_EXTEND}"),
    Symbol(INIT),
    Symbol(RUN_BATCH, ("self", "batch")),
    Symbol(PROCESS_RESULT, ("self", "batch", "result")),
    Symbol(ON_IDLE, ("self",)),
    Symbol(SET_STATE, ("self", "recv_req")),
    Symbol("sglang.srt.managers.io_struct.SetInternalStateReq.server_args"),
    Symbol("sglang.srt.managers.io_struct.SetInternalStateReqOutput.updated"),
    Symbol(f"{SCHEDULER}.waiting_queue"),
    Symbol(f"{SCHEDULER}.max_running_requests"),
    Symbol(f"{SCHEDULER}.max_total_num_tokens"),
    Symbol(f"{SCHEDULER}.token_to_kv_pool_allocator"),
    Symbol(f"{SCHEDULER}.tree_cache"),
    Symbol(f"{SCHEDULER}.model_worker"),
    Symbol(f"{SCHEDULER}.tp_worker"),
    Symbol(f"{SCHEDULER}.tp_cpu_group"),
    Symbol(f"{SCHEDULER}.enable_overlap"),
    Symbol(f"{SCHEDULER}.server_args"),
    Symbol(f"{SCHEDULER}.metrics_reporter"),
    Symbol(f"{_BATCH}.reqs"),
    Symbol(f"{_BATCH}.seq_lens_cpu"),
    Symbol(f"{_BATCH}.seq_lens_sum"),
    Symbol(f"{_BATCH}.forward_mode"),
    Symbol(f"{_BATCH}.decoding_reqs"),
    Symbol(f"{_BATCH}.extend_num_tokens"),
    Symbol(f"{_REQUEST}.origin_input_ids"),
    Symbol(f"{_REQUEST}.output_ids"),
    Symbol(f"{_REQUEST}.finished", ("self",)),
    Symbol(f"{_MODE}.is_decode", ("self",)),
    Symbol(f"{_MODE}.is_extend", ("self",)),
    Symbol(f"{_RESULT}.num_correct_drafts_per_req_cpu"),
    Symbol(f"{_RESULT}.speculative_num_draft_tokens"),
    Symbol("sglang.srt.mem_cache.radix_cache.RadixCache.evictable_size", ("self",)),
    # Configuration is resolved on construction through 0.5.17, and later on when it is launched.
    Symbol(f"{SERVER_ARGS}.resolve_once|{SERVER_ARGS}.__post_init__", ("self",)),
)

_EAGLE = f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2"
_DRAFT_INPUT = f"{_SPECULATIVE}.eagle_info.EagleDraftInput"
_TARGET = "sglang.srt.managers.tp_worker.TpModelWorker"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"

NATIVE_SYMBOLS = (
    Symbol(f"{_EAGLE}.forward_batch_generation", ("self", "batch", "on_publish")),
    Symbol(f"{_EAGLE}.activate_step_by_batch", ("self", "batch_size")),
    Symbol(f"{_EAGLE}._stub_skipped_draft_extend", ("self", "batch", "batch_output")),
    Symbol(f"{_EAGLE}.speculative_num_steps"),
    Symbol(f"{_EAGLE}.target_worker|{_SPECULATIVE}.base_spec_worker.BaseSpecWorker.target_worker"),
    Symbol(
        f"{_EAGLE}.req_to_token_pool|"
        f"{_SPECULATIVE}.base_spec_worker.BaseSpecWorker.req_to_token_pool"
    ),
    Symbol(f"{_EAGLE}.last_shared_read_runner|{_EAGLE}.war_fastpath_runner", ("self",)),
    Symbol(f"{_DRAFT_INPUT}.bonus_tokens"),
    Symbol(f"{_SPECULATIVE}.spec_info.SpeculativeAlgorithm.NONE"),
    Symbol(f"{_TARGET}.forward_batch_generation", ("self", "batch")),
    Symbol(f"{_RUNNER}.spec_algorithm"),
    Symbol(f"{_RUNNER}.attn_backend"),
    Symbol(f"{_RUNNER}.decode_cuda_graph_runner"),
    Symbol(f"{_RUNNER}.init_new_workspace"),
    Symbol(f"{_RUNNER}._get_attention_backend", ("self", "init_new_workspace")),
    Symbol(f"{_RUNNER}.is_hybrid_swa"),
    Symbol(f"{_RUNNER}.token_to_kv_pool"),
    Symbol(f"{_RUNNER}.shared_read_done_event|{_RUNNER}.war_fastpath_read_done_event"),
    Symbol(f"{_GRAPHS}.__init__", ("self", "model_runner")),
    Symbol(f"{_GRAPHS}.capture_bs"),
    Symbol(f"{_BATCH}.spec_info"),
    Symbol(f"{_BATCH}.input_ids"),
    Symbol(f"{_BATCH}.out_cache_loc"),
    Symbol(f"{_BATCH}.seq_lens"),
    Symbol(f"{_BATCH}.req_pool_indices"),
    Symbol(f"{_BATCH}.has_grammar"),
    Symbol(f"{_BATCH}.return_logprob"),
    Symbol(f"{_BATCH}.return_hidden_states"),
    Symbol(f"{_BATCH}.is_extend_in_batch"),
    Symbol(f"{_RESULT}.next_token_ids"),
    Symbol(f"{_RESULT}.accept_lens"),
    Symbol(f"{_RESULT}.new_seq_lens"),
    Symbol(f"{_RESULT}.next_draft_input"),
    Symbol(f"{_RESULT}.extra_keep_alive_refs"),
    Symbol(f"{_RESULT}.logits_output"),
)
"""What native rounds need besides; where one is missing they run cold, and all else goes on."""

PLAIN_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Classes of KV pools with one slot a token and nothing else to keep."""

MODE_KEY = "specgovernor_mode"
"""Key of the governor's own setting in such a request; SGLang takes numbers only."""


def installed_version() -> str:
    """Return the version of the SGLang that is installed, or an empty text."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""


def version_key(version: str) -> tuple[int, ...]:
    """Return a version as numbers that compare in release order.

    >>> version_key("0.5.15") < version_key("0.5.15.post1") < version_key("0.5.16.dev3")
    True
    """
    return tuple(int(number) for number in re.findall(r"\d+", version))


def check_symbols(version: str | None = None, package: Path | None = None) -> list[str]:
    """Return why the governor cannot run in this SGLang: one line a fault, empty if it can.

    Args:
        version: Version of SGLang; None for the installed one.
        package: Folder of the ``sglang`` package; None for the installed one.
    """
    version = installed_version() if version is None else version
    package = find_package("sglang") if package is None else package
    if not version or package is None:
        return [f"SGLang is not installed; install sglang {FIRST_SUPPORTED} to {LAST_SUPPORTED}"]
    if version_key(version) < version_key(FIRST_SUPPORTED):
        return [f"SGLang {version} is too old; supported are {FIRST_SUPPORTED} to {LAST_SUPPORTED}"]
    # A newer version is taken as soon as all that is used is still there.
    return [
        f"SGLang {version}: {fault}"
        for fault in missing_symbols(package, ((s.path, s.parameters) for s in SYMBOLS))
    ]


def check_native_symbols(package: Path | None = None) -> list[str]:
    """Return why native rounds cannot run in this SGLang: one line a fault, empty if they can.

    Args:
        package: Folder of the ``sglang`` package; None for the installed one.
    """
    package = find_package("sglang") if package is None else package
    if package is None:
        return ["SGLang is not installed"]
    return missing_symbols(package, ((s.path, s.parameters) for s in NATIVE_SYMBOLS))


def resolution_target(package: Path | None = None) -> str:
    """Return the method of ``ServerArgs`` that turns what the user asked for into settings."""
    package = find_package("sglang") if package is None else package
    newer = f"{SERVER_ARGS}.resolve_once"
    if package is not None and not missing_symbols(package, [(newer, ("self",))]):
        return newer
    return f"{SERVER_ARGS}.__post_init__"


def queues_differ_between_ranks(version: str) -> bool:
    """Tell whether each rank drops requests that waited too long by its own clock.

    Later versions broadcast the drop. Where they do not, the waiting queue is no input for a
    decision that all ranks must share.
    """
    limit = os.environ.get(WAITING_TIMEOUT, "")
    try:
        limited = float(limit) > 0.0
    except ValueError:
        limited = False
    return limited and version_key(version) < version_key("0.5.18")


def context_tokens(batch: Any) -> int:
    """Return the context tokens of a batch: as SGLang keeps them, a number, else added up.

    By NumPy: PyTorch's own sum wakes its threads, which takes 50 microseconds now and then.
    """
    total: int | None = batch.seq_lens_sum
    if total is not None:
        return total
    lengths = batch.seq_lens_cpu
    if lengths is not None:
        return int(lengths.numpy().sum())
    return sum([len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs])


def kv_use(scheduler: Any) -> float:
    """Return the share of the KV cache that requests hold; what may be evicted is free."""
    free = scheduler.token_to_kv_pool_allocator.available_size()
    try:
        free += scheduler.tree_cache.evictable_size()
    except NotImplementedError:  # Caches of hybrid models have two sizes, in 0.5.15.post1.
        free += scheduler.tree_cache.full_evictable_size()
    return 1.0 - float(free / scheduler.max_total_num_tokens)


def governed_params(scheduler: Any) -> Any:
    """Return the object that SGLang asks for steps, or None without adaptive speculation."""
    controller = getattr(scheduler.model_worker, "adaptive_controller", None)
    return None if controller is None else controller.params


def graph_batch_sizes(scheduler: Any) -> tuple[int, ...] | None:
    """Return the decode batch sizes with a CUDA graph, ascending; None without graphs."""
    runner = scheduler.tp_worker.model_runner.decode_cuda_graph_runner
    sizes = getattr(runner, "capture_bs", None)
    return tuple(sorted(int(size) for size in sizes)) if sizes else None


def prefilled_requests(batch: Any) -> list[Any]:
    """Return the requests of a batch that is no decode round, without those that decode in it."""
    decoding = batch.decoding_reqs
    if not decoding:
        return list(batch.reqs)
    return [request for request in batch.reqs if request not in decoding]


def requested_mode(request: Any) -> float | None:
    """Return the number that a request to change settings gives the governor's mode, if it does.

    Raises:
        ValueError: If it changes other settings as well: one of them might be refused.
    """
    settings: dict[str, float] = request.server_args
    if MODE_KEY not in settings:
        return None
    if len(settings) > 1:
        raise ValueError(f"expected {MODE_KEY} alone, got {', '.join(settings)}; send two requests")
    return settings[MODE_KEY]


def settings_reply(updated: bool) -> Any:
    """Return SGLang's answer to a request to change settings."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    return SetInternalStateReqOutput(updated=updated)


def metrics_labels(scheduler: Any) -> dict[str, Any] | None:
    """Return the labels of a scheduler's metrics, or None if it exports none."""
    reporter = scheduler.metrics_reporter
    if not getattr(reporter, "current_scheduler_metrics_enabled", False):
        return None
    labels: dict[str, Any] | None = getattr(reporter.metrics_collector, "labels", None)
    return None if labels is None else dict(labels)


def num_ranks(group: Any) -> int:
    """Return the number of ranks of a group."""
    import torch.distributed as distributed

    return int(distributed.get_world_size(group))


def from_first_rank(values: tuple[int, ...], group: Any) -> tuple[int, ...]:
    """Return the first rank's values; every rank of the group calls it with as many integers."""
    import torch
    import torch.distributed as distributed

    if distributed.get_world_size(group) == 1:
        return values
    shared = torch.tensor(values, dtype=torch.int64)
    distributed.broadcast(shared, distributed.get_global_rank(group, 0), group=group)
    return tuple(shared.tolist())


def candidate_steps_of(config: str | None) -> list[int]:
    """Return the candidate steps of SGLang's config file, from which it sizes its buffers."""
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    return list(resolve_candidate_steps_from_config(config))


def speculates(scheduler: Any) -> bool:
    """Tell whether the server was started with speculation."""
    return not scheduler.spec_algorithm.is_none()


def initial_steps(scheduler: Any) -> int:
    """Return the draft steps that the worker runs now; 0 without speculation."""
    return int(getattr(scheduler.model_worker, "speculative_num_steps", 0) or 0)


def target_model(scheduler: Any) -> str:
    """Return the target model as the operator named it."""
    return str(scheduler.server_args.model_path)


def draft_model(scheduler: Any) -> str:
    """Return the draft model as the operator named it; empty if it is part of the target."""
    return str(scheduler.server_args.speculative_draft_model_path or "")


def attention_backend(scheduler: Any) -> str:
    """Return the attention backend of decode rounds."""
    return str(scheduler.tp_worker.model_runner.decode_attention_backend_str)


def hardware(scheduler: Any) -> str:
    """Return the name of the accelerator, or ``"CPU"``."""
    import torch

    if str(scheduler.tp_worker.model_runner.device).startswith("cuda"):
        return str(torch.cuda.get_device_name())
    return "CPU"


def simulates_acceptance() -> bool:
    """Tell whether SGLang makes up how many drafts are accepted."""
    try:
        return float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "") or -1.0) > 0.0
    except ValueError:
        return False


def ask_for_adaptive(server_args: Any, config: str) -> None:
    """Switch adaptive speculation on, with a candidate-steps file, before settings are resolved."""
    server_args.speculative_adaptive = True
    server_args.speculative_adaptive_config = config


def unsupported_reason(server_args: Any) -> str | None:
    """Return why adaptive speculation cannot run with resolved settings, or None."""
    from sglang.srt.speculative.adaptive_spec_params import adaptive_unsupported_reason

    reason: str | None = adaptive_unsupported_reason(server_args)
    return reason


def is_resolved(server_args: Any) -> bool:
    """Tell whether settings were resolved before, as in a child process."""
    return bool(getattr(server_args, "_resolution_finished", False))


def native_obstacle(scheduler: Any) -> str:
    """Return what of a server native rounds were not made for; empty if nothing is known."""
    runner, args = scheduler.tp_worker.model_runner, scheduler.server_args
    pool = type(runner.token_to_kv_pool).__name__
    if not speculates(scheduler):
        return "the server does not speculate"
    if runner.is_hybrid_swa or pool not in PLAIN_POOLS:
        return f"the KV pool is a {pool}, expected one of {', '.join(PLAIN_POOLS)}"
    for name in ("enable_lora", "enable_hisparse", "enable_dp_attention", "enable_pdmux"):
        if getattr(args, name, False):
            return f"{name} is on"
    if runner.model_config.is_encoder_decoder:
        return "the model has an encoder"
    # An attribute of the runner in 0.5.15.post1.
    if getattr(runner.model_config, "model_is_mrope", getattr(runner, "model_is_mrope", False)):
        return "the model has multimodal positions"
    return ""


def free_bytes(runner: Any) -> int | None:
    """Return the free memory of a model runner's GPU; None on a CPU."""
    import torch

    if not str(runner.device).startswith("cuda"):
        return None
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


@contextlib.contextmanager
def target_without_speculation(runner: Any) -> Iterator[None]:
    """Let the target's model runner build what it builds in a server without speculation."""
    algorithm, workspace = runner.spec_algorithm, runner.init_new_workspace
    runner.spec_algorithm = type(algorithm).NONE
    try:
        yield
    finally:
        runner.spec_algorithm, runner.init_new_workspace = algorithm, workspace


def new_attention_backend(runner: Any) -> Any:
    """Return an attention backend of its own for a model runner, as each tier has one."""
    return runner._get_attention_backend(init_new_workspace=True)


def capture_decode_graphs(runner: Any, backend: Any) -> Any:
    """Capture the CUDA graphs of decode rounds with a backend; None where the server has none."""
    used = runner.attn_backend, runner.decode_cuda_graph_runner
    if used[1] is None:
        return None
    runner.attn_backend = backend
    try:
        return type(used[1])(runner, attn_backend=backend, speculative_num_draft_tokens=1)
    finally:
        runner.attn_backend = used[0]


class ReadEvent:
    """The event with which a forward pass says that it has read the tables that others share.

    The scheduler waits for that of the speculative worker's last phase, and for the whole pass if
    there is none; a native round's only phase is the target's.
    """

    def __init__(self, worker: Any, target: Any) -> None:
        """Find whom the scheduler asks, by the names of 0.5.23 and of earlier versions."""
        newer = hasattr(type(worker), "last_shared_read_runner")
        self._asked = worker.last_shared_read_runner if newer else worker.war_fastpath_runner
        self._name = "shared_read_done_event" if newer else "war_fastpath_read_done_event"
        self._target = target

    def clear(self) -> None:
        """Forget that of an earlier pass of the target."""
        setattr(self._target, self._name, None)

    def hand_over(self) -> None:
        """Give the target's to whom the scheduler asks."""
        setattr(self._asked, self._name, getattr(self._target, self._name))
