"""SGLang's arguments that cannot change the bytes of a page. All other arguments are part of the fingerprint
(`producer`).

The list was made for SGLang 0.5.23. Add an argument only if it cannot change the KV of a given prompt.
"""

from __future__ import annotations

import re

WITHOUT_EFFECT = frozenset(
    """
    _radix_eviction_policy_explicitly_set _speculative_draft_quantization_explicitly_set
    _swa_full_tokens_ratio_explicitly_set abort_on_priority_when_disabled admin_api_key
    allow_auto_truncate allowed_media_domains api_key asr_max_buffer_seconds asr_max_concurrent_sessions
    base_gpu_id batch_notify_size bucket_e2e_request_latency bucket_inter_token_latency
    bucket_time_to_first_token chat_template completion_template constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt constrained_json_whitespace_pattern crash_dump_folder
    custom_sigquit_handler debug_tensor_dump_input_file debug_tensor_dump_layers
    debug_tensor_dump_output_folder decode_log_interval default_chat_template_kwargs
    default_priority_value delete_ckpt_after_loading detokenizer_worker_num disable_outlines_disk_cache
    disable_priority_preemption disable_tokenizer_batch_decode disaggregation_bootstrap_port
    disaggregation_ib_device dist_init_addr dist_timeout download_dir dp_size
    dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_cache_report
    enable_dynamic_batch_tokenizer enable_forward_pass_metrics enable_hierarchical_cache enable_http2
    enable_http_worker_reuseport enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
    enable_multimodal enable_prefill_delayer enable_priority_scheduling enable_request_time_stats_logging
    enable_response_store enable_session_radix_cache enable_ssl_refresh enable_streaming_session
    enable_strict_thinking enable_tokenizer_batch_encode enable_trace enable_watermark
    encoder_bootstrap_port engine_info_bootstrap_port export_metrics_to_file export_metrics_to_file_dir
    extra_metric_labels fastapi_root_path file_storage_path forward_pass_metrics_ipc_name
    forward_pass_metrics_worker_id gated_launch_port gc_threshold gc_warning_threshold_secs
    generation_tokens_buckets gpu_id_step grammar_backend grpc_mode grpc_port grpc_response_timeout_secs
    grpc_worker_threads hf_chat_template_name hicache_host_memory_fraction hicache_host_memory_mode
    hicache_io_backend hicache_ratio hicache_size hicache_storage_backend
    hicache_storage_backend_extra_config hicache_storage_prefetch_policy
    hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
    hicache_write_policy host http2_initial_connection_window_size http2_max_concurrent_streams
    incremental_streaming_output kv_canary kv_canary_real_data kv_canary_sweep_interval kv_events_config
    limit_mm_data_per_request load_balance_method load_publish_endpoint load_snapshot_publish_interval
    log_level log_level_http log_requests log_requests_format log_requests_level log_requests_target
    lora_eviction_policy lora_paths max_loaded_loras max_prefill_tokens max_queued_requests
    max_running_requests max_total_tokens media_url_max_file_size_mb mem_fraction_static
    mm_feature_transport mm_io_worker_num mm_processor_worker_num model_checksum model_path nccl_port
    nnodes node_rank num_reserved_decode_tokens numa_node otlp_service_name otlp_traces_endpoint port
    preferred_sampling_params prefill_decode_interval prefill_decode_interval_min_bs
    prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes
    prefill_delayer_queue_min_ratio prefill_delayer_token_usage_low_watermark
    prefill_delayer_wait_seconds_buckets prefill_max_requests priority_scheduling_preemption_threshold
    prompt_tokens_buckets radix_eviction_policy radix_eviction_policy_config random_seed reasoning_parser
    remote_instance_weight_loader_backend remote_instance_weight_loader_seed_instance_ip
    remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports
    remote_instance_weight_loader_start_seed_via_transfer_engine retraction_policy return_input_ids
    return_output_ids revision sampling_backend sampling_defaults sampling_mask_max_tokens
    schedule_conservativeness schedule_low_priority_values_first schedule_policy scheduler_recv_interval
    served_model_name show_time_cost sidecar sidecar_args skip_server_warmup skip_tokenizer_init
    sleep_on_idle smg_grpc_mode smg_http_sidecar_port soft_watchdog_timeout spec_trace_dir
    speculative_draft_model_path speculative_draft_model_revision ssl_ca_certs ssl_certfile ssl_keyfile
    ssl_keyfile_password stat_loggers stream_interval stream_response_default_include_usage
    strip_thinking_cache swa_full_tokens_ratio tokenizer_backend tokenizer_metrics_allowed_custom_labels
    tokenizer_metrics_custom_labels_header tokenizer_mode tokenizer_path tokenizer_worker_num
    tool_call_parser tool_server trace_modules trust_request_chat_template use_ray
    uvicorn_access_log_exclude_prefixes warmups watchdog_timeout watermark_config watermark_context_window
    watermark_default_enabled watermark_enforce_all watermark_key watermark_key_b
    watermark_max_probability watermark_mixing_probability weight_loader_disable_mmap
    weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads
    """.split()  # noqa: SIM905
)
"""Arguments that are not part of the fingerprint. These include the names of weights, because the
fingerprint contains their files or commit."""

SEED, LOAD_FORMAT, DUMMY = "random_seed", "load_format", "dummy"
"""`SEED` and `LOAD_FORMAT` are names of arguments. With the load format `DUMMY`, SGLang draws random
weights from the seed; with other formats the seed does not affect the weights."""

RESOLVED = (
    SEED, "model_path", "revision", "speculative_draft_model_path", "speculative_draft_model_revision",
)  # fmt: skip
"""Arguments whose value in the fingerprint is the value that SGLang has derived from the user's value.
SGLang draws the seed at each start, and replaces names of ModelScope models and GGUF files by local paths."""

VARIABLES_WITHOUT_EFFECT = re.compile(
    r"SGLANG_(TEST|HICACHE|LOG|TORCH_PROFILER|HOST|PORT|TMP|CACHE_DIR|.*TIMEOUT).*"
)
"""Environment variables that do not change KV. All other ``SGLANG_*`` variables are bound (`producer`)."""
