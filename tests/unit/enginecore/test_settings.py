import pytest

from enginecore.app import engine_options, load_options
from enginecore.settings import EnginecoreSettings
from services.errors import InvalidArgumentError
from services.settings import load_settings


def load(*argv: str) -> EnginecoreSettings:
    return load_settings(EnginecoreSettings, argv, prog="python -m enginecore")


def test_flags_have_vllms_names_and_reach_their_users() -> None:
    settings = load(
        *("--model", "m.gguf", "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "256", "--block-size", "32", "--no-enable-prefix-caching"),
        *("--num-gpu-blocks-override", "99", "--long-prefill-token-threshold", "40"),
        *("--scheduling-policy", "priority", "--max-num-queued-reqs", "5"),
        *("--worker-address", "unix:/a", "--worker-address", "unix:/b", "--dtype", "float32"),
    )
    options = engine_options(settings)
    assert not options.enable_prefix_caching
    assert (options.scheduler.max_num_seqs, options.scheduler.max_num_batched_tokens) == (8, 256)
    assert options.scheduler.scheduling_policy == "priority"
    assert options.scheduler.long_prefill_token_threshold == 40
    assert options.scheduler.limits.max_num_queued_reqs == 5
    assert (options.cache.block_size, options.cache.max_model_len) == (32, 512)
    assert options.cache.num_gpu_blocks_override == 99
    assert settings.worker_address == ("unix:/a", "unix:/b")
    assert load_options(settings).model == "m.gguf"
    assert load_options(settings).dtype == "float32"


def test_defaults() -> None:
    settings = load("--model", "m")
    assert settings.enable_prefix_caching
    assert settings.enable_chunked_prefill
    assert (settings.block_size, settings.max_num_batched_tokens) == (16, 2048)
    assert settings.max_model_len is None
    assert settings.shutdown_timeout == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--block-size", "0"),
        ("--max-num-seqs", "0"),
        ("--gpu-memory-utilization", "1.5"),
        ("--num-gpu-blocks-override", "1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(flag: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=flag):
        load("--model", "m", flag, value)
