"""The configuration: every key with its type, default and state in one table, and how it is read.

Keys come from the launch environment (`SM_HP_MP_PARAMETERS`, a JSON object) and from `smp.init(dict)`; those given at
launch win. Names, values and defaults are those of the SageMaker model parallel API, version 1.
"""

import dataclasses
import difflib
import json
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .exceptions import SMPConfigError
from .log import logger

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"


class _Rule(NamedTuple):
    """What a value must be: `convert` gives the value in its final type, or None if the value breaks the rule."""

    text: str
    convert: Callable[[Any], Any]


def _integer(minimum: int, accept_floats: bool = False) -> _Rule:
    """`accept_floats` is for sizes that scripts write as `5e8`."""

    def convert(value: Any) -> int | None:
        if accept_floats and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
            return None
        return int(value)

    return _Rule(f"an integer of at least {minimum}", convert)


def _number(minimum: float, maximum: float) -> _Rule:
    def convert(value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not minimum <= float(value) <= maximum:
            return None
        return float(value)

    bounds = f"of at least {minimum:g}" if maximum == float("inf") else f"from {minimum:g} to {maximum:g}"
    return _Rule(f"a number {bounds}", convert)


def _choice(*values: str) -> _Rule:
    text = " or ".join(repr(value) for value in values)
    return _Rule(text, lambda value: value if isinstance(value, str) and value in values else None)


_BOOL = _Rule("true or false", lambda value: value if isinstance(value, bool) else None)
_TEXT = _Rule("a string", lambda value: value if isinstance(value, str) else None)
_PLACEMENT = _Rule(
    "'cluster', 'spread' or a permutation of the letters D, P and T (the right-most varies fastest)",
    lambda value: (
        value
        if isinstance(value, str) and (value in ("cluster", "spread") or sorted(value) == ["D", "P", "T"])
        else None
    ),
)


class _Key(NamedTuple):
    """What the table knows of a key besides its name and type."""

    rule: _Rule
    default: Any
    # The name of the feature behind the key, where it does not exist yet: only the values in `off` are accepted then.
    missing: str | None = None
    off: tuple[Any, ...] = ()
    # Known from public scripts only, without a documented meaning: accepted with a warning, and without effect.
    from_scripts: bool = False


def _supported(rule: _Rule, default: Any) -> Any:
    return dataclasses.field(metadata={"key": _Key(rule, default)})


def _missing(rule: _Rule, default: Any, feature: str, also_off: tuple[Any, ...] = ()) -> Any:
    return dataclasses.field(metadata={"key": _Key(rule, default, missing=feature, off=(default, *also_off))})


def _from_scripts() -> Any:
    return dataclasses.field(metadata={"key": _Key(_BOOL, False, from_scripts=True)})


_SHARDED_DATA = "sharded data parallelism"


@dataclasses.dataclass(frozen=True)
class Config:
    """The effective configuration, one attribute for each key: `smp.state.cfg.microbatches`.

    Made by `load_config`, which has filled all defaults. `partitions` and `pipeline_parallel_degree` are equal.
    """

    # Pipeline.
    partitions: int = _supported(_integer(1), 1)
    pipeline_parallel_degree: int = _supported(_integer(1), 1)
    microbatches: int = _supported(_integer(1), 1)
    pipeline: str = _supported(_choice("interleaved", "simple"), "interleaved")
    active_microbatches: int = _supported(_integer(1), None)  # partitions + 2
    # Seconds without progress that end a step; 0: never.
    stall_timeout: float = _supported(_number(0, float("inf")), 300.0)
    # Random numbers by microbatch and module: dropout gives the same bits on any number of partitions.
    rng_by_module: bool = _supported(_BOOL, False)
    deterministic_server: bool = _missing(_BOOL, False, "one order of requests on all data-parallel ranks")

    # Placement of ranks and modules.
    placement_strategy: str = _supported(_PLACEMENT, "cluster")
    auto_partition: bool = _supported(_BOOL, True)
    default_partition: int = _supported(_integer(0), 0)
    optimize: str = _supported(_choice("memory", "speed"), "memory")
    memory_weight: float = _supported(_number(0, 1), None)  # 0.8 for memory, 0.2 for speed
    skip_tracing: bool = _supported(_BOOL, False)
    partition_file: str | None = _missing(_TEXT, None, "storing the partition decision")
    load_partition: bool | None = _missing(_BOOL, None, "reusing a stored partition decision", also_off=(False,))
    contiguous: bool = _supported(_BOOL, True)  # TensorFlow only, without effect
    horovod: bool = _missing(_BOOL, False, "Horovod (for TensorFlow)")

    # Data parallelism. `ddp` is accepted here, since with one replica it changes nothing.
    ddp: bool = _supported(_BOOL, False)
    ddp_port: int | None = _missing(_integer(0), None, "a process group for data parallelism")
    ddp_dist_backend: str = _missing(_choice("auto", "nccl"), "auto", "a choice of the data-parallel backend")

    # Tensor parallelism.
    tensor_parallel_degree: int = _missing(_integer(1), 1, "tensor parallelism")
    prescaled_batch: bool = _missing(_BOOL, False, "tensor parallelism (and so a batch that its ranks share)")

    # Memory and precision.
    offload_activations: bool = _missing(_BOOL, False, "offloading of activations")
    activation_loading_horizon: int = _missing(_integer(1), 4, "offloading of activations")
    shard_optimizer_state: bool = _missing(_BOOL, False, "sharding of the optimizer state")
    fp16_params: bool = _missing(_BOOL, False, "creating parameters in FP16")
    fp16: bool = _missing(_BOOL, False, "FP16 training with FP32 master weights")
    bf16: bool = _missing(_BOOL, False, "BF16 training")

    # Sharded data parallelism.
    sharded_data_parallel_degree: int = _missing(_integer(0), 1, _SHARDED_DATA, also_off=(0,))
    sdp_reduce_bucket_size: int = _missing(_integer(1, accept_floats=True), 500_000_000, _SHARDED_DATA)
    sdp_param_persistence_threshold: int = _missing(_integer(0, accept_floats=True), 1_000_000, _SHARDED_DATA)
    sdp_max_live_parameters: int = _missing(_integer(1, accept_floats=True), 1_000_000_000, _SHARDED_DATA)
    sdp_hierarchical_allgather: bool = _missing(_BOOL, True, _SHARDED_DATA)
    sdp_gradient_clipping: float = _missing(_number(0, float("inf")), 1.0, _SHARDED_DATA)

    # Seen in public scripts only.
    delayed_parameter_initialization: bool = _from_scripts()
    checkpoint_attentions: bool = _from_scripts()
    static_mode: bool = _from_scripts()
    fast_mode: bool = _from_scripts()
    _match_weights: bool = _from_scripts()
    _fp32_grad_accumulation: bool = _from_scripts()
    overlapping_allreduce: bool = _from_scripts()
    use_times: bool = _from_scripts()


_KEYS: dict[str, _Key] = {field.name: field.metadata["key"] for field in dataclasses.fields(Config)}
_ALIASES = ("partitions", "pipeline_parallel_degree")
_MEMORY_WEIGHTS = {"memory": 0.8, "speed": 0.2}


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    text = environment.get(ENVIRONMENT_VARIABLE, "")
    if not text.strip():
        return {}
    try:
        keys = json.loads(text)
    except json.JSONDecodeError as error:
        raise SMPConfigError(
            f"the environment variable {ENVIRONMENT_VARIABLE} is {text!r}: it must be a JSON object ({error}); "
            f'write it as \'{{"partitions": 2, "microbatches": 4}}\''
        ) from error
    if not isinstance(keys, dict):
        raise SMPConfigError(
            f"the environment variable {ENVIRONMENT_VARIABLE} holds {keys!r}: it must be a JSON object; "
            f'write it as \'{{"partitions": 2, "microbatches": 4}}\''
        )
    return keys


def _check_value(name: str, value: Any, source: str) -> Any:
    """The value in its final type. Raises SMPConfigError where it breaks the rule of its key."""
    key = _KEYS[name]
    if key.from_scripts or (value is None and key.default is None):
        return value
    converted = key.rule.convert(value)
    if converted is None:
        default = "" if key.default is None else f" (the default is {key.default!r})"
        raise SMPConfigError(
            f"the configuration key {name!r} is {value!r} (from {source}): it must be {key.rule.text}; "
            f"set such a value or leave the key out{default}"
        )
    if key.missing is not None and converted not in key.off:
        raise SMPConfigError(
            f"the configuration key {name!r} is {value!r} (from {source}), but this version does not have this feature "
            f"yet: {key.missing}; leave the key out" + ("" if key.default is None else f" or set it to {key.default!r}")
        )
    return converted


def _check_source(keys: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The known keys of one source, checked, with both names of the pipeline degree set where one is given."""
    values = {name: _check_value(name, value, source) for name, value in keys.items() if name in _KEYS}
    degrees = {values[name] for name in _ALIASES if name in values}
    if len(degrees) > 1:
        raise SMPConfigError(
            f"the configuration keys 'partitions' ({values['partitions']}) and 'pipeline_parallel_degree' "
            f"({values['pipeline_parallel_degree']}) differ (from {source}): they are two names of one setting; "
            "give one of them, or the same value to both"
        )
    for degree in degrees:
        values.update(dict.fromkeys(_ALIASES, degree))
    return values


def _warn_of_keys_without_effect(names: list[str]) -> None:
    """One warning for all keys that change nothing here: unknown ones, and those only seen in scripts."""
    parts = []
    ignored = sorted(name for name in names if name in _KEYS and _KEYS[name].from_scripts)
    if ignored:
        parts.append(f"accepted but without effect: {', '.join(map(repr, ignored))}")
    for name in sorted(name for name in names if name not in _KEYS):
        similar = difflib.get_close_matches(name, _KEYS, n=1)
        parts.append(f"unknown: {name!r}" + (f" (did you mean {similar[0]!r}?)" if similar else ""))
    if parts:
        logger.warning("configuration keys that change nothing; %s", "; ".join(parts))


def load_config(
    config: Mapping[str, Any] | None = None, *, environment: Mapping[str, str] | None = None, rank: int = 0
) -> Config:
    """Reads, checks and completes the configuration.

    Keys that are unknown or only known from scripts give one warning in all (on rank 0, logger `smp`).

    Args:
        config: the keys given to `smp.init`.
        environment: where `SM_HP_MP_PARAMETERS` is looked up; `os.environ` by default. Its keys win.
        rank: world rank of this process.

    Raises:
        SMPConfigError: a value breaks the rule of its key, asks for a feature that does not exist yet, or
            contradicts another key.

    Example:
        >>> load_config({"partitions": 2, "optimize": "speed"}, environment={}).memory_weight
        0.2
    """
    if config is not None and not isinstance(config, Mapping):
        raise SMPConfigError(
            f"the configuration is {config!r}: it must be a dict of keys and values; call "
            "smp.init({'partitions': 2, 'microbatches': 4})"
        )
    given = dict(config or {})
    unnamed = [name for name in given if not isinstance(name, str)]
    if unnamed:
        raise SMPConfigError(f"the configuration key {unnamed[0]!r} is no string: name each key by a string")
    launch = _read_environment(os.environ if environment is None else environment)

    # A key that the launch overrides is not checked: its value is never used.
    overridden = {*launch, *(_ALIASES if any(name in launch for name in _ALIASES) else ())}
    values: dict[str, Any] = {name: key.default for name, key in _KEYS.items()}
    values.update(_check_source({name: value for name, value in given.items() if name not in overridden}, "smp.init"))
    values.update(_check_source(launch, ENVIRONMENT_VARIABLE))

    if values["memory_weight"] is None:
        values["memory_weight"] = _MEMORY_WEIGHTS[values["optimize"]]
    if values["active_microbatches"] is None:
        values["active_microbatches"] = values["partitions"] + 2
    if values["default_partition"] >= values["partitions"]:
        raise SMPConfigError(
            f"the configuration key 'default_partition' is {values['default_partition']}: it must be below "
            f"partitions, {values['partitions']}; set it to at most {values['partitions'] - 1}"
        )
    if rank == 0:
        _warn_of_keys_without_effect([*given, *(name for name in launch if name not in given)])
    return Config(**values)
