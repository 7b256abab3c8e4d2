"""Reading, checking and completing the configuration."""

import dataclasses
import json
import logging
from typing import Any

import pytest

from smp.config import ENVIRONMENT_VARIABLE, Config, load_config
from smp.exceptions import SMPConfigError, SMPError


def load(config: dict[str, Any] | None = None, launch: dict[str, Any] | None = None, rank: int = 0) -> Config:
    environment = {} if launch is None else {ENVIRONMENT_VARIABLE: json.dumps(launch)}
    return load_config(config, environment=environment, rank=rank)


def error_of(config: dict[str, Any] | None = None, launch: dict[str, Any] | None = None) -> str:
    with pytest.raises(SMPConfigError) as caught:
        load(config, launch)
    return str(caught.value)


# Every documented key with its default, as in section 1.3 of the public documentation.
DEFAULTS = {
    "stall_timeout": 300.0,  # this library's own
    "rng_by_module": False,  # likewise
    "partitions": 1,
    "pipeline_parallel_degree": 1,
    "microbatches": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "placement_strategy": "cluster",
    "auto_partition": True,
    "default_partition": 0,
    "contiguous": True,
    "horovod": False,
    "memory_weight": 0.8,
    "ddp": False,
    "ddp_port": None,
    "ddp_dist_backend": "auto",
    "active_microbatches": 3,
    "deterministic_server": False,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "tensor_parallel_degree": 1,
    "prescaled_batch": False,
    "shard_optimizer_state": False,
    "fp16_params": False,
    "fp16": False,
    "bf16": False,
    "skip_tracing": False,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 5e8,
    "sdp_param_persistence_threshold": 1e6,
    "sdp_max_live_parameters": 1e9,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "partition_file": None,
    "load_partition": None,
}
SCRIPT_KEYS = [
    "delayed_parameter_initialization",
    "checkpoint_attentions",
    "static_mode",
    "fast_mode",
    "_match_weights",
    "_fp32_grad_accumulation",
    "overlapping_allreduce",
    "use_times",
]


def test_table_holds_every_documented_key_and_every_key_of_scripts() -> None:
    assert {field.name for field in dataclasses.fields(Config)} == {*DEFAULTS, *SCRIPT_KEYS}


@pytest.mark.parametrize(("key", "default"), DEFAULTS.items())
def test_defaults_are_filled(key: str, default: Any) -> None:
    assert getattr(load(), key) == default


@pytest.mark.parametrize(("key", "default"), [item for item in DEFAULTS.items() if item[1] is not None])
def test_each_default_can_be_given(key: str, default: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert getattr(load({key: default}), key) == default
    assert not caplog.records


def test_keys_that_scripts_read_are_attributes() -> None:
    cfg = load()
    assert all(hasattr(cfg, key) for key in ("fp16", "prescaled_batch", "shard_optimizer_state"))
    assert not hasattr(cfg, "no_such_key")


def test_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().microbatches = 4  # type: ignore[misc]


@pytest.mark.parametrize(("optimize", "weight"), [("memory", 0.8), ("speed", 0.2)])
def test_memory_weight_follows_optimize(optimize: str, weight: float) -> None:
    assert load({"optimize": optimize}).memory_weight == weight
    assert load({"optimize": optimize, "memory_weight": 0}).memory_weight == 0.0


def test_active_microbatches_follows_partitions() -> None:
    assert load({"partitions": 4}).active_microbatches == 6
    assert load({"partitions": 4, "active_microbatches": 1}).active_microbatches == 1
    # Scripts pass on an option that was not given.
    assert load({"partitions": 4, "active_microbatches": None}).active_microbatches == 6


def test_both_names_of_the_pipeline_degree_are_set() -> None:
    for key in ("partitions", "pipeline_parallel_degree"):
        cfg = load({key: 4})
        assert (cfg.partitions, cfg.pipeline_parallel_degree) == (4, 4)
    assert load({"partitions": 2, "pipeline_parallel_degree": 2}).partitions == 2


def test_pipeline_degrees_that_differ_are_refused() -> None:
    message = error_of({"partitions": 2, "pipeline_parallel_degree": 4})
    assert "'partitions' (2)" in message
    assert "'pipeline_parallel_degree' (4)" in message


def test_launch_keys_win_over_those_of_init() -> None:
    cfg = load({"partitions": 4, "microbatches": 2, "pipeline": "simple"}, launch={"partitions": 2, "microbatches": 8})
    assert (cfg.partitions, cfg.microbatches, cfg.pipeline) == (2, 8, "simple")


def test_launch_overrides_the_pipeline_degree_under_either_name() -> None:
    assert load({"pipeline_parallel_degree": 4}, launch={"partitions": 2}).pipeline_parallel_degree == 2
    assert load({"partitions": 4}, launch={"pipeline_parallel_degree": 2}).partitions == 2


def test_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"partitions": 2, "microbatches": 4}')
    cfg = load_config()
    assert (cfg.partitions, cfg.microbatches) == (2, 4)


