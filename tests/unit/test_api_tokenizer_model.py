"""The served checkpoint's own tokenizer, against transformers and against its own full decode."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockferry.cluster.api.tokenizer import Tokenizer
from blockferry.engine.config import cache_dir

FOLDER = cache_dir() / "models" / "smollm2-135m-instruct"
TEXTS = [
    "",
    " leading space",
    "The capital of France is Paris.",
    "def f(x):\n\treturn x ** 2  # 平方\n",
    "你好，世界！😀👩‍👩‍👧 naïve Привет مرحبا",
    "<|im_start|>user\nhi<|im_end|>",
    "a" * 3000,
]
CONVERSATION = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": " And of 日本? "},
]


@pytest.fixture(scope="module")
def ours():
    if not (FOLDER / "tokenizer.json").exists():
        pytest.skip(f"{FOLDER} is not there; run `blockferry fetch-model smollm2-135m-instruct`")
    return Tokenizer.load(FOLDER)


@pytest.mark.model
@pytest.mark.slow
def test_ids_and_prompts_equal_those_of_transformers(ours):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
    for has_prompt in (False, True):
        rendered = ours.chat_template.render(CONVERSATION, add_generation_prompt=has_prompt, variables={})
        expected = theirs.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=has_prompt)
        assert rendered == expected


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
@settings(max_examples=100, deadline=None)
def test_arbitrary_tokens_decode_piece_by_piece_like_the_whole(ours, ids):
    detokenizer = ours.detokenizer((), skip_special_tokens=True)
    pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
    assert "".join(pieces) == ours.decode(ids)


def test_the_server_needs_neither_torch_nor_transformers():
    heavy = "('torch', 'transformers', 'ray')"
    code = f"import sys, blockferry.cluster.api.app; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
