"""The fields of vLLM's configuration that do not change the bytes of KV blocks.

Every other field is *bound*, that is, part of an engine's fingerprint.

Data only; `producer` applies the table. docs/integrity.md explains the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS = frozenset(
    """
    model_config multimodal_config cache_config parallel_config scheduler_config device_config load_config
    attention_config mamba_config kernel_config lora_config speculative_config diffusion_config
    compilation_config
    """.split()  # noqa: SIM905
)
"""The sections of vLLM's configuration whose fields are bound individually, except the fields in
`WITHOUT_EFFECT`. tests/support/vllm_bound_fields.py lists the bound fields of the newest known version, so
that a new field of vLLM is noticed.
"""

_AFTER = "used after the last hidden state, or for text, not for KV"
_TOKENS = "it determines the tokens, which are in the key"
_KEY = "it is in the key"
_WEIGHTS = "part of the identity of the weights"
_RESOLVED = "its effect is in another bound field"
_MEMORY = "amount or place of memory, not its contents"
_ROUNDING = "only the order of sums, like the other requests in a batch"
_NETWORK = "addresses, processes and time-outs"
_REPORTS = "logs, traces and counters"

WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    "vllm_config": {
        _MEMORY: "offload_config engram_config",
        _AFTER: "watermark_config structured_outputs_config reasoning_config aux_output_config",
        _REPORTS: "observability_config logging_config profiler_config kv_events_config",
        _NETWORK: "kv_transfer_config ec_transfer_config ec_manager_config instance_id shutdown_timeout "
        "watchdog_config",
        _RESOLVED: "optimization_level quant_config",
        "refused without a name for the weights (`why_not_kept`)": "weight_transfer_config",
    },
    "model_config": {
        _WEIGHTS: "model model_weights revision",
        _RESOLVED: "hf_config_path hf_overrides config_format enforce_eager allow_deprecated_quantization "
        "is_submodel_config word_embeddings_untied_by_checkpoint",
        _TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init allowed_local_media_path "
        "allowed_media_domains io_processor_plugin renderer_num_workers",
        _KEY: "enable_prompt_embeds",
        _AFTER: "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
        "generation_config override_generation_config logits_processors pooler_config served_model_name "
        "enable_return_routed_experts",
        _MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
        "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
        _NETWORK: "hf_token",
        "bound with load_format dummy, where it determines the weights; otherwise for sampling": "seed",
        "removed from vLLM: without effect": "disable_cascade_attn",
    },
    "multimodal_config": {
        _TOKENS: "limit_per_prompt interleave_mm_strings",
        _KEY: "enable_mm_embeds mm_hasher_algorithm",
        _MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
        "place and margin of written scales": "mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin",
    },
    "cache_config": {
        _KEY: "prefix_match_unit enable_prefix_caching prefix_caching_hash_algo hash_block_size "
        "cache_hit_alignment_tokens prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint",
        _MEMORY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
        "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size "
        "simple_cpu_offload_num_blocks kv_offloading_backend swap_space cpu_offload_gb "
        "cpu_kvcache_space_bytes",
        _RESOLVED: "user_specified_block_size user_specified_mamba_block_size is_attention_free "
        "effective_attention_block_size _block_size_resolved",
    },
    "parallel_config": {
        _RESOLVED: "world_size is_moe_model sd_worker_cls",
        _ROUNDING: "data_parallel_size enable_eplb eplb_config expert_placement_strategy enable_dbo "
        "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold disable_custom_all_reduce "
        "enable_batch_sharded_sampling enable_ep_weight_filter",
        _NETWORK: "data_parallel_size_local data_parallel_rank data_parallel_rank_local "
        "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port "
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb "
        "max_parallel_loading_workers enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size "
        "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group "
        "distributed_executor_backend master_addr master_port node_rank nnodes numa_bind "
        "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds rank _data_parallel_master_port_list "
        "_coord_store_port _allow_auto_resolve_cp_interleave_size data_parallel_index _api_process_count "
        "_api_process_rank enable_fault_tolerance fault_tolerance_config",
    },
    "scheduler_config": {
        _ROUNDING: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive enable_chunked_prefill "
        "max_num_partial_prefills max_long_partial_prefills max_num_encoder_input_tokens "
        "encoder_cache_size policy async_scheduling prefill_schedule_interval",
        _MEMORY: "max_num_queued_reqs max_num_queued_tokens scheduler_reserve_full_isl watermark",
        _RESOLVED: "is_multimodal_model disable_hybrid_kv_cache_manager max_model_len is_encoder_decoder",
        _AFTER: "stream_interval",
    },
    "device_config": {_RESOLVED: "device"},
    "load_config": {
        _MEMORY: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
    },
    "kernel_config": {
        _ROUNDING: "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup "
        "enable_jit_warmup",
    },
    "lora_config": {
        _KEY: "default_mm_loras",
        _MEMORY: "max_loras max_cpu_loras",
        _ROUNDING: "specialize_active_lora",
        _AFTER: "max_lora_cls_labels",
    },
    "speculative_config": {
        _WEIGHTS: "model revision",
        _RESOLVED: "target_model_config target_parallel_config draft_parallel_config",
        "how draft tokens are chosen; the model verifies them": "enforce_eager "
        "disable_lookahead_block_hashes disable_eagle_block_drop "
        "use_local_argmax_reduction prompt_lookup_max prompt_lookup_min "
        "num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth "
        "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
        "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates "
        "synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk",
    },
    "compilation_config": {
        _MEMORY: "debug_dump_path cache_dir compile_cache_save_format local_cache_dir",
        _ROUNDING: "splitting_ops cudagraph_mm_encoder encoder_cudagraph_token_budgets "
        "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch "
        "decoder_replay_cudagraph_capture_sizes compile_sizes compile_ranges_endpoints cudagraph_mode "
        "cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
        "max_cudagraph_capture_size dynamic_shapes_config fast_moe_cold_start",
        _REPORTS: "enabled_custom_ops disabled_custom_ops traced_files compilation_time "
        "encoder_compilation_time static_forward_context static_all_moe_layers",
    },
}
"""Section -> reason -> fields without effect on KV."""

HF_WITHOUT_EFFECT: Mapping[str, str] = {
    "_name_or_path": "a path or a name; the weights have a separate identity",
    "_commit_hash": _WEIGHTS,
    "transformers_version": "version of the library that wrote the file",
}
"""Fields of a Hugging Face configuration that are left out at every depth. All other fields are bound."""

_NAMES = """
ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN ALLOW_INSECURE_SERIALIZATION ALLOW_LONG_MAX_MODEL_LEN
ALLOW_RUNTIME_LORA_UPDATING API_KEY ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN AUDIO_FETCH_TIMEOUT
BEAM_ALWAYS_CONSTRAIN_OUTPUT BUILD_COMMIT BUILD_PIPELINE BUILD_URL CACHE_ROOT CHAT_TEMPLATE_FUEL
CHAT_TEMPLATE_RENDER_TIMEOUT CI_USE_S3 COMPILE_CACHE_SAVE_FORMAT COMPUTE_NANS_IN_LOGITS
CONFIGURE_LOGGING CONFIG_ROOT CPU_CI_ENV CPU_KVCACHE_SPACE CPU_NUM_OF_RESERVED_CPU CPU_OMP_THREADS_BIND
CUDART_SO_PATH CUDA_COMPATIBILITY_PATH CUSTOM_SCOPES_FOR_PROFILING DEBUG_DUMP_PATH
DEBUG_LOG_API_SERVER_RESPONSE DEBUG_MFU_METRICS DEBUG_WORKSPACE DEEPEP_BUFFER_SIZE_MB DEEP_GEMM_WARMUP
DISABLE_COMPILE_CACHE DISABLE_LOG_LOGO DISABLE_REQUEST_ID_RANDOMIZATION DOCKER_BUILD_CONTEXT
DO_NOT_TRACK DP_MASTER_IP DP_MASTER_PORT DP_RANK DP_RANK_LOCAL DP_SIZE EC_SIDE_CHANNEL_HOST
EC_SIDE_CHANNEL_PORT ELASTIC_EP_DRAIN_REQUESTS ELASTIC_EP_SCALE_UP_LAUNCH ENABLE_COHERE_API
ENABLE_CUDAGRAPH_GC ENABLE_CUDA_COMPATIBILITY ENABLE_RESPONSES_API_STORE ENABLE_STARTUP_PLAN
ENABLE_V1_MULTIPROCESSING ENFORCE_STRICT_TOOL_CALLING ENGINE_ITERATION_TIMEOUT_S ENGINE_READY_TIMEOUT_S
EXECUTE_MODEL_TIMEOUT_SECONDS FASTSAFETENSORS_QUEUE_SIZE FLASHINFER_AUTOTUNE_CACHE_DIR
FLASHINFER_WORKSPACE_BUFFER_SIZE FORCE_AOT_LOAD GC_DEBUG GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
GPT_OSS_SYSTEM_TOOL_MCP_LABELS GPU_NIC_PCIE_MAPPING GPU_SYNC_CHECK HOST_IP HTTP_MAX_REQUEST_BODY_SIZE
HTTP_TIMEOUT_KEEP_ALIVE IMAGE_FETCH_TIMEOUT IMAGE_TAG KEEP_ALIVE_ON_ENGINE_DEATH
KV_EVENTS_USE_INT_BLOCK_HASHES KV_OFFLOAD_MAX_BATCH_DESCRIPTORS LOGGING_COLOR LOGGING_CONFIG_PATH
LOGGING_LEVEL LOGGING_PREFIX LOGGING_STREAM LOG_BATCHSIZE_INTERVAL LOG_MODEL_INSPECTION
LOG_STATS_INTERVAL LOOPBACK_IP LORA_RESOLVER_CACHE_DIR LORA_RESOLVER_HF_REPO_LIST MAIN_CUDA_VERSION
MAX_AUDIO_CLIP_FILESIZE_MB MAX_AUDIO_DECODE_BYTES MAX_AUDIO_DECODE_DURATION_S
MAX_AUDIO_PREPROCESS_WORKERS MAX_BAD_WORDS_TOTAL_TOKENS MAX_COMPLETION_PROMPTS MAX_EMBED_DECODE_BYTES
MAX_IMAGE_PIXELS MAX_MEDIA_DOWNLOAD_SIZE_MB MAX_MEDIA_REQUEST_DECODE_BYTES
MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB MAX_NUM_BAD_WORDS MAX_N_SEQUENCES MAX_STOP_STRINGS MEDIA_CACHE
MEDIA_CACHE_MAX_SIZE_MB MEDIA_CACHE_TTL_HOURS MEDIA_CONNECTOR MEDIA_FETCH_MAX_RETRIES
MEDIA_LOADING_THREAD_COUNT MEDIA_URL_ALLOW_REDIRECTS MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
MM_HASHER_ALGORITHM MODEL_REDIRECT_PATH MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_BOOTSTRAP_PORT
MOONCAKE_CONNECTOR_TIMEOUT MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_LOAD_RECV_THREADS
MOONCAKE_STORE_TIER_LOG MQ_MAX_CHUNK_BYTES_MB MSGPACK_ZERO_COPY_THRESHOLD NCCL_INCLUDE_PATH NCCL_SO_PATH
NIC_SELECTION_VARS NIXL_EP_MAX_NUM_RANKS NIXL_SIDE_CHANNEL_HOST NIXL_SIDE_CHANNEL_PORT NO_USAGE_STATS
NVTX_SCOPES_FOR_PROFILING OBJECT_STORAGE_SHM_BUFFER_NAME P2P_HANDSHAKE_TIMEOUT_S P2P_IDLE_TIMEOUT_S
P2P_MAX_PEERS P2P_SIDE_CHANNEL_HOST P2P_SIDE_CHANNEL_PORT PATTERN_MATCH_DEBUG PORT
PREFIX_CACHE_RETENTION_INTERVAL PROCESS_NAME_PREFIX RAISE_ON_LOGIT_NANS RANDOMIZE_DP_DUMMY_INPUTS
RAY_BUNDLE_INDICES RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS RAY_EXTRA_ENV_VARS_TO_COPY
RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY RAY_PER_WORKER_GPUS REGEX_COMPILATION_TIMEOUT_S
REQUEST_BODY_LOG_LEVEL RINGBUFFER_WARNING_INTERVAL ROCM_SLEEP_MEM_CHUNK_SIZE RPC_BASE_PATH
RUST_FRONTEND_PATH SERVER_DEV_MODE SKIP_MODEL_NAME_VALIDATION SKIP_P2P_CHECK
SKIP_PRECOMPILED_VERSION_SUFFIX SKIP_VERSION_SUFFIX SPARSE_INDEXER_MAX_LOGITS_MB SYSTEM_START_DATE
TARGET_DEVICE TOOL_JSON_ERROR_AUTOMATIC_RETRY TOOL_PARSE_REGEX_TIMEOUT_SECONDS TRACE_FUNCTION
TRITON_JIT_WARMUP_NUM_THREADS TUNED_CONFIG_FOLDER USAGE_SOURCE USAGE_STATS_SERVER
USE_EXPERIMENTAL_PARSER_CONTEXT USE_FASTOKENS USE_FLASHINFER_SAMPLER USE_MODELSCOPE USE_PRECOMPILED
USE_PRECOMPILED_RUST USE_RAY_COMPILED_DAG_CHANNEL_TYPE USE_RAY_COMPILED_DAG_OVERLAP_COMM
USE_RAY_V2_EXECUTOR_BACKEND USE_RAY_WRAPPED_PP_COMM USE_RUST_BENCH USE_RUST_FRONTEND
USE_SIMPLE_KV_OFFLOAD USE_SPINLOOP_EXT V1_OUTPUT_PROC_CHUNK_SIZE V1_USE_OUTLINES_CACHE
VIDEO_FETCH_TIMEOUT VIDEO_LOADER_BACKEND WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY WORKER_MULTIPROC_METHOD
WORKER_SHUTDOWN_TIMEOUT_SECONDS WSL2_ENABLE_PIN_MEMORY XGRAMMAR_CACHE_MB XLA_CACHE_PATH
XPU_USE_SAMPLER_KERNEL
"""
ENVIRONMENT_WITHOUT_EFFECT = frozenset(f"VLLM_{name}" for name in _NAMES.split())
"""Environment variables of vLLM that do not change KV: logs, addresses, times, memory, text, sampling,
secrets. All other variables of vLLM are bound if they are set.
"""

OTHER_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
"""Environment variables that change how libraries compute numbers."""