def test_empty_environment_variable_gives_no_keys() -> None:
    assert load_config(environment={ENVIRONMENT_VARIABLE: " "}).partitions == 1


@pytest.mark.parametrize("text", ["{", "[1]", "2", "partitions=2"])
def test_environment_variable_must_be_a_json_object(text: str) -> None:
    with pytest.raises(SMPConfigError, match=f"{ENVIRONMENT_VARIABLE}.*JSON object"):
        load_config(environment={ENVIRONMENT_VARIABLE: text})


WRONG_VALUES = [
    ("stall_timeout", -1, "a number of at least 0"),
    ("stall_timeout", "long", "a number of at least 0"),
    ("rng_by_module", 1, "true or false"),
    ("partitions", 0, "an integer of at least 1"),
    ("partitions", True, "an integer of at least 1"),
    ("pipeline_parallel_degree", -1, "an integer of at least 1"),
    ("microbatches", "4", "an integer of at least 1"),
    ("microbatches", 2.0, "an integer of at least 1"),
    ("microbatches", None, "an integer of at least 1"),
    ("active_microbatches", 0, "an integer of at least 1"),
    ("default_partition", -1, "an integer of at least 0"),
    ("pipeline", "_only_forward", "'interleaved' or 'simple'"),
    ("pipeline", ["simple"], "'interleaved' or 'simple'"),
    ("optimize", "Memory", "'memory' or 'speed'"),
    ("memory_weight", 1.5, "a number from 0 to 1"),
    ("memory_weight", float("nan"), "a number from 0 to 1"),
    ("memory_weight", True, "a number from 0 to 1"),
    ("placement_strategy", "DPP", "'cluster', 'spread' or a permutation of the letters D, P and T"),
    ("placement_strategy", "dpt", "'cluster', 'spread' or a permutation of the letters D, P and T"),
    ("auto_partition", 1, "true or false"),
    ("ddp", "True", "true or false"),
    ("skip_tracing", None, "true or false"),
    ("partition_file", 3, "a string"),
    ("ddp_port", -1, "an integer of at least 0"),
    ("ddp_dist_backend", "mpi", "'auto' or 'nccl'"),
    ("tensor_parallel_degree", 0, "an integer of at least 1"),
    ("sdp_max_live_parameters", 0.5, "an integer of at least 1"),
    ("sdp_gradient_clipping", -1, "a number of at least 0"),
]


@pytest.mark.parametrize(("key", "value", "rule"), WRONG_VALUES)
def test_wrong_value_is_refused_with_key_value_rule_and_remedy(key: str, value: Any, rule: str) -> None:
    message = error_of({key: value})
    assert f"{key!r} is {value!r} (from smp.init)" in message
    assert f"must be {rule}" in message
    assert "leave the key out" in message


