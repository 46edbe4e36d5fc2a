"""What each family's steps cost beyond its linear layers: python tests/bench/bench_families.py [FAMILY...].

Random models with a hidden size of 512 and 8 layers, built here, on one CPU thread: one prompt of 512 tokens, then
decode steps of 1 and of 16 rows, as a worker computes them from real plans. Ratios are to the model's linear layers
and experts alone, experts with as many rows as evenly spread tokens give them. Times are the thread's own CPU time,
which other processes disturb less than wall clock; medians over `--repeats` runs. --profile says where time goes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.local_engine import EngineOptions, LocalEngine, nan_memory
from support.parity_cases import NAMES
from support.tiny_families import FAMILIES, make_prompt

from blockferry.engine.config import DType
from blockferry.engine.models.layers import Linear
from blockferry.engine.models.moe import Experts
from blockferry.engine.wire import StepPlan, StepResult
from blockferry.engine.worker.worker import Worker

PROMPT_LEN, BATCH_PROMPT_LEN, NUM_ROWS, NUM_STEPS, NUM_DENSE_RUNS = 512, 128, 16, 24, 5
_MOE = {"moe_intermediate_size": 256}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
_PER_LAYER = {"layer_types", "full_attn_idxs", "no_rope_layers", "moe_layers", "mlp_only_layers", "mlp_layer_types"}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {**_MOE, "head_dim": 64},
    "gemma3_text": {"head_dim": 64, "sliding_window": 128},
    "gemma2": {"head_dim": 64, "sliding_window": 128},
    "gpt_oss": {"head_dim": 64, "intermediate_size": 256, "sliding_window": 128},
    "llama4_text": {
        "head_dim": 64,
        "intermediate_size": 256,
        "intermediate_size_mlp": 1024,
        "attention_chunk_size": 128,
    },
    "deepseek_v3": {
        **_MOE,
        "num_key_value_heads": 8,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "qwen3_next": {**_MOE, **_DELTA, "head_dim": 64, "shared_expert_intermediate_size": 256},
    "qwen3_5": {**_DELTA, "head_dim": 64},
    "jamba": {"mamba_dt_rank": 32},
    "bamba": {
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_chunk_size": 128,
        "attn_layer_indices": [3, 7],
    },
    "falcon_h1": {"head_dim": 64, "mamba_d_ssm": 768, "mamba_n_heads": 12, "mamba_d_head": 64, "mamba_d_state": 64},
    "lfm2": {"full_attn_idxs": [2, 5]},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of step."""

    name: str
    num_rows: int
    num_tokens: int


SHAPES = (
    Shape(name="prefill", num_rows=1, num_tokens=PROMPT_LEN),
    Shape(name="decode 1", num_rows=1, num_tokens=1),
    Shape(name="decode 16", num_rows=NUM_ROWS, num_tokens=NUM_ROWS),
)


