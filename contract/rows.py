"""The parts of ComfyUI that this pack touches, one row each, as ComfyUI 0.33.0 has them.

scripts/host_surface.py compares them with the pack's own code and makes a page of them; check.py asks a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .of_models import OF_LORA_FILES, OF_MODELS, OF_PAGES, OF_WEIGHTS

TESTED_VERSION = "0.33.0"

# has: the name is there. call: we call it so. override: ComfyUI calls our method in its place. wrap: it is run through
# a function of ours. says: its code names these strings. is: it has this value.
Use = Literal["has", "call", "override", "wrap", "says", "is"]


@dataclass(frozen=True)
class Row:
    """One thing of ComfyUI's.

    Args:
        path: its dotted name; the last part may be an attribute that only a method of its class sets.
        form: parameters ("name=" where we pass it by name, "..." for more that we pass on), strings, or a value.
        part: of the pack, that relies on it; see NODES.
        is_written: cannot be asked of a running host, only of its source.
        is_optional: some hosts lack it, and we do without; where it is, it is as said.
    """

    use: Use
    path: str
    form: tuple[str, ...]
    part: str
    is_written: bool = False
    is_optional: bool = False


def _read(part: str, owner: str, uses: dict[str, str], **more: bool) -> Iterator[Row]:
    """Rows of one module or class. Text such as "get_attr(obj, attr)" names a member and its form."""
    for use, text in uses.items():
        for entry in text.split(";"):
            name, _, form = entry.strip().rstrip(")").partition("(")
            words = tuple(word.strip() for word in form.split(",") if word.strip())
            yield Row(use, ".".join(filter(None, (owner, name))), words, part, **more)  # type: ignore[arg-type]


EVERY_NODE = "nodes"  # the part that each node relies on
_PATCHER = "comfy.model_patcher.ModelPatcher"
_WIDGET = "id, default=, tooltip=, optional=, advanced="
_VIDEO = "positive=, negative=, vae=, width=, height=, length=, batch_size="
_INPUTS = ("AnyType", "Clip", "ClipVision", "Conditioning", "Latent", "Model", "Vae")
_OUTPUTS = ("AnyType", "Image", "Int", "LoraModel", "LossMap", "Model", "String")

ROWS: tuple[Row, ...] = (
    # ---- every node: schemas
    *_read("nodes", "comfy_api.v0_0_2", {"has": "ComfyExtension; io"}),
    *_read("nodes", "comfy_api.v0_0_2.ComfyExtension", {"override": "get_node_list()"}),
    *_read(
        "nodes",
        "comfy_api.v0_0_2.io",
        {
            "has": "ComfyNode; ComfyNode.hidden; Hidden.unique_id; Input; Boolean; Combo; Int; Float; String",
            "call": f"Custom(io_type); Boolean.Input({_WIDGET}); Combo.Input({_WIDGET}, options=, extra_dict=); "
            f"Int.Input({_WIDGET}, min=, max=, step=); Float.Input({_WIDGET}, min=, max=, step=, round=); "
            f"String.Input({_WIDGET}, multiline=, placeholder=, force_input=, lazy=); "
            + "; ".join(f"{name}.Input(id, display_name=, tooltip=, optional=)" for name in _INPUTS)
            + "; NodeOutput(..., ui=); Schema(node_id=, display_name=, category=, description=, search_aliases=, "
            "is_output_node=, is_experimental=, is_input_list=, inputs=, outputs=, hidden=); "
            + "; ".join(f"{name}.Output(id, display_name=, tooltip=, is_output_list=)" for name in _OUTPUTS),
            "override": "ComfyNode.define_schema(); ComfyNode.execute(...); ComfyNode.fingerprint_inputs(...); "
            "ComfyNode.validate_inputs(...); ComfyNode.check_lazy_status(...)",
        },
    ),
    # ---- nodes/host/__init__.py: progress, Cancel, messages, memory
    *_read("host", "comfy.utils.ProgressBar", {"call": "(total, node_id=); update_absolute(value, total, preview=)"}),
    *_read("host", "comfy_execution.graph_utils", {"call": "ExecutionBlocker(message)"}),
    *_read(
        "host",
        "comfy.model_management",
        {
            "has": "InterruptProcessingException",
            "call": "interrupt_current_processing(value); processing_interrupted(); unload_all_models(); "
            "soft_empty_cache(); get_torch_device(); get_all_torch_devices(); is_device_cpu(device)",
        },
    ),
    *_read(
        "host",
        "server.PromptServer",
        {"has": "instance; client_id", "call": "send_progress_text(text, node_id); send_sync(event, data, sid)"},
    ),
    # ---- nodes/host/folders.py
    *_read(
        "folders",
        "folder_paths",
        {
            "has": "folder_names_and_paths; models_dir",
            "call": "get_input_directory(); get_output_directory(); get_temp_directory(); get_user_directory(); "
            "get_folder_paths(folder_name); get_filename_list(folder_name); get_full_path(folder_name, filename)",
        },
    ),
    # ---- nodes/host/page.py: routes, messages, what lies on the cards
    *_read(
        "page", "folder_paths", {"has": "base_path", "call": "get_output_directory(); get_folder_paths(folder_name)"}
    ),
    *_read(
        "page",
        "server.PromptServer",
        {"has": "instance; app; routes; sockets; prompt_queue", "call": "send_sync(event, data, sid)"},
    ),
    *_read("page", "comfy.cli_args", {"has": "args"}),
    *_read("page", "execution.PromptQueue", {"call": "set_flag(name, data)"}),
    *_read(
        "page",
        "comfy.model_management",
        {
            "has": "current_loaded_models; LoadedModel.device; LoadedModel.model",
            "call": "is_device_cpu(device); LoadedModel.model_loaded_memory()",
        },
    ),
    # ---- nodes/host/comfy_encoders.py: all that decides what an encoder makes
    *_read("encoders", "comfyui_version", {"has": "__version__"}),
    *_read("encoders", "comfy.model_management", {"call": "unload_all_models(); soft_empty_cache()"}),
    *_read(
        "encoders", "comfy.sd", {"has": "CLIPType", "call": "load_clip(ckpt_paths=, embedding_directory=, clip_type=)"}
    ),
    *_read(
        "encoders",
        "comfy.sd.CLIP",
        {
            "has": "patcher; tokenizer; layer_idx; use_clip_schedule; tokenizer_options; apply_hooks_to_conds",
            "call": "tokenize(text); encode_from_tokens_scheduled(tokens)",
        },
    ),
    *_read(
        "encoders",
        "comfy.sd.VAE",
        {
            "has": "patcher; vae_dtype; latent_channels; latent_dim; output_channels; pad_channel_value; crop_input; "
            "not_video",
            "call": "encode(pixel_samples); vae_output_dtype(); throw_exception_if_invalid()",
        },
    ),
    *_read(
        "encoders",
        "comfy.sd1_clip",
        {
            "has": "SDClipModel.options_default; SDClipModel.max_length; SDClipModel.num_layers; "
            "SDClipModel.special_tokens; SDClipModel.enable_attention_masks; SDClipModel.zero_out_masked; SDClipModel."
            "layer_norm_hidden_state; SDClipModel.return_attention_masks; SDTokenizer.tokenize_with_weights; "
            "SDTokenizer.embedding_directory; SDTokenizer.embedding_identifier; SD1Tokenizer.state_dict",
        },
    ),
    *_read(
        "encoders",
        "comfy.clip_vision.ClipVisionModel",
        {"has": "patcher; image_size; image_mean; image_std; model_type; config; return_all_hidden_states; dtype"},
    ),
    *_read(
        "encoders",
        _PATCHER,
        {
            "has": "model; patches; backup; object_patches; hook_backup; hook_patches; weight_wrapper_patches; "
            "injections; additional_models; wrappers; callbacks; forced_hooks",
            "says": "patch_weight_to_device(weight)",  # the field of a backup
        },
    ),
    # ---- nodes/host/split: ComfyUI's patcher, subclassed
    *_read(
        "split",
        _PATCHER,
        {
            "has": "backup; cached_patcher_init; callbacks; clone_base_uuid; current_hooks; force_cast_weights; "
            "hook_backup; injections; is_injected; is_multigpu_base_clone; load_device; model; model_options; "
            "model_loaded_weight_memory; object_patches; object_patches_backup; offload_device; parent; patches; "
            "patches_uuid; size; weight_inplace_update; weight_wrapper_patches; wrappers",
            "call": "(model, load_device, offload_device); add_object_patch(name, obj); apply_hooks(...); "
            "add_wrapper_with_key(wrapper_type, key, wrapper); cleanup(); "
            "clone(disable_dynamic=, model_override=); eject_model(); get_additional_models_with_key(key); "
            "get_all_callbacks(call_type); get_free_memory(device); get_key_patches(filter_prefix); "
            "get_wrappers(wrapper_type, key); inject_model(); is_dynamic(); load(...); loaded_size(); "
            "model_patches_models(); model_size(); partially_load(device_to, extra_memory, force_patch_weights=); "
            "partially_unload(...); patch_cached_hook_weights(cached_weights, key, ...); "
            "patch_hook_weight_to_device(hooks, combined_patches, key, ...); patch_model(...); "
            "remove_wrappers_with_key(wrapper_type, key); set_injections(key, injections); unpatch_hooks(...); "
            "unpatch_model(device_to, unpatch_weights); unpin_all_weights()",
            "override": "add_object_patch(name, obj); apply_hooks(...); cleanup(); "
            "clone(disable_dynamic, model_override, force_deepcopy); deepclone_multigpu(...); eject_model(); "
            "get_all_callbacks(call_type); get_free_memory(device); get_key_patches(filter_prefix); inject_model(); "
            "load(...); model_patches_models(); model_size(); "
            "partially_load(device_to, extra_memory, force_patch_weights); partially_unload(...); "
            "patch_cached_hook_weights(cached_weights, key, ...); "
            "patch_hook_weight_to_device(hooks, combined_patches, key, ...); patch_model(...); unpatch_hooks(...); "
            "unpatch_model(device_to, unpatch_weights)",
            "says": "patch_weight_to_device(weight); match_multigpu_clones(multigpu); set_model_patch(patches)",
        },
    ),
    *_read(
        "split",
        "comfy.model_patcher.ModelPatcherDynamic",
        {
            "call": "_vbar_get(); get_non_dynamic_delegate(); register_load_device(device); "
            "partially_load(device_to, extra_memory, force_patch_weights=); unpatch_model(device_to, unpatch_weights)",
            "override": "get_non_dynamic_delegate(); load(...); patch_model(...); partially_unload(...); "
            "partially_load(device_to, extra_memory, force_patch_weights); unpatch_model(device_to, unpatch_weights)",
        },
    ),
    # ---- nodes/host/split/division.py: slices of weights and of what patches them
    *_read(
        "split", "comfy.quant_ops", {"has": "QuantizedTensor", "call": "QuantizedTensor(qdata, layout_cls, params)"}
    ),
    *_read("split", "comfy.weight_adapter.base", {"has": "WeightAdapterBase"}),
    *_read(
        "split",
        "comfy.weight_adapter.lora",
        {
            "has": "LoRAAdapter; LoRAAdapter.weights; LoRAAdapter.loaded_keys",
            "call": "LoRAAdapter(loaded_keys, weights)",
        },
    ),
    *_read("split", "comfy.model_management", {"call": "cast_to_device(tensor, device, dtype, copy=)"}),
    *_read(
        "split", "comfy.lora", {"call": "calculate_weight(patches, weight, key, intermediate_dtype, original_weights)"}
    ),
    *_read(
        "split",
        _PATCHER,
        dict.fromkeys(
            ("override", "call"), "patch_weight_to_device(key, device_to, ...); model_state_dict_for_saving(...)"
        ),
    ),
    *_read("split", "comfy_aimdo.model_vbar", {"call": OF_PAGES}),
    *_read("split", "comfy_aimdo.model_vbar.ModelVBAR", {"call": "set_watermark_limit(size_bytes)"}),
    # ---- nodes/host/split: models, loading, memory
    *_read("split", "comfy", {"has": "memory_management.aimdo_enabled", "says": OF_WEIGHTS}),
    *_read(
        "split",
        "comfy.model_management",
        {
            "has": "current_loaded_models; LoadedModel.model",
            "call": "LoadedModel.model_unload(); cuda_device_context(device); get_free_memory(dev); "
            "get_total_memory(dev); minimum_inference_memory(); module_size(module)",
            "says": "load_models_gpu(model_patches_models)",
        },
    ),
    *_read(
        "split",
        "comfy.model_base.BaseModel",
        {
            "has": "diffusion_model; current_patcher; manual_cast_dtype; get_dtype",
            "says": "_apply_model(transformer_options, control, prefetch_dynamic_vbars)",
        },
    ),
    *_read(
        "split",
        "comfy.sd",
        {
            "call": "load_diffusion_model(unet_path, model_options=, disable_dynamic=); "
            "load_diffusion_model_state_dict(sd, model_options=, metadata=)"
        },
    ),
    *_read(
        "split",
        "comfy.utils",
        {
            "call": "get_attr(obj, attr); set_attr(obj, attr, value); set_attr_param(obj, attr, value); "
            "repeat_to_batch_size(tensor, batch_size); load_torch_file(ckpt, return_metadata=)"
        },
    ),
    # ---- nodes/host/split: sampling, and what other nodes attach
    *_read(
        "split",
        "comfy.conds",
        {
            "has": "CONDConstant; CONDCrossAttn; CONDList; CONDNoiseShape; CONDRegular; CONDRegular.cond; "
            "CONDList.cond",
            "call": "CONDRegular._copy_with(cond); CONDList._copy_with(cond)",
        },
    ),
    *_read(
        "split",
        "comfy.samplers",
        {
            "wrap": "_calc_cond_batch(model, conds, x_in, timestep, model_options)",
            "says": "_calc_cond_batch(cond_or_uncond, sigmas, default, transformer_options, model_function_wrapper); "
            "get_area_and_mult(model_conds, mask, control, gligen, hooks)",
        },
    ),
    *_read(
        "split",
        "comfy.sampler_helpers",
        {
            "call": "estimate_memory(model, noise_shape, conds)",
            "wrap": "_prepare_sampling(model, noise_shape, conds, ...)",
            "says": "get_additional_models(additional_models); prepare_model_patcher(wrappers, callbacks)",
        },
    ),
    *_read(
        "split",
        "comfy.patcher_extension",
        {
            "has": "CallbacksMP; CallbacksMP.ON_PREPARE_STATE; WrappersMP; "
            "WrappersMP.PREPARE_SAMPLING; PatcherInjection.inject",
            "call": "PatcherInjection(inject=, eject=)",
            "is": "WrappersMP.APPLY_MODEL(apply_model); WrappersMP.CALC_COND_BATCH(calc_cond_batch); "
            "WrappersMP.DIFFUSION_MODEL(diffusion_model)",
        },
    ),
    *_read(
        "split",
        "comfy.model_patcher",
        {"says": "set_model_options_patch_replace(transformer_options, patches_replace)"},
    ),
    *_read(
        "split",
        "comfy.ldm.modules.attention",
        {"says": "wrap_attn(optimized_attention_override, container_function)"},
    ),
    *_read(
        "split",
        "comfy.controlnet",
        {"has": "ControlLora; ControlLora.control_model; ControlLora.previous_controlnet"},
    ),
    *_read(
        "split",
        "comfy.weight_adapter.bypass.BypassForwardHook",
        {"has": "original_forward", "call": "_move_adapter_weights_to_device(device)"},
    ),
    *_read("split", "comfy_api.torch_helpers.torch_compile", {"is": "COMPILE_KEY(torch.compile)"}),
    *_read("split", _PATCHER, {"has": "fast_disk"}, is_optional=True),
    # ---- nodes/host/native: its own models, trained
    *_read("native", "comfy.model_management", {"has": "in_training; InterruptProcessingException"}),
    *_read("native", "comfy.model_management", {"call": "unload_all_models(); soft_empty_cache()"}),
    *_read("native", "comfy.model_management", {"call": "interrupt_current_processing(value)"}),
    *_read("native", "comfy_kitchen.backends.eager", {"has": "adaln; rope"}),
    *_read(
        "native",
        "comfy.samplers",
        {"call": "encode_model_conds(model_function, conds, noise, device, prompt_type, ...); cond_cat(c_list)"},
    ),
    *_read("native", "comfy.samplers", {"call": "calculate_sigmas(model_sampling, scheduler_name, steps)"}),
    *_read("native", "comfy.conds.CONDRegular", {"call": "process_cond(batch_size=, area=)"}),
    *_read(
        "native",
        "comfy.model_base.BaseModel",
        {
            "has": "diffusion_model; extra_conds; model_sampling; model_type; model_config; latent_format",
            "call": "apply_model(x, t, transformer_options=); concat_cond(noise=, latent_image=, device=); "
            "scale_latent_inpaint(x=, sigma=, noise=, latent_image=, denoise_mask=)",
        },
    ),
    *_read(
        "native",
        "comfy.model_sampling",
        {
            "has": "CONST.calculate_denoised; ModelSamplingDiscrete.sigma_max",
            "call": "CONST.calculate_denoised(sigma, model_output, model_input); "
            "CONST.noise_scaling(sigma, noise, latent_image, max_denoise); "
            "CONST.inverse_noise_scaling(sigma, latent); ModelSamplingDiscrete.percent_to_sigma(percent)",
        },
    ),
    *_read(
        "native", "comfy.model_detection", {"call": "model_config_from_unet(state_dict, unet_key_prefix, metadata=)"}
    ),
    *_read(
        "native",
        "comfy.supported_models_base.BASE",
        {
            "has": "custom_operations; unet_config",
            "call": "get_model(state_dict, prefix, device=); set_inference_dtype(dtype, manual_cast_dtype); "
            "process_unet_state_dict(state_dict)",
        },
    ),
    *_read("native", "comfy.supported_models_base.ClipTarget", {"has": "clip"}),
    *_read("native", "comfy.supported_models.SDXL", {"call": "clip_target(state_dict)"}),
    *_read("native", "comfy.sd1_clip.SD1ClipModel", {"call": "encode_token_weights(token_weight_pairs)"}),
    *_read(
        "native",
        "comfy.latent_formats.LatentFormat",
        {
            "has": "latent_dimensions; latent_channels; spacial_downscale_ratio; temporal_downscale_ratio",
            "call": "process_in(latent); process_out(latent)",
        },
    ),
    *_read(
        "native",
        "comfy.ops.disable_weight_init",
        {"has": "Conv1d; Conv2d; Conv3d; GroupNorm; LayerNorm; RMSNorm; ConvTranspose1d; ConvTranspose2d"},
    ),
    *_read("native", "comfy.ldm.modules.attention", {"has": "optimized_attention", "call": "attention_pytorch(...)"}),
    *_read(
        "native",
        "comfy.sd",
        {
            "has": "load_diffusion_model; CLIPType",
            "call": "load_clip(ckpt_paths=, embedding_directory=, clip_type=); VAE(sd=, metadata=, device=); "
            "load_checkpoint_guess_config(ckpt_path, output_vae=, output_clip=, embedding_directory=, output_model=)",
        },
    ),
    *_read("native", "comfy.sd", {"has": "load_vae_patcher; load_checkpoint_vae_patcher"}, is_optional=True),
    *_read("native", "comfy.sd", {"has": "load_clip_model_patcher; load_checkpoint_clip_patcher"}, is_optional=True),
    *_read("native", "comfy.sd.VAE", {"has": "patcher; device; vae_dtype; latent_dim; memory_used_decode"}),
    *_read("native", "comfy.sd.VAE", {"call": "throw_exception_if_invalid(); memory_used_decode(shape, dtype)"}),
    *_read("native", "comfy.sd.VAE", {"call": "decode(samples_in); model_size(); get_sd()"}),
    *_read("native", "comfy.utils", {"call": "load_torch_file(ckpt, return_metadata=)"}),
    *_read("native", "comfy.cli_args", {"has": "args"}),
    *_read("native", "comfy.cli_args", {"says": "(--cpu, --base-directory)"}, is_written=True),
    *_read(
        "native",
        "folder_paths",
        {
            "call": "get_output_directory(); get_folder_paths(folder_name); get_filename_list(folder_name); "
            "get_full_path(folder_name, filename); add_model_folder_path(folder_name, full_folder_path)"
        },
    ),
    *_read(
        "native",
        _PATCHER,
        {
            "has": "model; patches; object_patches; hook_patches; weight_wrapper_patches; injections; wrappers; "
            "callbacks; cached_patcher_init"
        },
    ),
    *_read("native", "comfy.lora", {"has": "LORA_CLIP_MAP", "call": OF_LORA_FILES}),
    *_read("native", "comfy.ldm", {"has": OF_MODELS}),
    *_read("native", "comfy.lora_convert", {"call": "convert_lora(sd)"}),
    *_read("native", "comfy.weight_adapter.lora.LoRAAdapter", {"has": "name; weights"}),
    *_read("native", "comfy.clip_vision", {"call": "load(ckpt_path)"}),
    # ---- nodes/host/native/conditions.py: conditioning nodes, as a graph calls them
    *_read("conditions", "comfy.model_management", {"call": "unload_all_models(); soft_empty_cache()"}),
    *(
        row
        for module, calls in {
            "edit_model": "ReferenceLatent.execute(conditioning=, latent=)",
            "flux": "FluxKontextImageScale.execute(image=)",
            "post_processing": "ImageScaleToTotalPixels.execute(image=, upscale_method=, megapixels=, "
            "resolution_steps=)",
            "qwen": "TextEncodeQwenImageEdit.execute(clip=, prompt=, vae=, image=); "
            "TextEncodeQwenImageEditPlus.execute(clip=, prompt=, vae=)",
            "zimage": "TextEncodeZImageOmni.execute(clip=, prompt=, image_encoder=, vae=)",
            "wan": f"WanImageToVideo.execute({_VIDEO}, start_image=, clip_vision_output=); "
            f"WanVaceToVideo.execute({_VIDEO}, strength=, control_video=); "
            f"WanFunControlToVideo.execute({_VIDEO}, control_video=, clip_vision_output=); "
            f"Wan22FunControlToVideo.execute({_VIDEO}, ref_image=, control_video=); "
            "Wan22ImageToVideoLatent.execute(vae=, width=, height=, length=, batch_size=, start_image=)",
        }.items()
        for row in _read("conditions", f"comfy_extras.nodes_{module}", {"call": calls}, is_optional=True)
    ),
    # ---- nodes/host/compiler.py: allocation graphs and captured blocks, which hosts before 0.35 have not
    *_read("split", "comfy.cli_args", {"has": "args"}, is_optional=True),
    *_read(
        "split",
        "comfy.model_prefetch",
        {
            "has": "MALLOC_GRAPHS; ACTIVE_MALLOC_GRAPHS; malloc_graph_begin",
            "call": "cleanup_malloc_graph(); malloc_graph_enabled(device)",
        },
        is_optional=True,
    ),
    # ---- headless/: a ComfyUI that `devicebridge run` starts
    *_read("server", "main", {"has": ""}, is_written=True),
    *_read(
        "server",
        "comfy.cli_args",
        {
            "says": "(--listen, --port, --disable-auto-launch, --database-url, --temp-directory, --base-directory, "
            "--extra-model-paths-config, --cpu)"
        },
        is_written=True,
    ),
    *_read(
        "server",
        "server.PromptServer",
        {"says": "__init__(/system_stats, /queue, /history, /interrupt)"},
        is_written=True,
    ),
)

# Which parts each node relies on; "server" is what the command `devicebridge run` relies on.
NODES: dict[str, tuple[str, ...]] = {
    "DeviceBridgeLoadModelForTraining": ("nodes", "host", "folders"),
    "DeviceBridgeQuantize": ("nodes", "host", "folders"),
    "DeviceBridgeTrainingDataset": ("nodes", "host", "folders"),
    "DeviceBridgeCacheCaptionsAndLatents": ("nodes", "host", "folders", "encoders"),
    "DeviceBridgeDatasetFromLatents": ("nodes", "host", "folders"),
    "DeviceBridgeImagesToCaption": ("nodes", "host", "folders"),
    "DeviceBridgeWriteCaptions": ("nodes", "host", "folders"),
    "DeviceBridgePlanTraining": ("nodes", "host", "folders"),
    "DeviceBridgeTrainLora": ("nodes", "host", "folders"),
    "DeviceBridgeSplitModel": ("nodes", "host", "split"),
    "DeviceBridgeLoadDiffusionModelSplit": ("nodes", "host", "folders", "split"),
    "DeviceBridgeRingLseFix": ("nodes",),
}
NATIVE = "native"  # the part that training ComfyUI's own models relies on; asked when one is read
CONDITIONS = "conditions"  # the part that what conditions them relies on; asked when that is made
PAGE = "page"  # the part that the page in ComfyUI relies on
COMMAND = "devicebridge run"  # relies on the part "server"
