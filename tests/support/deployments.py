"""A small deployment file and the config.json of its checkpoint."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 72,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}

PD = """
name: test
model: {path: model}
instances:
  - {role: prefill}
  - {role: decode, replicas: 2}
"""