class TimedWorker:
    """A worker that notes the seconds of every step."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.seconds: list[tuple[int, int, float]] = []  # rows, tokens, seconds

    def execute(self, plan: StepPlan) -> StepResult | None:
        """See Worker."""
        started_s = time.thread_time()
        result = self._worker.execute(plan)
        seconds = time.thread_time() - started_s
        self.seconds.append((len(plan.rows), int(plan.num_scheduled.sum()), seconds))
        return result

    def median_of(self, shape: Shape) -> float:
        """Of all steps of one shape."""
        wanted = (shape.num_rows, shape.num_tokens)
        return statistics.median(seconds for *step, seconds in self.seconds if tuple(step) == wanted)


def build_scaled(name: str, folder: Path, dtype: torch.dtype) -> Path:
    """A family's checkpoint, larger than its tiny one."""
    tiny = FAMILIES[name].make_config()
    sizes = _COMMON | SIZES[name]
    kept = {key: value for key, value in tiny.to_diff_dict().items() if key not in _PER_LAYER}
    config = type(tiny)(**(kept | sizes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder / name)
    return folder / name


def start(path: Path, dtype: DType) -> tuple[LocalEngine, TimedWorker, Worker]:
    """An engine without a prefix cache."""
    options = EngineOptions(
        dtype=dtype,
        max_model_len=768,
        max_rows=NUM_ROWS,
        max_num_batched_tokens=PROMPT_LEN,
        memory_bytes=1 << 28,
        enable_caching=False,
        num_steps_in_flight=1,
    )
    worker = Worker(options.worker_spec(path))
    worker.load()
    worker.init_cache(options.plan(path), nan_memory)
    timed = TimedWorker(worker)
    return LocalEngine(path, options, timed), timed, worker


def generate(engine: LocalEngine) -> None:
    """One long prompt, then a batch of shorter ones."""
    engine.generate([make_prompt(0, PROMPT_LEN)], NUM_STEPS)
    engine.generate([make_prompt(seed, BATCH_PROMPT_LEN) for seed in range(NUM_ROWS)], NUM_STEPS)


def dense_seconds(worker: Worker, shape: Shape) -> list[float]:
    """Seconds of linear layers and experts alone, a few times."""
    model = worker.model
    assert model.head is not None, "one rank has the head"
    work = [_dense(linear, shape.num_tokens) for linear in model.layer_linears] + [_dense(model.head, shape.num_rows)]
    # nobody but a benchmark wants to reach a layer's experts from outside
    work += [_even(experts, shape.num_tokens) for experts in gc.get_objects() if type(experts) is Experts]
    times = []
    for _ in range(NUM_DENSE_RUNS + 1):
        started_s = time.thread_time()
        for call in work:
            call()
        times.append(time.thread_time() - started_s)
    return times[1:]


def _dense(linear: Linear, num_rows: int) -> Callable[[], object]:
    x_TE = torch.full((num_rows, linear.in_features), 0.1, dtype=linear.dtype)
    return lambda: linear(x_TE)


def _even(experts: Experts, num_tokens: int) -> Callable[[], object]:
    """Both matmuls of every expert, as many of them as tokens of one step can reach."""
    linears = [layer._linears for layer in (experts._gate_up, experts._down)]  # type: ignore[attr-defined]  # see above
    num_pairs = num_tokens * 2  # close enough for all families here: they choose 1 to 3
    num_used = min(len(linears[0]), num_pairs)
    calls = [_dense(linear, max(1, num_pairs // num_used)) for layer in linears for linear in layer[:num_used]]
    return lambda: [call() for call in calls]


def lines(name: str, dtype: DType, repeats: int) -> Iterator[str]:
    """One family's row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        engine, timed, worker = start(build_scaled(name, Path(folder), getattr(torch, dtype)), dtype)
    generate(engine)  # compiles
    timed.seconds.clear()
    dense: dict[Shape, list[float]] = {shape: [] for shape in SHAPES}
    for _ in range(repeats):  # in turn, so that noise hits both
        generate(engine)
        for shape in SHAPES:
            dense[shape] += dense_seconds(worker, shape)
    cells = []
    for shape in SHAPES:
        step_s, dense_s = timed.median_of(shape), statistics.median(dense[shape])
        cells.append(f"{shape.num_tokens / step_s:8.0f} tok/s {step_s * 1e3:8.2f} ms {step_s / dense_s:6.2f}x")
    yield f"{name:12s} {dtype:9s} " + " |".join(cells)


def print_profile(name: str, dtype: DType) -> None:
    """Where one run's time goes."""
    with tempfile.TemporaryDirectory() as folder:
        engine, _, _ = start(build_scaled(name, Path(folder), getattr(torch, dtype)), dtype)
    generate(engine)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        generate(engine)
    print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=NAMES, help="default: all")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print("family: per step of " + ", ".join(shape.name for shape in SHAPES) + "; x: times the linear layers alone")
    for name in arguments.families:
        for dtype in map(DType, arguments.dtypes):
            if arguments.profile:
                print_profile(name, dtype)
            else:
                print(*lines(name, dtype, arguments.repeats), sep="\n", flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
