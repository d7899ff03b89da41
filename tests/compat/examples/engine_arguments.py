"""Embeddings and a profile, with the options of a command line."""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.config import AttentionConfig, ProfilerConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_open_port
from vllm.utils.print_utils import print_embeddings
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def parse_args() -> Namespace:
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.add_argument("--folder")
    parser.set_defaults(runner="pooling", enforce_eager=True, max_model_len=64)
    return parser.parse_args()


def main(args: dict) -> None:
    folder = args.pop("folder")
    config = AttentionConfig(backend=AttentionBackendEnum.FLEX_ATTENTION)
    assert config == AttentionConfig(backend=AttentionBackendEnum.FLEX_ATTENTION)
    assert repr(config).startswith("AttentionConfig(backend=")
    args["attention_config"] = config
    args["profiler_config"] = ProfilerConfig(profiler="torch", torch_profiler_dir=folder)
    assert current_platform.get_device_total_memory() > 2**20
    assert 0 < get_open_port() < 2**16
    llm = LLM(**args)
    for output in llm.embed(["Hello, my name is", "The capital of France is"]):
        print_embeddings(output.outputs.embedding)
    llm.start_profile()
    llm.generate("the cat", SamplingParams(max_tokens=2))
    llm.stop_profile()


if __name__ == "__main__":
    main(vars(parse_args()))
