"""Sets larger than memory: a process whose memory is limited reads, shuffles and resumes files of twice the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pyarrow as pa
import pyarrow.parquet
import pytest

MB = 2**20
ROWS = 60_000
LIMIT = 60  # MB of memory that the process may allocate after its imports
ENVIRONMENT = {  # one thread each, because stacks count; and an allocator that reserves nothing ahead
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "ARROW_IO_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PROGRAM = """
    import json, re, resource, sys
    from pathlib import Path

    sys.modules["torch"] = None  # tokenizers do not need it, and its import takes seconds
    import pyarrow.parquet
    from transformers import PreTrainedTokenizerFast

    from engine_core.config.models import DataConfig
    from engine_core.data import PromptSource

    tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
    held = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + int(sys.argv[2]), held + int(sys.argv[2])))

    for file in map(Path, sys.argv[3:]):
        config = DataConfig(train=str(file), max_prompt_tokens=10_000)
        source = PromptSource(config, tokenizer, seed=0)
        first = source.take(10)
        state = json.loads(json.dumps(source.state()))
        expected = [prompt.id for prompt in source.take(5)]
        resumed = PromptSource(config, tokenizer, seed=0)
        resumed.load_state(state)
        assert [prompt.id for prompt in resumed.take(5)] == expected
        assert all(prompt.text.startswith(prompt.columns["answer"]) for prompt in first)
        try:
            file.read_bytes()
        except MemoryError:
            print(file.name, len({prompt.id for prompt in first}), len(source._rows))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_tokenizer):
    """A folder with a tokenizer, ``rows.jsonl``, and ``rows.parquet`` of one uncompressed row group."""
    path = tmp_path_factory.mktemp("large")
    make_tokenizer(template=None).save_pretrained(path / "tokenizer")
    text = "What is 12 plus 7? " * 110
    with (path / "rows.jsonl").open("w") as file:
        for number in range(ROWS):
            file.write(f'{{"prompt": "{number} {text}", "answer": "{number}"}}\n')
    answers = [str(number) for number in range(ROWS)]
    table = pa.table({"prompt": [f"{number} {text}" for number in answers], "answer": answers})
    pyarrow.parquet.write_table(
        table, path / "rows.parquet", row_group_size=ROWS, compression="none", use_dictionary=False
    )
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux counts it")
def test_sets_of_twice_the_memory_are_read_shuffled_and_resumed(folder):
    files = [folder / "rows.jsonl", folder / "rows.parquet"]
    assert min(file.stat().st_size for file in files) > 1.9 * LIMIT * MB
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), folder / "tokenizer", str(LIMIT * MB), *files]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("this system does not limit RLIMIT_DATA")
    assert done.stdout.splitlines() == [f"{file.name} 10 {ROWS}" for file in files]
