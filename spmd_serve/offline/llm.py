"""`spmd_serve.LLM`: vLLM's LLM for scripts that torchrun starts on every rank."""

import functools
import inspect
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers import cached_tokenizer_from_config

from spmd_serve.offline import options
from spmd_serve.offline.call_check import own_call
from spmd_serve.offline.engine_view import EngineView
from spmd_serve.offline.session import Session
from spmd_serve.offline.split_prompts import PROMPTS, combine, gather, spread

_NOT_COLLECTIVE = ("get_tokenizer", "get_world_size", "get_default_sampling_params", "from_engine_args")
_PARAMS = ("sampling_params", "pooling_params", "params")


class LLM(vllm.LLM):
    """vLLM's `LLM` under torchrun: every rank makes the same calls, and gets the same results.

    Arguments and methods are those of `vllm.LLM`; the sizes (`tensor_parallel_size` and so on) follow
    torchrun's ranks as in `spmd_serve serve`. In addition:

    outputs_on: "all" (default): every rank gets a call's result; "driver": only rank 0 does, others None.
    call_timeout: seconds within which all ranks must make the same call (default 300); the time of the work
    itself is not limited.
    join_timeout, rank_timeout, step_timeout, interface, control_backend, control_key_file,
    control_allow_class: as the flags of `spmd_serve serve`.

    Every public method is a collective call: all ranks make it, in the same order, with the same arguments;
    else every rank gets an error that names the call of each rank. `get_tokenizer`, `get_world_size` and
    `get_default_sampling_params` are not: any rank may call them at any time.

    The arguments of `collective_rpc` and `apply_model` stay in their process: each shard runs the function
    that its own rank has passed, with that rank's arguments and tensors. All ranks' results are returned.

    With `data_parallel_size=N` prompts are split over N replicas, and results are returned in order. With
    `distributed_executor_backend="external_launcher"`, as in scripts for vLLM's own torchrun support, each
    replica gets its own prompts from its ranks instead, and only its ranks get the results.

    The end of a `with` block, `close()` and the end of the script close it on every rank. Raises UsageError
    for arguments that cannot work, with the same text on every rank.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        ours, engine = options.split({"model": model, **arguments})
        self._session = Session(ours, engine)
        self.model_config = self._session.config.model_config
        self.supported_tasks = self._session.supported_tasks
        self.runner_type = self.model_config.runner_type
        self.default_sampling_params: dict[str, Any] | None = None
        self._queued: list[list[int]] = [[] for _ in range(self._session.layout.dp)]
        self._drop = weakref.finalize(self, self._session.close, "has dropped the LLM", 0)
        self._drop.atexit = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an LLM from EngineArgs; an argument with its default value counts as not given."""
        fields = EngineArgs.__dataclass_fields__
        changed = {
            name: value for name, value in vars(engine_args).items() if _is_changed(fields[name], value)
        }
        return cls(**{"model": engine_args.model, **changed})

    @property
    def llm_engine(self) -> EngineView:
        """The engine (see `EngineView`)."""
        return EngineView(self._session)

    @property
    def rank(self) -> int:
        """This process's global rank, as torchrun numbers it."""
        return self._session.me.rank

    @property
    def worker(self) -> Any:
        """vLLM's worker of this rank, with its part of the model; use it only between calls."""
        return self._session.shard.worker

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; not a collective call."""
        return cached_tokenizer_from_config(self.model_config)

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of ranks, or with `include_dp=False` those of one replica; not a collective call."""
        layout = self._session.layout
        return layout.world_size if include_dp else layout.replica_size

    # Collective calls: all other public methods of vllm.LLM are made by `_collective` below.

    def _call(self, method: str, arguments: dict[str, Any], everywhere: bool) -> Any:
        session = self._session
        replicas = 1 if session.own_prompts else session.layout.dp
        mine = 0 if session.own_prompts else session.replica
        if replicas > 1 and method in PROMPTS:
            return self._spread(method, arguments, mine, everywhere)
        if replicas > 1 and method == "wait_for_completion":
            return self._gather_queued(arguments, everywhere)

        merge = functools.partial(combine, method)
        own = own_call(method, arguments)

        def run() -> Any:
            return session.run_own(arguments.get("timeout")) if own else self._run(method, arguments)

        if session.own_prompts and session.lockstep is not None:
            values = session.call(method, {}, run, list, own=own)
            return values[session.replica] if everywhere or session.is_driver else None
        return session.call(method, arguments, run, merge, everywhere, own)

    def _spread(self, method: str, arguments: dict[str, Any], mine: int, everywhere: bool) -> Any:
        parts = spread(method, arguments, self._session.layout.dp)
        places = [where for _, where in parts]

        def run() -> Any:
            part = parts[mine][0]
            return [] if part is None else self._run(method, part)

        result = self._session.call(method, arguments, run, lambda values: gather(values, places), everywhere)
        if method.startswith("enqueue"):
            done = sum(map(len, self._queued))
            for queued, where in zip(self._queued, places, strict=True):
                queued += [done + place for place in where]
        return result

    def _gather_queued(self, arguments: dict[str, Any], everywhere: bool) -> Any:
        places, self._queued = self._queued, [[] for _ in self._queued]

        def run() -> Any:
            return self._run("wait_for_completion", arguments) if places[self._session.replica] else []

        return self._session.call(
            "wait_for_completion", arguments, run, lambda values: gather(values, places), everywhere
        )

    def _run(self, method: str, arguments: dict[str, Any]) -> Any:
        """On a driver, call vLLM's own method, with copies of the parameters, which vLLM changes."""
        target = getattr(self._session.llm, method)
        signature = inspect.signature(target)
        bound = signature.bind_partial()
        known: dict[int, Any] = {}
        for name, value in arguments.items():
            bound.arguments[name] = _clone(value, known) if name in _PARAMS else value
        return target(*bound.args, **bound.kwargs)

    def close(self) -> None:
        """Close the LLM on all ranks together, at the first call. Raises UsageError (see call_timeout)."""
        self._drop.detach()
        self._session.close("has closed the LLM", self._session.options.call_timeout)

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if problem is None:
            self.close()
            return
        self._drop.detach()
        text = " ".join(f"{type(problem).__name__}: {problem}".split())
        # Tell the other ranks, but do not wait for them: they may be busy.
        self._session.close(f"has left its with block by {text}", 0)

    def __repr__(self) -> str:
        session = self._session
        layout = session.layout
        sizes = f"tp={layout.tp}, pp={layout.pp}, dp={layout.dp}"
        return f"LLM(model={self.model_config.model!r}, {sizes}, rank {self.rank} of {layout.world_size})"

    def __getattr__(self, name: str) -> Any:
        session = self.__dict__.get("_session")
        if session is not None and session.llm is not None and not name.startswith("_"):
            return getattr(session.llm, name)
        raise AttributeError(f"this LLM has no attribute {name!r}, or only on a rank that drives a replica")


def _collective(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: LLM, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        everywhere = self._session.options.outputs_on == "all"
        return self._call(name, arguments, everywhere)

    return method


for _name in dir(vllm.LLM):
    _original = inspect.getattr_static(vllm.LLM, _name)
    if not _name.startswith("_") and inspect.isfunction(_original) and _name not in _NOT_COLLECTIVE:
        setattr(LLM, _name, _collective(_name, _original))


def _clone(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, list | tuple):
        return [_clone(item, known) for item in value]
    if not hasattr(value, "clone"):
        return value
    if id(value) not in known:
        known[id(value)] = value.clone()
    return known[id(value)]


def _is_changed(field: Any, value: Any) -> bool:
    try:
        default = field.default_factory() if callable(field.default_factory) else field.default
        return bool(value != default)
    except (TypeError, ValueError):
        return True
