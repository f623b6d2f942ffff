"""Special needs of some models: fields of configurations, and forms of inputs, by the names of models.

A form is as in `zoo.inputs.Recipe`: the number of one by the name of the argument, or the shape of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.inputs import Form

_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
_DEPTH = ("image_model_config.image_size", "patch_model_config.image_size", "fov_model_config.image_size")
_INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 16, "budget": 8, "compress_ratio": 4}
_RESNET = {
    "architecture": "resnet18", "model_args": {"in_chans": 3, "features_only": True, "out_indices": [1, 2, 3, 4]}
}  # fmt: skip
_VIT = {"img_size": 56, "depth": 1, "embed_dim": 64, "num_heads": 4}


def _under(part: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part}{name}": value for name, value in fields.items()}


_EDGETAM = {**_under("backbone_config.", _RESNET), "backbone_channel_list": [512, 256, 128, 64]}
_SWIN2 = {"image_size": 16, "embed_dim": 64, "depths": [2], "num_heads": [4], "num_layers": 1}
_EFFICIENT = {
    "in_channels": [32, 16, 24, 40, 80, 112, 192],
    "out_channels": [16, 24, 40, 80, 112, 192, 320],
    "width_coefficient": 1.0,
    "depth_coefficient": 0.1,
}
_LW_DETR = {"projector_scale_factors": [1.0], "projector_in_channels": [64], "num_feature_levels": 1}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "BeitForSemanticSegmentation": {
        "num_hidden_layers": 4,
        "_out_indices": [1, 2, 3, 4],
        "stage_names": ["stem", *_STAGES],
        "_out_features": _STAGES,
    },
    "dbrx": {"attn_config.clip_qkv": 8.0},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "mamba_n_heads": 8,
    },
    "led": {"attention_window": 4},
    "uvdoc": {
        "backbone_config._out_indices": [1, 2, 3, 4, 5, 6],
        "backbone_config._out_features": [*_STAGES, "stage5", "stage6"],
    },
    "cohere_compass": {"text_config.rope_parameters": _ROPE},
    "cohere_compass_text": {"rope_parameters": _ROPE},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["sparse"]},
    "depth_pro": {
        **dict.fromkeys(("patch_size", *_DEPTH), 56),
        "intermediate_hook_ids": [0, 0],
        "merge_padding_value": 1,
    },
    "kosmos-2": {"latent_query_num": 4},
    "xcodec2": {"quantization_dim": 128},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    **dict.fromkeys(("lw_detr", "LwDetrForObjectDetection"), _LW_DETR),
    "DPTForDepthEstimation": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    },
    "efficientnet": {**_EFFICIENT, "hidden_dim": 1280},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "dots3_note": {
        "text_config.rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
            for kind in ("full_attention", "sliding_attention", "indexed_attention")
        }
    },
    "edgetam": _under("vision_config.", _EDGETAM),
    "edgetam_vision_model": _EDGETAM,
    "pe_audio_video": {"audio_video_config.video_config.vision_config.model_args": _VIT},
    "pe_audio_video_encoder": {"video_config.vision_config.model_args": _VIT},
    "pe_video": {"video_config.vision_config.model_args": _VIT},
    "pe_video_encoder": {"vision_config.model_args": _VIT},
    "perception_lm": {"vision_config.architecture": "vit_tiny_patch16_224", "vision_config.model_args": _VIT},
    "qwen4_exp": _under("text_config.indexer_", _INDEXER),
    "qwen4_exp_text": _under("indexer_", _INDEXER),
    "seggpt": {
        "num_hidden_layers": 4,
        "intermediate_hidden_state_indices": [0, 1, 2, 3],
        "merge_index": 0,
        "image_size": (128, 64),
        "pretrain_image_size": 64,
    },
    "sam2": {"vision_config.backbone_config.hidden_size": 8},
    "sam2_hiera_det_model": {"hidden_size": 8},
    "sam2_vision_model": {"backbone_config.hidden_size": 8},
    "align": {**_under("vision_config.", _EFFICIENT), "projection_dim": 320},
    "speech_to_text": {"num_conv_layers": 2},
    **dict.fromkeys(("swin2sr", "Swin2SRForImageSuperResolution"), _SWIN2),
    "perceiver": {"d_latents": 64, "num_latents": 8, "num_self_attends_per_block": 2},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "gemma3n": {"text_config.num_kv_shared_layers": 0, "vision_config.architecture": "resnet18"},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
    "mamba2": {"num_heads": 8},
    "nemo_speechlm": {"text_config.n_groups": 2},
    "nemotron_h": {"n_groups": 2},
    "textnet": {"hidden_sizes": [64, 64, 128, 256, 512]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "omdet-turbo": {
        "timm_kwargs": {"img_size": 64, "always_partition": True},
        "encoder_in_channels": [192, 384, 768],
    },
    "timesfm2_5": {"context_length": 64},
    "oneformer": {"decoder_layers": 2},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    "step3p7": {"text_config.sliding_window": 4},
    "gemma3": {"mm_tokens_per_image": 4},
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 4},
}
INPUTS: Mapping[str, Mapping[str, Form]] = {
    "depth_pro": {"pixel_values": (3, 224, 224)},
    "idefics": {
        "input_ids": 0, "attention_mask": 0, "pixel_values": (1, 3, 64, 64), "image_attention_mask": ("ones", -1, 1)
    },
    "inkling2_vision": {"pixel_values": (0, 40, 40, 3), "image_grid_thw": 0},
    "instructblip": {"pixel_values": 0, "qformer_input_ids": 0, "input_ids": 0, "attention_mask": 0},
    "instructblipvideo": {
        "pixel_values": (4, 3, 64, 64), "qformer_input_ids": 0, "input_ids": 0, "attention_mask": 0
    },
    "kosmos-2": {
        "pixel_values": 0, "input_ids": ("tokens", 9), "attention_mask": ("ones", 9),
        "image_embeds_position_mask": ("numbers", 1, 1, 1, 1, 0, 0, 0, 0, 0),
    },
    "kyutai_speech_to_text": {"input_ids": ("tokens", -1, 33), "attention_mask": 0},
    "omdet-turbo": {
        "pixel_values": (3, 64, 64), "classes_input_ids": ("tokens", 9), "classes_attention_mask": ("ones", 9),
        "tasks_input_ids": ("tokens", 9), "tasks_attention_mask": ("ones", 9), "classes_structure": 0,
    },
    "timesfm2_5": {"past_values": (64,)},
    "voxtral_realtime": {
        "input_ids": ("tokens", 16), "attention_mask": ("ones", 16), "input_features": (128, 128)
    },
    "lightglue": {"pixel_values": (2, 3, 64, 64)},
    "mimi_decoder": {"latents": (64, 9)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": (64, 9)},
    "fun_asr_nano_encoder": {"input_features": (16, 560), "input_features_mask": ("ones", 16)},
    "siglip2_vision_model": {
        "pixel_values": (16, 768), "pixel_attention_mask": ("ones", 16), "spatial_shapes": ("numbers", 4, 4)
    },
    "SpeechT5ForTextToSpeech": {"input_ids": 0, "attention_mask": 0, "decoder_input_values": (-1, 80)},
    "align": {"input_ids": 0, "attention_mask": 0, "pixel_values": (3, 64, 64)},
    "pi0": {
        "action_embeds": (5, 64), "input_ids": 0, "attention_mask": 0, "pixel_values": (1, 3, 64, 64),
        "pixel_attention_mask": ("ones", 1),
    },
    "pe_video": {"input_ids": 0, "attention_mask": 0, "pixel_values_videos": (4, 3, 56, 56)},
    "pe_video_encoder": {"pixel_values_videos": (4, 3, 56, 56)},
    "pe_audio_video": {"input_ids": 0, "pixel_values_videos": (4, 3, 56, 56), "input_values": (1, 7680)},
    "pe_audio_video_encoder": {"pixel_values_videos": (4, 3, 56, 56), "input_values": (1, 7680)},
    "qwen3_asr_encoder": {"input_features": (128, 100), "input_features_mask": ("ones", 100)},
    "seggpt": dict.fromkeys(("pixel_values", "prompt_pixel_values", "prompt_masks"), (3, 64, 64)),
    "speecht5": {"input_values": (-1, 64), "decoder_input_values": (-1, 64)},
    "timesfm": {"past_values": (64,), "past_values_padding": ("zeros", 64), "freq": ("zeros", 1)},
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": (64, 9)},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": (1, 6400)},
    "xcodec2": {"input_values": (1, 1920), "input_features": (6, 64)},
    "muse_glimmer_assistant": {
        "noise_embeds": (9, 64), "context_hidden_states": (9, 320), "attention_mask": ("ones", 18)
    },
}  # fmt: skip
