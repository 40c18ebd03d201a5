"""What is read of the objects that ComfyUI's own classes of models are, below comfy.ldm, and of its layers, and how its
loader of LoRA files is called; for rows.py."""

OF_LORA_FILES = (
    "model_lora_keys_unet(model, key_map); model_lora_keys_clip(model, key_map); load_lora(lora, to_load, log_missing=)"
)
OF_MODELS = (
    "wan.model.WanModel.img_emb; wan.model.WanModel.patch_size; anima.model.Anima.llm_adapter; "
    "cosmos.predict2.MiniTrainDIT.patch_spatial; krea2.model.SingleStreamDiT.patch; "
    "lightricks.model.LTXVModel.patchifier; lightricks.symmetric_patchifier.Patchifier.patch_size; "
    "modules.diffusionmodules.openaimodel.UNetModel.in_channels"
)
OF_WEIGHTS = (
    "ops.cast_modules_with_vbar(_v, _v_signature); ops.resolve_cast_module_with_vbar(_v_weight, _v_bias); "
    "ops.cast_bias_weight(weight_function, bias_function)"
)
OF_PAGES = "vbar_fault(alloc); vbar_unpin(alloc); vbar_signature_compare(a, b)"  # of DynamicVRAM
