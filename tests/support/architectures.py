"""The architectures of the tests' tiny models, and sizes at which they load in milliseconds."""

EOS_TOKEN_ID = 0
DEFAULT_VOCAB_SIZE = 288
MAX_POSITIONS = 512
SLIDING_WINDOW = 12

_DENSE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}

_GEMMA4 = _DENSE | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": DEFAULT_VOCAB_SIZE,
    "final_logit_softcapping": 30.0,
}

_DELTA = _DENSE | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 16}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
# Latents of 16 numbers, of which keys of 12 and values of 8 are made, and rotated parts of 8.
_LATENT = _DENSE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}

_HEADS = _DENSE | {"head_dim": 16}
_SLIDING = _HEADS | {"sliding_window": SLIDING_WINDOW}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# What the engine serves: transformers' model_type and its configuration, by our name.
SERVED = {
    "llama": ("llama", _DENSE),
    "qwen2": ("qwen2", _HEADS),
    "qwen3": ("qwen3", _HEADS),
    "mistral-sliding": ("mistral", _SLIDING),
    "mixtral": ("mixtral", _DENSE | _LOCAL_EXPERTS | {"sliding_window": None}),
    # Every layer has experts, of which all tokens of a step ask different ones.
    "qwen3-moe": ("qwen3_moe", _HEADS | _EXPERTS | {"norm_topk_prob": True}),
    # One expert more is for every row, as much as a gate says.
    "qwen2-moe": (
        "qwen2_moe",
        _HEADS | _EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    # Phi-4: one projection for queries, keys and values, and one for gate and up.
    "phi3": ("phi3", _DENSE | {"head_dim": 12}),
    "starcoder2": (
        "starcoder2",
        _DENSE
        | {
            "sliding_window": None,
            "use_bias": True,
            "embedding_dropout": 0.0,
            "residual_dropout": 0.0,
        },
    ),
    "gemma2": ("gemma2", _SLIDING | {"num_hidden_layers": 4, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", _SLIDING | {"layer_types": _ALTERNATING}),
    # As the small ones are: the last layers read the keys of the last of their kind before, whose
    # heads are larger where there is no window; each layer has embeddings of its own.
    "gemma4": ("gemma4_text", _GEMMA4 | {"num_kv_shared_layers": 3}),
    "gemma3n": (
        "gemma3n_text",
        _GEMMA4
        | {
            "num_kv_shared_layers": 3,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5] * 6,
        },
    ),
    # As the large ones are: fewer key heads where there is no window, whose keys are the values.
    "gemma4-large": (
        "gemma4_text",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        _SLIDING
        | _LOCAL_EXPERTS
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_types": _ALTERNATING,
        },
    ),
    # Its layers do not name their window; only the mask knows it.
    "phimoe": ("phimoe", _DENSE | _LOCAL_EXPERTS | {"sliding_window": SLIDING_WINDOW}),
    "gpt2": (
        "gpt2",
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": MAX_POSITIONS,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-neox": ("gpt_neox", _DENSE | {"rotary_pct": 0.5}),
    "olmo2": ("olmo2", _DENSE),
    # Llama's layers but for one thing each.
    "granite": ("granite", _HEADS | {"residual_multiplier": 0.5, "attention_multiplier": 0.25}),
    "smollm3": ("smollm3", _HEADS | {"no_rope_layers": [1, 0, 1]}),
    # GLM-4.5: every layer behind the first has experts.
    "glm4-moe": (
        "glm4_moe",
        _HEADS
        | {
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.5,
        },
    ),
    # Layers of the gated delta rule beside attention.
    "qwen3-next": ("qwen3_next", _DELTA | _SHARED_EXPERT),
    "qwen3.5": ("qwen3_5_text", _DELTA),
    "qwen3.5-moe": ("qwen3_5_moe_text", _DELTA | _SHARED_EXPERT),
    # Layers of short convolutions beside attention.
    "lfm2": (
        "lfm2",
        _DENSE
        | {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    ),
    "lfm2-moe": (
        "lfm2_moe",
        _DENSE
        | _EXPERTS
        | {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "num_dense_layers": 1,
        },
    ),
    "lfm3": (
        "lfm3",
        _SLIDING
        | {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        },
    ),
    # DeepSeek V3: its scores are scaled once more where its rotation is stretched.
    "deepseek-v3": ("deepseek_v3", _LATENT | {"rope_parameters": _YARN}),
    # Its queries have no latents; it rotates by complex numbers.
    "deepseek-v2": ("deepseek_v2", _LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    # GLM-4.7-Flash.
    "glm4-moe-lite": ("glm4_moe_lite", _LATENT | {"rope_interleave": False}),
    "minicpm3": ("minicpm3", _LATENT),
    "youtu": ("youtu", _LATENT),
    # Beyond its original length its queries are scaled by their positions.
    "ministral3": (
        "ministral3",
        _HEADS | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5}},
    ),
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
_MISTRAL = _HEADS | {"model_type": "mistral", "sliding_window": None}
_MINISTRAL = {**SERVED["ministral3"][1], "model_type": "ministral3"}
# Latents, and queries that are scaled by their positions.
_MISTRAL4 = _LATENT | {
    "model_type": "mistral4",
    "rope_parameters": _MINISTRAL["rope_parameters"],
    "first_k_dense_replace": 3,
}
_PIXTRAL = _VISION | {"model_type": "pixtral"}
# Its rows of positions are those of time, height and width.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}

_QWEN_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 3,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}

# Models of images and text, of which the text's part is served.
BY_TEXT = {
    "gemma3-vision": (
        "gemma3",
        {"text_config": SERVED["gemma3"][1], "vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "gemma4-vision": (
        "gemma4",
        {"text_config": SERVED["gemma4"][1], "vision_config": _VISION, "audio_config": None},
    ),
    "mistral3": (
        "mistral3",
        {"text_config": _MISTRAL, "vision_config": _PIXTRAL, "tie_word_embeddings": False},
    ),
    # Its one embedding is the output layer too, which the whole's configuration alone says.
    "mistral3-tied": (
        "mistral3",
        {"text_config": _MINISTRAL, "vision_config": _PIXTRAL, "tie_word_embeddings": True},
    ),
    "mistral4": (
        "mistral3",
        {"text_config": _MISTRAL4, "vision_config": _PIXTRAL, "tie_word_embeddings": False},
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {
            "text_config": _HEADS | {"rope_parameters": _ROPE | {"mrope_interleaved": True}},
            "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
        },
    ),
    "qwen3.5-vision": ("qwen3_5", {"text_config": _DELTA, "vision_config": _QWEN_VISION}),
}

# What it refuses, by name.
REFUSED = {
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "llama4": (
        "llama4_text",
        _HEADS | {"num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 16},
    ),
    # An indexer says which latents a row attends to.
    "deepseek-v32": ("deepseek_v32", _LATENT | {"index_n_heads": 2, "index_head_dim": 16}),
    # Its router's weight is read by its name.
    "longcat": ("longcat_flash", _LATENT | {"head_dim": 8, "expert_ffn_hidden_size": 16}),
    "diffllama": ("diffllama", _DENSE),
    "doge": ("doge", _DENSE),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "t5": (
        "t5",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": EOS_TOKEN_ID,
        },
    ),
}
