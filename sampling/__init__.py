"""Pictures that are drawn while a LoRA trains."""
