"""A --config file is read as vLLM's own parser reads it."""

from pathlib import Path

import pytest

from spmd_serve.config.config_file import expand
from spmd_serve.errors import UsageError

MIXED = """
model: some/model
tensor-parallel-size: 1
enable-prefix-caching: false
enforce-eager: true
disable-log-stats: false
served-model-name: [a, b]
api-key: []
compilation-config:
  pass_config: {fuse_allreduce_rms: true}
max_model_len: 1k
port: 8123
"""


def file(folder: Path, text: str) -> str:
    path = folder / "flags.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.filterwarnings("ignore")
class TestBesideVllm:
    def test_the_words_are_those_that_vllms_own_parser_makes(self, tmp_path: Path) -> None:
        from spmd_serve.engine.config import make_parser

        path, parser = file(tmp_path, MIXED), make_parser()
        assert expand(["--config", path], parser) == parser.load_config_file(path)
        for words in (["m", "--port=1", "--config", path, "-tp", "2"], ["--port=1", "--config", path]):
            assert expand(words, parser) == parser._pull_args_from_config(words)

    def test_a_size_in_the_file_counts_as_given(self, tmp_path: Path) -> None:
        from spmd_serve.engine.config import parse_serve

        args = parse_serve(["--config", file(tmp_path, MIXED)])
        assert (args.model, args.port, args.max_model_len) == ("some/model", 8123, 1000)
        assert (args.enforce_eager, args.enable_prefix_caching) == (True, False)
        assert args.given_sizes["tensor_parallel_size"] == 1
        assert args.given_sizes["pipeline_parallel_size"] is None
        assert args.config is None

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("nnodes: 2", "--nnodes contradicts torchrun"),
            ("headless: true", "--headless cannot be used"),
            ("nodes: 2", "unrecognized arguments: --nodes"),
        ],
    )
    def test_what_is_refused_on_the_command_line_is_refused_in_the_file(
        self, tmp_path: Path, content: str, said: str
    ) -> None:
        from spmd_serve.engine.config import parse_serve

        with pytest.raises(UsageError, match=said):
            parse_serve(["m", "--config", file(tmp_path, content)])

    def test_a_flag_of_batch_that_is_repeated_takes_a_list(self, tmp_path: Path) -> None:
        from spmd_serve.batch import BatchOptions
        from spmd_serve.engine.config import parse_serve

        args = parse_serve(["m", "--config", file(tmp_path, "stop: [x, y]")], BatchOptions.add_to)
        assert args.stop == ["x", "y"]
