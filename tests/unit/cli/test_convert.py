"""`devicebridge convert`: ten files of each trainer as it publishes them. Their keys' values were written by hand."""

from __future__ import annotations

import json
import shutil

import pytest
from devicebridge.cli.convert import convert_file
from devicebridge.cli.main import main
from devicebridge.config.job import FolderConfig, load_job
from devicebridge.config.ranges import parse_toml, toml_bytes
from devicebridge.data.folders import concepts
from devicebridge.tests.tiny_pipeline import save_tiny_dataset, save_tiny_pipeline

# Of each trainer: its file of a job as text, with {} for the folder of the test.
AI_TOOLKIT = """
---
job: extension
config:
  name: "my_lora_v1"
  process:
    - type: 'sd_trainer'
      training_folder: "{0}/out"
      device: cuda:0
      trigger_word: "p3r5on"
      network: {{type: "lora", linear: 32, linear_alpha: 16}}
      save: {{dtype: float16, save_every: 250, max_step_saves_to_keep: 4, push_to_hub: false}}
      datasets:
        - folder_path: "{0}/data"
          caption_ext: "txt"
          caption_dropout_rate: 0.05
          cache_latents_to_disk: true
          resolution: [ 512, 768, 1024 ]
      train:
        batch_size: 1
        steps: 2000
        gradient_accumulation_steps: 2
        train_unet: true
        train_text_encoder: false
        gradient_checkpointing: true
        noise_scheduler: "flowmatch"
        timestep_type: 'sigmoid'
        optimizer: "adamw8bit"
        lr: 1e-4
        ema_config: {{use_ema: true, ema_decay: 0.99}}
        dtype: bf16
      model: {{name_or_path: "{0}/model", quantize: true, low_vram: true}}
      sample:
        {{sampler: "flowmatch", sample_every: 250, width: 1024, height: 768, neg: "", seed: 42, walk_seed: true,
          prompts: ["[trigger] playing chess", "a horse, fish eye lens"], guidance_scale: 4, sample_steps: 20}}
meta: {{name: "[name]"}}
"""
DIFFUSION_PIPE = """
output_dir = '{0}/out'
dataset = 'dataset.toml'
epochs = 10
micro_batch_size_per_gpu = 1
pipeline_stages = 2
gradient_accumulation_steps = 4
gradient_clipping = 1.0
warmup_steps = 100
eval_every_n_epochs = 1
save_every_n_epochs = 2
checkpoint_every_n_minutes = 120
activation_checkpointing = true
partition_method = 'parameters'
save_dtype = 'bfloat16'
caching_batch_size = 1
steps_per_print = 1
video_clip_mode = 'single_beginning'
[model]
type = 'flux'
diffusers_path = '{0}/model'
dtype = 'bfloat16'
transformer_dtype = 'float8'
timestep_sample_method = 'logit_normal'
[adapter]
type = 'lora'
rank = 32
dtype = 'bfloat16'
[optimizer]
type = 'adamw_optimi'
lr = 2e-5
betas = [0.9, 0.99]
weight_decay = 0.02
[monitoring]
enable_wandb = false
"""
DIFFUSION_PIPE_DATA = """
resolutions = [512]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 2.5
num_ar_buckets = 7
frame_buckets = [1, 33]
[[directory]]
path = '{0}/data'
num_repeats = 10
"""
KOHYA = """
[model_arguments]
pretrained_model_name_or_path = "{0}/model"
[additional_network_arguments]
network_module = "networks.lora"
network_dim = 8
network_train_unet_only = true
network_args = ["loraplus_lr_ratio=16"]
[optimizer_arguments]
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.1", "betas=0.9,0.99"]
learning_rate = 1e-4
lr_scheduler = "cosine"
lr_warmup_steps = 50
max_grad_norm = 1.0
[training_arguments]
output_dir = "{0}/out"
output_name = "kohya_lora"
max_train_epochs = 4
save_every_n_epochs = 1
train_batch_size = 2
seed = 42
mixed_precision = "bf16"
save_precision = "fp16"
gradient_checkpointing = true
cache_latents = true
xformers = true
noise_offset = 0.05
sample_prompts = "prompts.txt"
sample_every_n_steps = 100
[dataset_arguments]
train_data_dir = "{0}/images"
resolution = "768,512"
caption_dropout_rate = 0.1
"""
MUSUBI = """
dit = "{0}/model"
network_module = "networks.lora_wan"
network_dim = 16
network_alpha = 8
learning_rate = 2e-4
optimizer_type = "adamw8bit"
max_train_steps = 800
save_every_n_steps = 100
output_dir = "{0}/out"
output_name = "wan"
dataset_config = "dataset.toml"
fp8_base = true
blocks_to_swap = 20
timestep_sampling = "sigmoid"
discrete_flow_shift = 3.0
mixed_precision = "bf16"
sdpa = true
"""
MUSUBI_DATA = """
[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 1
enable_bucket = true
[[datasets]]
image_directory = "{0}/data"
cache_directory = "{0}/cache"
num_repeats = 3
target_frames = [1, 25]
frame_extraction = "head"
source_fps = 30.0
"""
ONE_TRAINER = """
{{
    "base_model_name": "{0}/model", "model_type": "FLUX_DEV_1", "training_method": "LORA",
    "concept_file_name": "concepts.json", "workspace_dir": "{0}/out",
    "output_model_destination": "models/person.safetensors", "output_dtype": "BFLOAT_16",
    "learning_rate": 0.0003, "learning_rate_scheduler": "COSINE", "learning_rate_warmup_steps": 200,
    "epochs": 5, "batch_size": 2, "gradient_accumulation_steps": 1, "gradient_checkpointing": "CPU_OFFLOADED",
    "ema": "GPU", "ema_decay": 0.998, "resolution": "512,768", "timestep_distribution": "LOGIT_NORMAL",
    "optimizer": {{"optimizer": "ADAMW", "weight_decay": 0.05, "beta1": 0.9, "fused": false}},
    "transformer": {{"train": true, "weight_dtype": "FLOAT_8"}}, "text_encoder": {{"train": false}},
    "lora_rank": 24, "save_every": 100, "save_every_unit": "STEP", "masked_training": false,
    "offset_noise_weight": 0.1, "samples": [{{"prompt": "a cat", "enabled": true}}, {{"prompt": "x", "enabled": false}}]
}}
"""
ONE_TRAINER_DATA = """
[{{"name": "cat", "path": "{0}/data", "enabled": true, "type": "STANDARD", "balancing": 3.0,
   "balancing_strategy": "REPEATS", "loss_weight": 0.5,
   "image": {{"enable_crop_jitter": true, "enable_random_flip": true}},
   "text": {{"prompt_source": "sample", "enable_tag_shuffling": true, "tag_delimiter": ","}}}},
 {{"name": "old", "path": "{0}/gone", "enabled": false, "image": {{}}, "text": {{}}}},
 {{"name": "kept", "path": "{0}/held", "type": "VALIDATION", "image": {{}}, "text": {{}}}}]
"""
SIMPLE_TUNER = """
{{
    "--model_type": "lora", "--model_family": "flux2", "--pretrained_model_name_or_path": "{0}/model",
    "--data_backend_config": "config/backend.json", "--output_dir": "{0}/out", "--max_train_steps": 100,
    "--num_train_epochs": 0, "--learning_rate": 1e-4, "--train_batch_size": 1, "--gradient_checkpointing": true,
    "--lora_rank": 64, "--lora_alpha": 32, "--lora_type": "standard", "--optimizer": "adamw_bf16",
    "--lr_scheduler": "constant", "--mixed_precision": "bf16", "--base_model_precision": "int8-quanto",
    "--flow_schedule_shift": 3, "--checkpoint_step_interval": 10, "--seed": 42, "--use_ema": false,
    "--resolution": 1.0, "--resolution_type": "area", "--validation_prompt": "a sign", "--validation_guidance": 4.0,
    "--validation_resolution": "1024x768", "--validation_num_inference_steps": 16, "--report_to": "wandb",
}}
"""
SIMPLE_TUNER_DATA = """
[{{"id": "one", "type": "local", "instance_data_dir": "{0}/data", "caption_strategy": "textfile", "repeats": 4,
   "resolution": 512, "resolution_type": "pixel_area", "crop": false}},
 {{"id": "two", "type": "local", "instance_data_dir": "{0}/more", "instance_prompt": "a dog", "repeats": 0,
   "caption_strategy": "instanceprompt"}},
 {{"id": "far", "type": "aws", "aws_bucket_name": "x"}},
 {{"id": "text", "dataset_type": "text_embeds", "type": "local", "cache_dir": "cache"}}]
"""
TRAINERS = {  # -> suffix, the job, the name and text of its dataset
    "ai-toolkit": (".yaml", AI_TOOLKIT, "", ""),
    "diffusion-pipe": (".toml", DIFFUSION_PIPE, "dataset.toml", DIFFUSION_PIPE_DATA),
    "kohya": (".toml", KOHYA, "prompts.txt", "# prompts\na cat on a mat --w 1024 --h 768 --d 1\n\na dog\n"),
    "musubi": (".toml", MUSUBI, "dataset.toml", MUSUBI_DATA),
    "OneTrainer": (".json", ONE_TRAINER, "concepts.json", ONE_TRAINER_DATA),
    "SimpleTuner": (".json", SIMPLE_TUNER, "config/backend.json", SIMPLE_TUNER_DATA),
}
BOTH = {"train.steps": 2000, "lora.rank": 32}
# The file as it stands, each of whose keys has a value here.
WHOLE = {
    "ai-toolkit": {
        "output.folder": "{0}/out/my_lora_v1", "output.name": "my_lora_v1", "data.trigger_word": "p3r5on",
        "lora.kind": "lora", "lora.rank": 32, "lora.alpha": 16.0, "output.lora_dtype": "float16",
        "output.save_every_steps": 125, "output.keep_last": 4, "data.caption_dropout": 0.05,
        "data.resolutions": (512, 768, 1024), "data.folders.path": "{0}/data", "train.batch_size": 1,
        "train.steps": 1000, "train.gradient_accumulation_steps": 2, "optimizer.name": "adamw8bit",
        "objective.shift": 1.0, "objective.timestep_sampling": "sigmoid", "optimizer.learning_rate": 1e-4,
        "train.ema_decay": 0.99,
        "model.path": "{0}/model", "model.quantize": "auto", "samples.every_steps": 125, "samples.width": 1024,
        "samples.height": 768, "samples.prompts": ("p3r5on playing chess", "a horse, fish eye lens"),
        "samples.seed": 42, "samples.guidance": 4.0, "samples.steps": 20, "model.dtype": "bfloat16",
    },
    "diffusion-pipe": {  # 5 images x 10 repeats x 10 epochs / 4 = 13 steps an epoch
        "output.folder": "{0}/out", "train.steps": 130, "output.save_every_steps": 26, "train.batch_size": 1,
        "parallel.strategy": "pipeline", "train.gradient_accumulation_steps": 4, "train.clip_norm": 1.0,
        "schedule.warmup_steps": 100, "train.gradient_checkpointing": True, "split.balance": "memory",
        "output.lora_dtype": "bfloat16", "data.window": "start", "model.path": "{0}/model", "model.quantize": "fp8",
        "objective.shift": 1.0,
        "objective.timestep_sampling": "sigmoid", "lora.kind": "lora", "lora.rank": 32, "lora.alpha": 32.0,
        "lora.dtype": "bfloat16", "optimizer.name": "adamw", "optimizer.learning_rate": 2e-5,
        "optimizer.weight_decay": 0.02, "optimizer.options": {"betas": [0.9, 0.99]}, "data.resolutions": (512,),
        "data.max_aspect_ratio": 2.5, "data.frames": (1, 33), "data.folders.repeats": 10,
    },
    "kohya": {  # (5 images x 10 + 5 x 2) / 2 = 30 steps an epoch; the alpha that is not said is 1
        "model.path": "{0}/model", "lora.rank": 8, "lora.alpha": 1.0, "optimizer.name": "adamw8bit",
        "optimizer.weight_decay": 0.1, "optimizer.learning_rate": 1e-4, "schedule.name": "cosine",
        "schedule.warmup_steps": 50, "output.folder": "{0}/out", "output.name": "kohya_lora", "train.steps": 120,
        "output.save_every_steps": 30, "train.batch_size": 2, "train.seed": 42, "output.lora_dtype": "float16",
        "data.caption_dropout": 0.1, "data.resolutions": (627,), "samples.every_steps": 100,
        "samples.prompts": ("a cat on a mat", "a dog"), "lora.text_encoder": False,
        "data.folders.path": ["{0}/images/10_my_cat", "{0}/images/2_dog"], "data.folders.repeats": [10, 2],
        "data.folders.caption": ["my_cat", "dog"],
    },
    "musubi": {
        "model.path": "{0}/model", "lora.rank": 16, "lora.alpha": 8.0, "optimizer.learning_rate": 2e-4,
        "optimizer.name": "adamw8bit", "train.steps": 800, "output.save_every_steps": 100, "output.name": "wan",
        "model.quantize": "auto", "objective.timestep_sampling": "sigmoid", "objective.shift": 1.0,
        "data.resolutions": (723,), "data.folders.path": "{0}/data", "data.folders.repeats": 3,
        "data.frames": (1, 25), "data.window": "start", "train.batch_size": 1,
    },
    "OneTrainer": {  # 5 images x 3, each in one of 2 sizes / 2 = 8 steps an epoch
        "model.path": "{0}/model", "output.folder": "{0}/out", "output.name": "person", "lora.rank": 24,
        "lora.alpha": 1.0, "optimizer.learning_rate": 3e-4, "schedule.name": "cosine", "schedule.warmup_steps": 200,
        "objective.shift": 1.0,
        "train.steps": 40, "train.batch_size": 2, "train.gradient_checkpointing": True, "train.ema_decay": 0.998,
        "data.resolutions": (512, 768), "objective.timestep_sampling": "logit_normal", "optimizer.name": "adamw",
        "optimizer.weight_decay": 0.05, "model.quantize": "fp8", "output.save_every_steps": 100,
        "output.lora_dtype": "bfloat16", "data.use_masks": False, "samples.prompts": ("a cat",),
        "data.folders.path": "{0}/data", "data.folders.repeats": 3, "data.folders.loss_weight": 0.5,
        "evaluation.folder": "{0}/held", "lora.text_encoder": False, "data.caption_lines": True,
        "data.shuffle_tags": True,
    },
    "SimpleTuner": {
        "model.path": "{0}/model", "output.folder": "{0}/out", "train.steps": 100, "optimizer.learning_rate": 1e-4,
        "lora.rank": 64, "lora.alpha": 32.0, "optimizer.name": "adamw", "model.quantize": "int8",
        "objective.shift": 3.0, "output.save_every_steps": 10, "train.seed": 42, "samples.prompts": ("a sign",),
        "samples.guidance": 4.0, "samples.width": 1024, "samples.height": 768, "samples.steps": 16,
        "train.ema_decay": 0.0, "data.folders.path": ["{0}/data", "{0}/more"], "data.folders.repeats": [5, 1],
        "data.folders.resolutions": [(512,), (1024,)], "data.folders.caption": ["", "a dog"],
    },
}  # fmt: skip
# What else a file of each may say: what is replaced, by what, and the value of ours or the setting that is listed.
CHANGED = {
    "ai-toolkit": [
        ("linear_alpha: 16", "dropout: 0.1", "lora.alpha", 1.0),
        ('type: "lora"', "type: glora", "left", "network.type = 'glora'"),
        ("dtype: bf16", "skip_first_sample: true", "samples.before_first", False),
        ("dtype: bf16", "disable_sampling: true", "samples.prompts", ()),
        ("use_ema: true", "use_ema: false", "train.ema_decay", 0.0),
        ('type: "lora"', "type: lokr", "lora.rank", 1024),
        ('type: "lora"', "type: lokr, lokr_full_rank: false", "lora.alpha", 16.0),
        ("gradient_accumulation_steps: 2", "gradient_accumulation: 2", "train.steps", 2000),
        ("timestep_type: 'sigmoid'", "seed: 1", "objective.timestep_sampling", "sigmoid"),
        ("timestep_type: 'sigmoid'", "timestep_type: linear", "objective.timestep_sampling", "uniform"),
        ("timestep_type: 'sigmoid'", "lr_scheduler: linear", "left", "train.lr_scheduler = 'linear'"),
        ("lr: 1e-4", "seed: 1", "optimizer.learning_rate", 1e-6),
        ('"adamw8bit"', '"prodigy"', "optimizer.learning_rate", 1.0),
        ('"adamw8bit"', '"prodigy"', "optimizer.weight_decay", 0.0),
    ],
    "diffusion-pipe": [
        ("epochs = 10", "epochs = 10\nmax_steps = 77", "train.steps", 77),
        ("epochs = 10", "epochs = 10\nmax_steps = 777", "train.steps", 130),
        ("timestep_sample_method = 'logit_normal'", "shift = 5", "objective.shift", 5.0),
        ("timestep_sample_method = 'logit_normal'", "sigmoid_scale = 1.3", "objective.timestep_sampling", "sigmoid"),
        ("timestep_sample_method = 'logit_normal'", "flux_shift = true", "objective.shift", ""),
        ("'adamw_optimi'", "'Prodigy'", "optimizer.weight_decay", 0.02),
        ("pipeline_stages = 2", "pipeline_stages = 1", "parallel.strategy", "auto"),
        ("'parameters'", "'manual'\npartition_split = [3]", "split.split_at", (3,)),
        ("checkpointing = true", "checkpointing = 'unsloth'", "train.gradient_checkpointing", True),
        ("pipeline_stages = 2", "pipeline_stages = inf", "left", "pipeline_stages = inf"),
        ("diffusers_path = '{0}/model'", "transformer_path = '{0}/a.safetensors'", "model.family", "comfyui"),
        ("diffusers_path =", "vae_path = '{0}/v.sft'\ndiffusers_path =", "cache.stock_vae", "{0}/v.sft"),
    ],
    "kohya": [
        ('"{0}/model"', '"{0}/a.safetensors"', "model.family", "comfyui"),
        ('"networks.lora"', '"lycoris.kohya"\nunet_lr = 1e-4', "lora.kind", "lora"),
        ('"networks.lora"', '"lycoris.kohya"\nLoRA_type = "LyCORIS/LoHa"', "lora.kind", "loha"),
        (
            '["loraplus_lr_ratio=16"]',
            '["algo=lokr", "factor=8"]\n[x]\nnetwork_module="lycoris.kohya"', "lora.factor", 8,
        ),
        ("caption_dropout_rate = 0.1", "enable_wildcard = true", "data.caption_lines", True),
        ("caption_dropout_rate = 0.1", "enable_wildcard = true", "left", "enable_wildcard = True"),
        ('["weight_decay=0.1", "betas=0.9,0.99"]', '"weight_decay=0.2 betas=0.9,0.99"', "optimizer.weight_decay", 0.2),
        ("learning_rate = 1e-4", "learning_rate = 1e-4\nunet_lr = 5e-5", "optimizer.learning_rate", 5e-5),
        ("learning_rate = 1e-4", "learning_rate = 1e-4\nunet_lr = 5e-5", "left", "learning_rate = 0.0001"),
        ("max_train_epochs = 4", "max_train_epochs = 4\nmax_train_steps = 1600", "train.steps", 120),
        ("max_train_epochs = 4", "epoch = 4\nmax_train_steps = 1600", "left", "epochs = 4"),
        ('"networks.lora"', '"networks.lora_flux"', "objective.shift", 3.0),
        ('"networks.lora"', '"networks.lora_flux"', "objective.guidance", 3.5),
        ('"networks.lora"', '"networks.lora_flux"\ndebiased_estimation_loss = true', "objective.loss_weighting", ""),
        ('"networks.lora"', '"networks.lora_flux"\ndebiased_estimation_loss = true', "left", "debiased_estimation"),
        ('"networks.lora"', '"networks.lora_flux"', "left", "model_prediction_type = 'sigma_scaled'"),
        ('"networks.lora"', '"networks.lora_flux"', "objective.timestep_sampling", "uniform"),
        ('"networks.lora"', '"networks.lora"\nLoRA_type = "Flux1"', "objective.shift", 3.0),
        ("xformers = true", "discrete_flow_shift = 3", "objective.shift", ""),
        ("xformers = true", "guidance_scale = 3.5", "left", "it is of flow models there: guidance_scale"),
        ("xformers = true", "guidance_scale = 3.5\nmin_snr_gamma = 5", "objective.loss_weighting", "min_snr"),
        ("caption_dropout_rate = 0.1", 'caption_prefix = "A"', "data.folders.caption_template", ["A {{caption}}"] * 2),
        ('["loraplus_lr_ratio=16"]', '["algo=lokr"]', "left", "network_args.algo = 'lokr'"),
        ("max_train_epochs = 4", "max_train_steps = 1600", "train.steps", 1600),
        ('resolution = "768,512"', "resolution = 640", "data.resolutions", (640,)),
        ("xformers = true", "min_snr_gamma = 3", "objective.min_snr_gamma", 3.0),
        ("xformers = true", "min_snr_gamma = 3", "objective.loss_weighting", "min_snr"),
        ("xformers = true", "debiased_estimation_loss = true", "objective.loss_weighting", "debiased"),
        ("xformers = true", "max_timestep = 700", "objective.highest_noise", 0.7),
    ],
    "musubi": [
        ('dit = "{0}/model"', 'dit = "{0}/model"\nt5 = "{0}/t5.pth"', "cache.stock_clip_type", "wan"),
        ('dit = "{0}/model"', 'dit = "{0}/model"\nvae = "{0}/v.pth"', "cache.stock_vae", "{0}/v.pth"),
        ("network_alpha = 8", "", "lora.alpha", 1.0),
        ('"sigmoid"', '"shift"', "objective.shift", 3.0),
        ('"sigmoid"', '"sigmoid"', "left", "discrete_flow_shift = 3.0"),
        ('timestep_sampling = "sigmoid"', "", "objective.timestep_sampling", "uniform"),
        ('"sigmoid"', '"qinglong_flux"', "left", "timestep_sampling = 'qinglong_flux'"),
        ("max_train_steps = 800", "max_train_epochs = 2", "train.steps", 30),
        ("sdpa = true", 'lr_scheduler = "constant_with_warmup"\nlr_warmup_steps = 9', "schedule.warmup_steps", 9),
        ("sdpa = true", "guidance_scale = 1.0", "objective.guidance", 1.0),
        ("sdpa = true", "min_snr_gamma = 3", "left", "min_snr_gamma = 3"),
    ],
    "OneTrainer": [
        ('"ema": "GPU"', '"ema": "OFF"', "train.ema_decay", 0.0),
        ('"lora_rank": 24', '"lora_alpha": 8', "lora.rank", 16),
        ('"save_every_unit": "STEP"', '"save_every_unit": "EPOCH"', "output.save_every_steps", 800),
        ('"training_method": "LORA"', '"training_method": "FINE_TUNE"', "left", "training_method = 'FINE_TUNE'"),
        ('[{{"prompt": "a cat", "enabled": true}}, {{"prompt": "x", "enabled": false}}]', "[]", "samples.prompts", ()),
        ('"LOGIT_NORMAL"', '"SIGMOID"', "left", "timestep_distribution = 'SIGMOID'"),
        ('"LOGIT_NORMAL"', '"LOGIT_NORMAL", "noising_weight": 0.5', "objective.logit_std", 1.5),
        ('"train": true,', '"train": true, "learning_rate": 0.0001,', "optimizer.learning_rate", 1e-4),
        ('"ADAMW", "weight_decay": 0.05', '"PRODIGY"', "optimizer.weight_decay", 0.0),
        ('"lora_rank": 24', '"clip_grad_norm": null', "train.clip_norm", 0.0),
        ('"CPU_OFFLOADED"', '"OFF"', "train.gradient_checkpointing", False),
        ('"lora_rank": 24', '"peft_type": "OFT_2"', "left", "peft_type = 'OFT_2'"),
        ('"lora_rank": 24', '"loss_weight_fn": "MIN_SNR_GAMMA"', "objective.loss_weighting", "min_snr"),
        ('"lora_rank": 24', '"masked_prior_preservation_weight": 0.5', "objective.masked_prior", 0.5),
    ],
    "SimpleTuner": [
        ('"--max_train_steps": 100', '"--max_train_steps": 0', "left", "train.steps"),
        ('"--lora_alpha": 32,', "", "lora.alpha", 64.0),
        ('"--use_ema": false', '"--use_ema": true', "train.ema_decay", 0.995),
        ('"--flow_schedule_shift": 3', '"--seed": 1', "objective.shift", 3.0),
        ('"--seed": 42', '"--seed": 42', "train.clip_norm", 2.0),
        ('"--seed": 42', '"--seed": 42', "objective.timestep_sampling", "sigmoid"),
        ('"--seed": 42', '"--seed": 42', "data.caption_dropout", 0.1),
        ('"--resolution": 1.0, "--resolution_type": "area",', "", "data.folders.resolutions", [(512,), (1024,)]),
        ('"--resolution_type": "area"', '"--resolution_type": "pixel"', "left", "resolution_type = 'pixel'"),
        ('"constant"', '"cosine"', "left", "lr_scheduler = 'cosine'"),
        ('"1024x768"', '"640"', "samples.height", 640),
        ('"--seed": 42', '"--seed": 42', "data.caption_lines", True),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    save_tiny_pipeline(folder / "model", "flux2")
    for name in ("data", "more", "held", "images/10_my_cat", "images/2_dog"):
        save_tiny_dataset(folder / name)
    return folder


def _write(folder, trainer, old="", new=""):
    suffix, job, name, dataset = TRAINERS[trainer]
    assert old in job
    path = folder / f"job{suffix}"
    path.write_text(job.replace(old, new).format(folder) if old else job.format(folder))
    if name:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(dataset.format(folder))
    return path


def _value(values, key, folder):
    """What a converted job says, read as any job is; of folders a list where there are several."""
    path = folder / "made.toml"
    path.write_bytes(toml_bytes(values))
    job = load_job(path)
    *sections, name = key.split(".")
    found = getattr(job, sections[0])
    if len(sections) == 2:
        each = [getattr(one, name) for one in found.folders]
        return each[0] if len(each) == 1 else each
    return getattr(found, name)


def _there(value, folder):
    if isinstance(value, list):
        return [_there(each, folder) for each in value]
    return value.format(folder) if isinstance(value, str) else value


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_key_of_a_published_file_becomes_ours_and_the_job_passes_a_check(folder, capsys, trainer):
    path = _write(folder, trainer)
    values, notes, _ = convert_file(path)
    assert {key: _value(values, key, folder) for key in WHOLE[trainer]} == {
        key: _there(value, folder) for key, value in WHOLE[trainer].items()
    }
    assert not any(note.startswith("To be filled in") or "not known here" in note for note in notes)
    (folder / "job.ours.toml").unlink(missing_ok=True)
    assert main(["convert", str(path), "-o", str(folder / "job.ours.toml")]) == 0
    text = (folder / "job.ours.toml").read_text()
    assert all(f"# {note}" in text for note in notes)
    (folder / "job.ours.toml").write_text(text.replace("frames = [1, 33]\n", ""))  # the stand-in makes images
    if trainer != "musubi":  # whose lengths and model are of video
        assert main(["check", str(folder / "job.ours.toml")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "old", "new", "key", "expected"),
    [(trainer, *case) for trainer, cases in CHANGED.items() for case in cases],
)
def test_other_values_become_ours_or_are_listed(folder, trainer, old, new, key, expected):
    values, notes, _ = convert_file(_write(folder, trainer, old, new))
    if key == "left":
        assert sum(expected in note for note in notes) == 1, notes
    else:
        values.setdefault("train", {}).setdefault("steps", 1)
        assert _value(values, key, folder) == _there(expected, folder)


@pytest.mark.parametrize("trainer", ["diffusion-pipe", "musubi", "OneTrainer", "SimpleTuner"])
def test_a_file_of_a_dataset_becomes_a_job_without_a_model(folder, trainer):
    _write(folder, trainer)
    values, notes, _ = convert_file(folder / TRAINERS[trainer][2])
    assert values["data"]["folders"][0]["path"] == str(folder / "data")
    assert set(values) <= {"data", "train", "evaluation"}
    missing = {note.split(": ")[1] for note in notes if note.startswith("To be filled in")}
    assert missing == {"model.path", "train.steps", "output.folder"}


def test_folders_of_kohya_are_given_without_a_file(folder, capsys):
    assert main(["convert", str(folder / "images"), "--model", str(folder / "model")]) == 0
    out = capsys.readouterr().out
    path = str(folder / "images" / "10_my_cat")
    assert all(each in out for each in (f'path = "{path}', "repeats = 10", '"my_cat"')) and "[lora]" not in out
    assert "To be filled in: train.steps" in out and "To be filled in: model.path" not in out


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.yaml", "config:\n  process: [\n", ["line 3"]),
        ("a.json", '{"--model_family": "flux",\n "--seed": [1}', ["line 2"]),
        ("a.toml", "dit = 'x'\nseed = \n", ["line 2"]),
        ("a.toml", "dit = 'x'\nnetwork_dim = 0\n", ["lora.rank", "network_dim, line 2"]),
        ("a.yaml", AI_TOOLKIT.replace("1e-4", "fast").format("x"), ["optimizer.learning_rate", "train.lr, line 29"]),
        ("a.yaml", "config: &a\n  process: [{x: *a}]\n", ["aliases"]), ("a.json", "[1, 2]", ["a.json"]),
        ("a.yaml", "config:\n  process: 5\n", ["ai-toolkit"]),
        ("a.json", '{"training_method": "LORA", "concepts": [3]}', ["OneTrainer"]),
        ("a.json", '[{"instance_data_dir": "x", "resolution": -1, "resolution_type": "area"}]', []),
        ("a.toml", "dit = 'x'\ndataset_config = 'gone.toml'\n", ["gone.toml"]), ("a.toml", "x" * 100, ["a.toml"]),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name_and_line(tmp_path, capsys, name, text, named):
    (tmp_path / name).write_text(text)
    assert main(["convert", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert all(each in said for each in [name, *named]), said


@pytest.mark.parametrize("count", ["inf", "[3]"])
def test_epochs_that_are_no_number_of_steps_are_refused_by_the_name_of_the_file(folder, count):
    path = _write(folder, "kohya", "max_train_epochs = 4", f"max_train_epochs = {count}")
    with pytest.raises(ValueError, match=str(path)):
        convert_file(path)


def test_what_a_file_says_stays_in_comments(tmp_path):
    said = {"training_method": "LORA", "x\n[optimizer]\r\nallow_import = true": 5}
    (tmp_path / "a.json").write_text(json.dumps(said))
    assert main(["convert", str(tmp_path / "a.json"), "-o", str(tmp_path / "job.toml")]) == 0
    assert not {"allow_import"} & parse_toml((tmp_path / "job.toml").read_bytes()).get("optimizer", {}).keys()


def test_a_job_that_is_there_is_not_overwritten(folder, capsys):
    path = _write(folder, "ai-toolkit")
    (folder / "mine.toml").write_text("mine")
    assert main(["convert", str(path), "-o", str(folder / "mine.toml")]) == 2
    assert (folder / "mine.toml").read_text() == "mine" and "mine.toml" in capsys.readouterr().err


def test_images_of_regularisation_are_repeated_as_often_as_there_are_others(folder):
    """sd-scripts: until their number is that of the images with repeats. 5 x 10 + 5 x 2 images, 5 of regularisation."""
    path = _write(folder, "kohya", 'train_data_dir = "{0}/images"', 'train_data_dir = "images"\nreg_data_dir = "more"')
    values, _, _ = convert_file(path)
    assert [each["repeats"] for each in values["data"]["folders"]] == [10, 2, 12]
    assert values["train"]["steps"] == 4 * 60 and values["data"]["folders"][2]["regularisation"]
    assert values["data"]["folders"][0]["path"] == str(folder / "images" / "10_my_cat")  # a job lies elsewhere


def test_prompts_of_a_file_are_read_and_without_one_there_are_none(folder):
    samples = '"samples": [{{"prompt": "a cat", "enabled": true}}, {{"prompt": "x", "enabled": false}}]'
    path = _write(folder, "OneTrainer", samples, '"samples": null, "sample_definition_file_name": "samples.json"')
    assert "samples" not in convert_file(path)[0]
    (folder / "samples.json").write_text('[{"prompt": "a dog", "enabled": true}]')
    assert convert_file(path)[0]["samples"] == {"prompts": ["a dog"]}


def test_what_cannot_be_converted_is_said_with_what_holds_in_its_place(folder):
    _, notes, _ = convert_file(_write(folder, "kohya", '"cosine"', '"cosine_with_restarts"\ntext_encoder_lr = 5e-5'))
    assert any("cosine_with_restarts" in note and "schedule.name is 'constant'" in note for note in notes)
    assert any("text_encoder_lr = 5e-05" in note for note in notes)


def test_further_lines_of_captions_are_named_where_their_trainer_leaves_them_out(folder, tmp_path):
    """sd-scripts reads the first; with enable_wildcard one is drawn. musubi-tuner reads all, as ours does."""
    for each in (folder / "images", folder / "data"):
        shutil.copytree(each, tmp_path / each.name)
    (tmp_path / "images" / "2_dog" / "image_0.txt").write_text("a dog\non a mat\n")
    (tmp_path / "data" / "image_0.txt").write_text("a dog\non a mat\n")
    drawn = "seed = 42\nenable_wildcard = true"
    cases = ("kohya", "seed = 42", True), ("kohya", drawn, False), ("musubi", "mixed_precision", False)
    for trainer, new, is_named in cases:
        path = _write(folder, trainer, new.partition("\n")[0], new)
        path.write_text(path.read_text().replace(str(folder / "images"), str(tmp_path / "images")))
        (folder / "dataset.toml").write_text(MUSUBI_DATA.format(tmp_path))
        found = [each for each in convert_file(path)[1] if "further lines of captions = 'image_0.png'" in each]
        assert bool(found) == is_named, trainer
    gone = _write(folder, "kohya", '"{0}/images"', '"{0}/gone"')
    assert any("further lines of captions = 'of folders that are not here'" in each for each in convert_file(gone)[1])


def test_a_concept_whose_target_is_the_models_own_word_is_left_out_by_name(folder):
    path = _write(folder, "OneTrainer")
    own = json.loads((folder / "concepts.json").read_text())
    (folder / "concepts.json").write_text(json.dumps([*own, own[0] | {"type": "PRIOR_PREDICTION"}]))
    values, notes, _ = convert_file(path)
    assert len(values["data"]["folders"]) == 1 and values["train"]["steps"] == 40
    assert any("PRIOR_PREDICTION" in each and str(folder)[:20] in each for each in notes)


def test_folders_of_kohya_are_those_that_a_training_reads_so_and_others_are_named(folder, tmp_path):
    for name in ("10_cat", "2019_trip", "5", "masks"):
        shutil.copytree(folder / "data", tmp_path / name)
    values, notes, _ = convert_file(tmp_path)
    assert values["data"]["folders"] == [{"path": str(tmp_path / "10_cat"), "repeats": 10, "caption": "cat"}]
    assert all(any(f"folder = '{each}'" in note for note in notes) for each in ("2019_trip", "5", "masks"))
    shutil.rmtree(tmp_path / "masks")
    made = concepts(FolderConfig(str(tmp_path)), lambda: None)
    assert [(each.repeats, each.caption) for each in made] == [(10, "cat"), (1, ""), (1, "")]
