"""What parity tests of deployments share: the model they serve and the comparison of what it answered."""

from __future__ import annotations

from collections.abc import Sequence

from support.cluster import MODEL, Completion
from support.parity import ParityPrompt, Reference

MODEL_YAML = f"model: {{name: {MODEL}, dtype: float32, max_model_len: 2048}}\n"


def check(
    reference: Reference, prompts: Sequence[ParityPrompt], completions: Sequence[Completion], num_tokens: int
) -> None:
    """Every completion is as long as asked and greedy."""
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == num_tokens, (prompt.name, completion.finish_reason)
        expected = reference.greedy_after(prompt.token_ids, completion.token_ids)
        assert completion.token_ids == expected, prompt.name
