"""Published config.json values (Hugging Face: zai-org/GLM-5, zai-org/GLM-4.5-Air), and tiny models of every architecture."""

GLM_5 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "num_nextn_predict_layers": 1,
}

GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "attention_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "num_nextn_predict_layers": 1,
}

_TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_TINY_MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}

TINY = {
    "llama": _TINY
    | {
        "head_dim": 32,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-linear": _TINY
    | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "qwen3": _TINY | {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": _TINY
    | _TINY_MOE
    | {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "glm4_moe": _TINY
    | _TINY_MOE
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "head_dim": 32,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "glm_moe_dsa": _TINY
    | _TINY_MOE
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "index_topk": 16,
        "index_head_dim": 32,
        "index_n_heads": 8,
        "indexer_types": ["full", "full", "shared"],
        "initializer_range": 0.1,
    },
    "glm4_moe-qk_norm": _TINY | _TINY_MOE | {"n_routed_experts": 8, "head_dim": 32, "use_qk_norm": True},
}
"""Keyword arguments of transformers' configuration classes; what stands before the dash is the architecture."""
