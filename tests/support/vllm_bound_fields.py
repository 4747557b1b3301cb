"""The fields of vLLM's configuration that determine KV, as decided for the newest known version."""

from __future__ import annotations

from collections.abc import Mapping

BOUND: Mapping[str, str] = {
    "model_config": "runner convert trust_remote_code dtype hf_config hf_text_config code_revision "
    "max_model_len quantization quantization_config disable_sliding_window model_impl model_class_overrides "
    "multimodal_config spec_target_max_model_len",
    "multimodal_config": "language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize "
    "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
    "mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method allow_missing_mm_embeddings",
    "cache_config": "block_size kv_cache_layout cache_dtype sliding_window kv_cache_dtype_skip_layers "
    "mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype "
    "mamba_cache_mode replayssm_buffer_len use_replayssm use_kda_recoverssm kv_sharing_fast_prefill "
    "swa_bounded_replay calculate_kv_scales",
    "parallel_config": "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size "
    "decode_context_parallel_size dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate "
    "cp_kv_cache_interleave_size enable_hc_sp enable_expert_parallel all2all_backend worker_cls "
    "worker_extension_cls",
    "scheduler_config": "runner_type disable_chunked_mm_input scheduler_cls",
    "device_config": "device_type",
    "load_config": "load_format model_loader_extra_config ignore_patterns",
    "attention_config": "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version "
    "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
    "use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend "
    "use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits hisparse_config use_non_causal "
    "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
    "flex_attn_q_block_size flex_attn_kv_block_size",
    "mamba_config": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
    "kernel_config": "ir_op_priority moe_backend sparse_indexer_topk_backend linear_backend "
    "linear_backend_per_quant",
    "lora_config": "max_lora_rank fully_sharded_loras lora_dtype target_modules enable_tower_connector_lora "
    "enable_mixed_moe_lora_format enable_moe_shared_loras",
    "speculative_config": "num_speculative_tokens method tensor_parallel_size draft_tensor_parallel_size "
    "quantization moe_backend attention_backend kv_cache_dtype max_model_len code_revision "
    "index_share_for_mtp_iteration disable_padded_drafter_batch use_heterogeneous_vocab parallel_drafting "
    "draft_model_config draft_load_config",
    "diffusion_config": "canvas_length max_denoising_steps",
    "compilation_config": "mode backend custom_ops ir_enable_torch_wrap compile_mm_encoder "
    "cudagraph_decoder_replay decoder_replay_trim_threshold inductor_compile_config inductor_passes "
    "use_inductor_graph_partition pass_config",
    "vllm_config": "model_config cache_config parallel_config scheduler_config device_config load_config "
    "attention_config mamba_config kernel_config lora_config speculative_config diffusion_config "
    "compilation_config additional_config performance_mode",
}  # fmt: skip
"""Section -> fields. `producer_table.WITHOUT_EFFECT` has the other fields."""