def test_wrong_value_at_launch_names_the_environment_variable() -> None:
    assert f"from {ENVIRONMENT_VARIABLE}" in error_of(launch={"microbatches": 0})


@pytest.mark.parametrize("placement", ["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"])
def test_placements_are_accepted(placement: str) -> None:
    assert load({"placement_strategy": placement}).placement_strategy == placement


SUPPORTED_VALUES = [
    ("stall_timeout", 2.5),
    ("rng_by_module", True),
    ("pipeline", "simple"),
    ("optimize", "speed"),
    ("memory_weight", 1),
    ("auto_partition", False),
    ("skip_tracing", True),
    ("contiguous", False),
    ("ddp", True),
    ("sharded_data_parallel_degree", 0),
    ("load_partition", False),
]


@pytest.mark.parametrize(("key", "value"), SUPPORTED_VALUES)
def test_values_that_are_supported_or_harmless_are_accepted_in_silence(
    key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert getattr(load({key: value}), key) == value
    assert not caplog.records


MISSING_FEATURES = [
    ("deterministic_server", True),
    ("partition_file", "partition.json"),
    ("load_partition", True),
    ("horovod", True),
    ("ddp_port", 29500),
    ("ddp_dist_backend", "nccl"),
    ("tensor_parallel_degree", 2),
    ("prescaled_batch", True),
    ("offload_activations", True),
    ("activation_loading_horizon", 8),
    ("shard_optimizer_state", True),
    ("fp16_params", True),
    ("fp16", True),
    ("bf16", True),
    ("sharded_data_parallel_degree", 2),
    ("sdp_reduce_bucket_size", 100),
    ("sdp_param_persistence_threshold", 0),
    ("sdp_max_live_parameters", 2e9),
    ("sdp_hierarchical_allgather", False),
    ("sdp_gradient_clipping", 0.5),
]


@pytest.mark.parametrize(("key", "value"), MISSING_FEATURES)
def test_features_that_do_not_exist_yet_are_refused_as_such(key: str, value: Any) -> None:
    message = error_of({key: value})
    assert repr(key) in message
    assert repr(value) in message
    assert "does not have this feature yet" in message


def test_default_partition_must_exist() -> None:
    assert load({"partitions": 2, "default_partition": 1, "auto_partition": False}).default_partition == 1
    message = error_of({"partitions": 2, "default_partition": 2})
    assert "'default_partition' is 2" in message
    assert "below partitions, 2" in message


@pytest.mark.parametrize("key", [*SCRIPT_KEYS, "no_such_key"])
@pytest.mark.parametrize("value", [True, None, "text"])
def test_key_without_effect_gives_one_warning(key: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    load({key: value, "partitions": 2})
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("smp", logging.WARNING)
    assert repr(key) in record.getMessage()


def test_several_keys_without_effect_share_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    load({"static_mode": False, "microbatch": 2}, launch={"static_mode": False, "fast_mode": False})
    (record,) = caplog.records
    message = record.getMessage()
    assert message.count("'static_mode'") == 1
    assert "'fast_mode'" in message
    assert "did you mean 'microbatches'?" in message


def test_only_the_first_rank_warns(caplog: pytest.LogCaptureFixture) -> None:
    load({"no_such_key": 1}, rank=1)
    assert not caplog.records


@pytest.mark.parametrize("config", [[("partitions", 2)], "partitions=2", 2])
def test_configuration_must_be_a_dict(config: Any) -> None:
    with pytest.raises(SMPConfigError, match="must be a dict"):
        load_config(config, environment={})


def test_keys_must_be_strings() -> None:
    with pytest.raises(SMPConfigError, match="key 2 is no string"):
        load_config({2: "partitions"}, environment={})  # type: ignore[dict-item]


def test_configuration_errors_are_value_errors_and_errors_of_the_library() -> None:
    assert issubclass(SMPConfigError, ValueError)
    assert issubclass(SMPConfigError, SMPError)
