"""Keys of axolotl's plugins and of optimizers of its own, all refused, each with what to do instead."""

from __future__ import annotations

_DISTILLATION = "distillation is TRL's: a script with trl.experimental.gkd and mg.optimize(trainer.model)"
_GYM = "rewards are functions by dotted name; write trl: {reward_funcs: [module.function]}"
_SPECTRUM = "layers are not chosen by their spectrum; write lora_target_modules, or peft_layers_to_transform"
_GROKFAST = "gradients are not filtered; leave it out"
_ELSEWHERE = "training runs on this machine; leave it out"
_MORA = "MoRA is not in PEFT; write adapter: lora"
_ROUTING = "the router is the model's own; leave it out"

_PLUGINS: dict[str, str] = {
    _DISTILLATION: (
        "kd_trainer kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_temperature kd_temperature_min "
        "kd_online_server kd_online_server_base_url kd_online_timeout kd_online_topk"
    ),
    _GYM: (
        "nemo_gym_enabled nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets "
        "nemo_gym_dir nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn "
        "nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_verify_timeout"
    ),
    _SPECTRUM: "spectrum_model_name spectrum_top_fraction",
    _GROKFAST: "grokfast_alpha grokfast_lamb",
    _ELSEWHERE: "hatchery",
    _MORA: "mora",
    _ROUTING: "dense_mixer",
}
_OPTIMIZERS: dict[str, str] = {
    "it is for the optimizer came_pytorch, which is not here; write optimizer: adamw_torch": (
        "adam_beta3 adam_epsilon2"
    ),
    "it is for the optimizer dion, which is not here; write optimizer: adamw_torch": (
        "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of"
    ),
    "it is for the optimizer q_galore_adamw8bit, which is not here; write optimizer: adamw_torch": (
        "qgalore_rank qgalore_scale qgalore_update_proj_gap qgalore_proj_type qgalore_proj_quant "
        "qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj "
        "qgalore_queue_size"
    ),
}


def _by_name(reasons: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


OF_PLUGINS = _by_name(_PLUGINS)
OF_OPTIMIZERS = _by_name(_OPTIMIZERS)
